"""Where stored KV comes from while a request is fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

import torch
from torch import Tensor

from qcfuse.fusion.layout import Layout
from qcfuse.types import ChunkCache, PrefixCache


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Some stored rows of a request, in the order of their tokens (so that they are written front to back).

    positions: [n] int64, request positions. parts: per stored segment its index (None: the prefix) and its rows.
    """

    positions: Tensor
    parts: tuple[tuple[int | None, Tensor], ...]


class MemorySource:
    """Chunk and prefix caches that lie in memory. Rows come back un-rotated and in token order.

    Layers count as in the model; layer 0 is not stored (its K and V depend on the embeddings alone).
    """

    def __init__(self, layout: Layout, prefix: PrefixCache, chunks: Sequence[ChunkCache]) -> None:
        assert tuple(c.num_tokens for c in chunks) == layout.chunk_lengths, "caches of other chunks"
        self.layout = layout
        self.prefix = prefix
        self.chunks = chunks
        self.per_layer_order = chunks[0].order.dim() == 2
        self._buffers: dict[str, Tensor] = {}

    def anchor_mask(self, anchor_ratio: float, layer: int) -> Tensor:
        """[N] bool: per chunk its first ceil(r_a * n) rows in rank order (of `layer` where ranks are per layer)."""
        mask = torch.zeros(self.layout.num_context, dtype=torch.bool, device=self.layout.device)
        for start, chunk in zip(self.layout.chunk_starts, self.chunks, strict=True):
            count = anchor_count(anchor_ratio, chunk.num_tokens)
            mask[start + self._order(chunk, layer)[:count]] = True
        return mask

    def subset(self, keep: Tensor, *, prefix: bool, layer: int = 1) -> Subset:
        """keep: [N] bool over context indices. The rows to be placed, prefix first where asked for."""
        parts: list[tuple[int | None, Tensor]] = []
        positions = []
        if prefix and self.layout.num_prefix:
            rows = self.layout.positions[: self.layout.num_prefix]
            parts.append((None, rows))
            positions.append(rows)
        for i, (start, chunk) in enumerate(zip(self.layout.chunk_starts, self.chunks, strict=True)):
            tokens = keep[start : start + chunk.num_tokens].nonzero()[:, 0]
            parts.append((i, self._order(chunk, layer).argsort()[tokens]))
            positions.append(tokens + start + self.layout.num_prefix)
        empty = self.layout.positions[:0]
        return Subset(positions=torch.cat(positions) if positions else empty, parts=tuple(parts))

    def keys(self, layer: int, subset: Subset) -> Tensor:
        """[n, Hkv, D] un-rotated; valid until the next call."""
        return self._gather("k", layer, subset)

    def values(self, layer: int, subset: Subset) -> Tensor:
        """[n, Hkv, D]; valid until the next call."""
        return self._gather("v", layer, subset)

    def _order(self, chunk: ChunkCache, layer: int) -> Tensor:
        """Layer 0 is not stored and goes by layer 1's ranks."""
        return chunk.order[max(layer, 1) - 1] if self.per_layer_order else chunk.order

    def _gather(self, name: str, layer: int, subset: Subset) -> Tensor:
        assert layer >= 1, "layer 0 is computed, not stored"
        num_rows = subset.positions.shape[0]
        like = getattr(self.chunks[0], name)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < num_rows:
            buffer = self._buffers[name] = like.new_empty((num_rows, *like.shape[2:]))
        start = 0
        for index, rows in subset.parts:
            stored = self.prefix if index is None else self.chunks[index]
            end = start + rows.shape[0]
            torch.index_select(getattr(stored, name)[layer - 1], 0, rows, out=buffer[start:end])
            start = end
        return buffer[:num_rows]


def anchor_count(anchor_ratio: float, num_tokens: int) -> int:
    """ceil(r_a * n), capped at n, in decimal arithmetic (0.07 x 100 is 7, which binary floats turn into 8)."""
    count = (Decimal(str(anchor_ratio)) * num_tokens).to_integral_value(rounding=ROUND_CEILING)
    return min(int(count), num_tokens)
