"""EPIC's LegoLink: the first tokens of every chunk. Based on arXiv 2410.15332."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import torch
from torch import Tensor

from qcfuse.fusion.layout import Layout
from qcfuse.selectors.base import Selector
from qcfuse.types import budget


@dataclass(frozen=True, kw_only=True)
class Epic(Selector):
    """The first floor(rho * len) tokens of each chunk.

    What flooring leaves of |P| goes, one token each, to the chunks that lost most by it (equal losses: the earlier
    chunk first), so that the budget is met exactly. The paper fixes a count and leaves its relation to rho open.
    """

    name = "epic"
    signal = "chunk starts"
    uses_query = "none"
    pipeline_compatible = True

    def pick(self, layout: Layout, rho: float, importance: Tensor | None, seed: int) -> Tensor:
        counts = [budget(rho, length) for length in layout.chunk_lengths]
        lost = [Decimal(str(rho)) * n - count for n, count in zip(layout.chunk_lengths, counts, strict=True)]
        leftover = budget(rho, layout.num_context) - sum(counts)
        for chunk in sorted(range(len(counts)), key=lambda i: -lost[i])[:leftover]:
            counts[chunk] += 1
        spans = zip(layout.chunk_starts, counts, strict=True)
        return torch.cat([torch.arange(start, start + count) for start, count in spans]).to(layout.device)
