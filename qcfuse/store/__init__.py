"""Chunk files, their index and eviction, throttled links and the read planner."""

from qcfuse.store.config import StoreConfig
from qcfuse.store.geometry import KVGeometry
from qcfuse.store.match import MatchPreset
from qcfuse.store.throttle import LinkConfig

__all__ = ["KVGeometry", "LinkConfig", "MatchPreset", "StoreConfig"]
