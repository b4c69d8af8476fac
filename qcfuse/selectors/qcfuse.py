"""QCFuse: a compressed, query-aware view. Based on arXiv 2606.05875, sections 4.1 and 4.2."""

from __future__ import annotations

from dataclasses import dataclass

from qcfuse.selectors.base import ProbeSelector


@dataclass(frozen=True, kw_only=True)
class QCFuse(ProbeSelector):
    """The probe sees each chunk's anchors, is scored at the profiled critical layers and stops after the deepest."""

    name = "qcfuse"
    signal = "question attention at critical layers, anchors in view"
    uses_query = "yes"
    pipeline_compatible = True
