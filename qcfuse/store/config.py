"""What conf/storage/*.yaml becomes: frozen, checked before any model loads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qcfuse.store.match import MatchPreset
from qcfuse.store.throttle import LinkConfig

if TYPE_CHECKING:
    from qcfuse.store.geometry import KVGeometry
    from qcfuse.store.store import ChunkStore

GB = 10**9
TIERS = ("ram", "disk", "ram_disk")


def check_key(name: str, key: str) -> str:
    """A key names a directory: letters, digits, dot, dash, underscore."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", key):
        raise ValueError(f"{name}={key!r} must be 1 to 128 letters, digits, '.', '-' or '_', and not start with a dot")
    return key


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """tier: ram, disk, or ram_disk (memory over disk). Capacities in GB of 1e9 bytes.

    rows_per_block: rows under one checksum, the unit of partial reads. head_groups: tensor-parallel ranks whose heads
    are stored apart. gap: blocks that the planner reads through to join neighbours. speculate: whether the link runs
    ahead while P is unknown. buffer_gb: limit of all read buffers together. match: name of the preset whose ratio of
    load time to compute time `bandwidth` stands for, null for plain GB/s; an unthrottled link has nothing to match.
    """

    tier: str
    root: str
    ram_gb: float
    disk_gb: float
    rows_per_block: int
    head_groups: int
    gap: int
    speculate: bool
    buffer_gb: float
    match: str | None
    presets: Mapping[str, MatchPreset]
    link: LinkConfig

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ValueError(f"storage tier {self.tier!r} is unknown; use one of {', '.join(TIERS)}")
        if self.uses_ram and not self.ram_gb > 0 or self.uses_disk and not self.disk_gb > 0:
            raise ValueError(f"ram_gb={self.ram_gb}, disk_gb={self.disk_gb}: a tier in use needs a capacity above 0 GB")
        if self.rows_per_block < 1 or self.head_groups < 1:
            raise ValueError(f"rows_per_block={self.rows_per_block} and head_groups={self.head_groups} must be "
                             "1 or more")
        if self.gap < 0 or not self.buffer_gb > 0:
            raise ValueError(f"gap={self.gap} must be 0 or more blocks and buffer_gb={self.buffer_gb} above 0")
        if self.match is not None and self.match not in self.presets:
            raise ValueError(f"storage.match={self.match!r} is no preset; use one of {', '.join(sorted(self.presets))}")

    @property
    def uses_ram(self) -> bool:
        return self.tier != "disk"

    @property
    def uses_disk(self) -> bool:
        return self.tier != "ram"

    @property
    def ram_bytes(self) -> int:
        return int(self.ram_gb * GB)

    @property
    def disk_bytes(self) -> int:
        return int(self.disk_gb * GB)

    @property
    def buffer_bytes(self) -> int:
        return int(self.buffer_gb * GB)

    @property
    def root_path(self) -> Path:
        return Path(self.root).expanduser()

    def open(self, *, model_key: str, anchor_key: str, geometry: KVGeometry) -> ChunkStore:
        """The store of one model (key: fingerprint of weights, dtype, rope and norm) under one anchor rule.

        Raises ValueError for a key that cannot name a directory, OSError where the root cannot be created.
        """
        from qcfuse.store.store import ChunkStore

        return ChunkStore(self, model_key=model_key, anchor_key=anchor_key, geometry=geometry)
