"""Selectors and anchor rules with the defaults of conf/, for tests that build them by hand."""

from __future__ import annotations

from typing import Any

from qcfuse.anchors.knorm import Knorm
from qcfuse.anchors.kvzip import KVzip
from qcfuse.anchors.sink import Sink
from qcfuse.selectors.base import Selector
from qcfuse.selectors.cacheblend import CacheBlend
from qcfuse.selectors.endpoints import DirectReuse, FullPrefill
from qcfuse.selectors.epic import Epic
from qcfuse.selectors.fusionrag import FusionRAG
from qcfuse.selectors.prophetkv import ProphetKV
from qcfuse.selectors.qcfuse import QCFuse
from qcfuse.selectors.random import Random

PROBE = {"top_k": 3, "reduce": "max", "score_rope": "request"}
RULE = {"scope": "chunk", "num_sinks": 0, "layer_reduce": "mean"}
SWEPT = ("random", "epic", "fusionrag", "prophetkv", "qcfuse")


def selector(name: str, **changes: Any) -> Selector:
    makers = {
        "qcfuse": (QCFuse, {**PROBE, "anchor_ratio": 0.1, "layers": "default"}),
        "prophetkv": (ProphetKV, {**PROBE, "anchor_ratio": 1.0, "layers": "all"}),
        "fusionrag": (FusionRAG, {**PROBE, "anchor_ratio": 0.0, "layers": "final"}),
        "epic": (Epic, {}),
        "random": (Random, {}),
        "cacheblend": (CacheBlend, {"variant": "paper", "first_share": 1.3}),
        "direct_reuse": (DirectReuse, {}),
        "full_prefill": (FullPrefill, {}),
    }
    make, defaults = makers[name]
    return make(**{**defaults, **changes})


def rule(name: str, **changes: Any):
    makers = {
        "sink": (Sink, {}),
        "knorm": (Knorm, {}),
        "kvzip": (KVzip, {"variant": "full_repeat", "reduce": "max", "instruction": "repeat"}),
    }
    make, defaults = makers[name]
    return make(**{**RULE, **defaults, **changes})
