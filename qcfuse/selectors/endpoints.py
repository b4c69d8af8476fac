"""The two ends of the rho axis: direct reuse recomputes nothing, full prefill everything."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qcfuse.fusion.layout import Layout
from qcfuse.selectors.base import Selector


@dataclass(frozen=True, kw_only=True)
class DirectReuse(Selector):
    """PIC caches stitched as they are; only the suffix is computed."""

    name = "direct_reuse"
    signal = "none"
    uses_query = "none"
    pipeline_compatible = True
    fixed_rho = 0.0

    def pick(self, layout: Layout, rho: float, importance: Tensor | None, seed: int) -> Tensor:
        return layout.positions[:0]


@dataclass(frozen=True, kw_only=True)
class FullPrefill(Selector):
    """The quality reference. Timed by the engine's own prefill and by the fusion loop at rho = 1; the faster counts."""

    name = "full_prefill"
    signal = "none"
    uses_query = "none"
    pipeline_compatible = True
    fixed_rho = 1.0

    def pick(self, layout: Layout, rho: float, importance: Tensor | None, seed: int) -> Tensor:
        return layout.positions[: layout.num_context]
