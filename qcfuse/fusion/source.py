"""Where stored KV comes from while a request is fused."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qcfuse.fusion.layout import Layout
from qcfuse.types import ChunkCache, PrefixCache

if TYPE_CHECKING:
    from qcfuse.fusion.probe import ProbeSpec


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Some stored rows of a request, in the order of their tokens (so that they are written front to back).

    positions: [n] int64, request positions. parts: for each stored tensor that rows come from, which one it is (None:
    the prefix) and its rows.
    """

    positions: Tensor
    parts: tuple[tuple[int | None, Tensor], ...]


class Source(ABC):
    """Stored rows of one request, un-rotated. Layers count as in the model; layer 0 is not stored (its K and V depend
    on the embeddings alone).

    A source that reads from storage learns what is needed by `begin` and `decide`, is asked to `await_*` before rows of
    a layer are used, and may forget them after `release`. One whose rows lie in memory needs none of that.
    """

    layout: Layout
    per_layer_order: bool

    @abstractmethod
    def anchor_mask(self, anchor_ratio: float, layer: int) -> Tensor:
        """[N] bool: per chunk its first ceil(r_a * n) rows in rank order (of `layer` where ranks are per layer)."""

    @abstractmethod
    def subset(self, keep: Tensor, layer: int = 1) -> Subset:
        """The rows of the tokens kept. keep: [prefix + N] bool."""

    @abstractmethod
    def keys(self, layer: int, subset: Subset) -> Tensor:
        """[n, Hkv, D] un-rotated; valid until the next call."""

    @abstractmethod
    def values(self, layer: int, subset: Subset) -> Tensor:
        """[n, Hkv, D]; valid until the next call."""

    def begin(self, spec: ProbeSpec | None) -> None:  # noqa: B027
        """A request starts: what its probe needs may be read."""

    def decide(self, selected: Tensor, first: int = 1, last: int | None = None) -> None:  # noqa: B027
        """P is known ([|P|] context indices): all other rows will be needed, from layer `first` to `last` (None: the
        deepest one). Methods that narrow P on their way down decide in parts."""

    def await_view(self, layer: int) -> None:  # noqa: B027
        """Until the rows are there that the probe attends to."""

    def await_keys(self, layer: int) -> None:  # noqa: B027
        """Until all keys are there that are scored."""

    def await_rest(self, layer: int) -> None:  # noqa: B027
        """Until all rows outside P are there."""

    def release(self, phase: str, layer: int) -> None:  # noqa: B027
        """What `await_view` (phase view), `await_keys` (keys) or `await_rest` (rest) brought has been used."""


class MemorySource(Source):
    """Chunk and prefix caches that lie in memory."""

    def __init__(self, layout: Layout, prefix: PrefixCache, chunks: Sequence[ChunkCache]) -> None:
        assert tuple(c.num_tokens for c in chunks) == layout.chunk_lengths, "caches of other chunks"
        self.layout = layout
        self.prefix = prefix
        self.chunks = chunks
        self.per_layer_order = chunks[0].order.dim() == 2
        self._buffers: dict[str, Tensor] = {}

    def anchor_mask(self, anchor_ratio: float, layer: int) -> Tensor:
        return anchor_mask(self.layout, [self._order(chunk, layer) for chunk in self.chunks], anchor_ratio)

    def subset(self, keep: Tensor, layer: int = 1) -> Subset:
        num_prefix = self.layout.num_prefix
        rows = keep[:num_prefix].nonzero()[:, 0]
        parts: list[tuple[int | None, Tensor]] = [(None, rows)]
        positions = [rows]
        for i, (start, chunk) in enumerate(zip(self.layout.chunk_starts, self.chunks, strict=True)):
            start += num_prefix
            tokens = keep[start : start + chunk.num_tokens].nonzero()[:, 0]
            parts.append((i, self._order(chunk, layer).argsort()[tokens]))
            positions.append(tokens + start)
        return Subset(positions=torch.cat(positions), parts=tuple(parts))

    def keys(self, layer: int, subset: Subset) -> Tensor:
        return self._gather("k", layer, subset)

    def values(self, layer: int, subset: Subset) -> Tensor:
        return self._gather("v", layer, subset)

    def _order(self, chunk: ChunkCache, layer: int) -> Tensor:
        return rank_order(chunk.order, layer)

    def _gather(self, name: str, layer: int, subset: Subset) -> Tensor:
        assert layer >= 1, "layer 0 is computed, not stored"
        sources = [self.prefix if i is None else self.chunks[i] for i, _ in subset.parts]
        tensors = [getattr(source, name)[layer - 1] for source in sources]
        return gather_rows(tensors, subset, self._buffers, name)


def gather_rows(tensors: Sequence[Tensor], subset: Subset, buffers: dict[str, Tensor], name: str) -> Tensor:
    """The rows of a subset, [n, Hkv, D], from one tensor [*, Hkv, D] a part; buffers[name] is reused and may grow."""
    num_rows = subset.positions.shape[0]
    buffer = buffers.get(name)
    if buffer is None or buffer.shape[0] < num_rows:
        buffer = buffers[name] = tensors[0].new_empty((num_rows, *tensors[0].shape[1:]))
    start = 0
    for tensor, (_, rows) in zip(tensors, subset.parts, strict=True):
        end = start + rows.shape[0]
        torch.index_select(tensor, 0, rows, out=buffer[start:end])
        start = end
    return buffer[:num_rows]


def rank_order(order: Tensor, layer: int) -> Tensor:
    """[n] the token of each rank. Layer 0 is not stored and goes by layer 1's ranks."""
    return order[max(layer, 1) - 1] if order.dim() == 2 else order


def anchor_mask(layout: Layout, orders: Sequence[Tensor], anchor_ratio: float) -> Tensor:
    """[N] bool: of each chunk (order [n], rank -> token) the first ceil(r_a * n)."""
    mask = torch.zeros(layout.num_context, dtype=torch.bool, device=layout.device)
    for start, order in zip(layout.chunk_starts, orders, strict=True):
        mask[start + order[: anchor_count(anchor_ratio, order.shape[0])]] = True
    return mask


def anchor_count(anchor_ratio: float, num_tokens: int) -> int:
    """ceil(r_a * n), capped at n, in decimal arithmetic (0.07 x 100 is 7, which binary floats turn into 8)."""
    count = (Decimal(str(anchor_ratio)) * num_tokens).to_integral_value(rounding=ROUND_CEILING)
    return min(int(count), num_tokens)
