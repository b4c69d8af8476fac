"""FusionRAG's query-guided selection. Based on arXiv 2601.12904 (question prefilled without context, last layer)."""

from __future__ import annotations

from dataclasses import dataclass

from qcfuse.selectors.base import ProbeSelector


@dataclass(frozen=True, kw_only=True)
class FusionRAG(ProbeSelector):
    """The probe sees prefix and suffix only; its last-layer queries score the chunks' last-layer keys."""

    name = "fusionrag"
    signal = "question attention at the last layer, no context in view"
    uses_query = "partial"
    pipeline_compatible = True
