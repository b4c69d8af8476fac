"""CacheBlend: the tokens whose fresh K and V differ most from the stored ones. Based on EuroSys '25, section 4.3."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from torch import Tensor

from qcfuse.fusion.layout import Layout
from qcfuse.fusion.narrow import NarrowingRule
from qcfuse.selectors.base import Selector
from qcfuse.types import budget

CHECK_LAYER = 1
"""The first layer whose stored K and V can differ: layer 0's depend on the embeddings alone."""


@dataclass(frozen=True, kw_only=True)
class CacheBlend(Selector):
    """Starts with every context token; layers 0 and 1 are computed for all, then rows drop out by deviation.

    variant: `paper` compares K and V (L1; keys un-rotated) at every layer from 1 on and keeps a share that falls
    linearly from first_share * rho, with mean rho over the layers behind the first comparison; `author_repo` compares
    V (squared L2) at layer 1, once; `lmcache` compares K (squared L2, which rotation does not change) at layer 1, once,
    and puts the stored rows of dropped tokens back at that layer.
    """

    name = "cacheblend"
    signal = "deviation of fresh from stored KV"
    uses_query = "none"
    pipeline_compatible = True

    variant: Literal["paper", "author_repo", "lmcache"]
    first_share: float

    def __post_init__(self) -> None:
        if self.variant not in _DEVIATIONS:
            raise ValueError(f"selector.variant={self.variant!r} is unknown; choose {', '.join(_DEVIATIONS)}")
        if not 1 <= self.first_share <= 2:
            raise ValueError(f"selector.first_share={self.first_share} must lie in [1, 2]; the paper's figure is 1.3")

    def pick(self, layout: Layout, rho: float, importance: Tensor | None, seed: int) -> Tensor:
        """All of the context, or nothing where the budget is nothing (direct reuse): `narrowing` does the rest."""
        count = layout.num_context if budget(rho, layout.num_context) else 0
        return layout.positions[:count]

    def narrowing(self, layout: Layout, rho: float, num_layers: int) -> NarrowingRule | None:
        num_context = layout.num_context
        count = budget(rho, num_context)
        later = range(CHECK_LAYER + 1, num_layers)
        if count in (0, num_context) or not later:
            return None
        if self.variant == "paper":
            counts = falling_counts(rho, num_context, len(later), self.first_share)
        else:
            counts = [count]
        return NarrowingRule(
            counts={layer - 1: kept for layer, kept in zip(later, counts, strict=False)},
            deviation=_DEVIATIONS[self.variant],
            keeps_fresh=self.variant != "lmcache",
        )


def falling_counts(rho: float, num_context: int, num_layers: int, first_share: float) -> list[int]:
    """Rows per layer, never rising, from first_share * rho * N downwards (at most N), with the exact total
    num_layers * floor(rho * N)."""
    mean = budget(rho, num_context)
    start = min(Fraction(str(first_share)) * mean, Fraction(num_context))
    fall = 2 * (start - mean) / max(num_layers - 1, 1)
    counts = [int(start - fall * i) for i in range(num_layers)] if num_layers > 1 else [mean]
    left = num_layers * mean - sum(counts)
    while left:
        for i in range(num_layers):
            if left and counts[i] < (counts[i - 1] if i else num_context):
                counts[i] += 1
                left -= 1
    return counts


def _l1_of_both(k: Tensor, v: Tensor, stored_k: Tensor, stored_v: Tensor) -> Tensor:
    return ((k - stored_k).abs().float() + (v - stored_v).abs().float()).sum((1, 2))


def _l2_of_values(k: Tensor, v: Tensor, stored_k: Tensor, stored_v: Tensor) -> Tensor:
    return (v - stored_v).float().square().sum((1, 2))


def _l2_of_keys(k: Tensor, v: Tensor, stored_k: Tensor, stored_v: Tensor) -> Tensor:
    return (k - stored_k).float().square().sum((1, 2))


_DEVIATIONS = {"paper": _l1_of_both, "author_repo": _l2_of_values, "lmcache": _l2_of_keys}
