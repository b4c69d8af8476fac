"""ProphetKV: the full view. Based on arXiv 2602.02579 (attention of the question over all reused keys, all layers)."""

from __future__ import annotations

from dataclasses import dataclass

from qcfuse.selectors.base import ProbeSelector


@dataclass(frozen=True, kw_only=True)
class ProphetKV(ProbeSelector):
    """The probe sees the whole stitched context and is scored at every layer: all KV is loaded before selection."""

    name = "prophetkv"
    signal = "question attention at all layers, whole context in view"
    uses_query = "yes"
    pipeline_compatible = False
