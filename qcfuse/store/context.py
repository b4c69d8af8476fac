"""The stored rows of one request's context: which rows there are, which context tokens they serve, where they land.

Rows are numbered through all distinct chunks in the order they first occur. Every chunk starts on a multiple of a
whole number of pages and of blocks, so that a page of the file is a page of the buffer (direct reads need no copy)
and K or V of a layer is one regular tensor [num_rows, Hkv / G, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np

from qcfuse.store.geometry import PAGE_BYTES, KVGeometry, round_up


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextRows:
    """num_tokens: [U] rows of each distinct chunk. orders: each [n], or [L - 1, n] with an order per layer.

    occurrences: the distinct chunk at each place of the context. rows_per_block: the files' unit of verification.
    """

    geometry: KVGeometry
    num_tokens: tuple[int, ...]
    orders: tuple[np.ndarray, ...]
    occurrences: tuple[int, ...]
    rows_per_block: int

    @classmethod
    def of(
        cls, geometry: KVGeometry, chunk_ids: Sequence[tuple[int, ...]], orders: Sequence[np.ndarray],
        rows_per_block: int,
    ) -> ContextRows:  # fmt: skip
        """orders: one per chunk of the request, rank -> token of the chunk; chunks with equal ids are one chunk."""
        place = {tuple(ids): idx for idx, ids in reversed(list(enumerate(chunk_ids)))}
        distinct = sorted(place.values())
        rank = {tuple(chunk_ids[idx]): i for i, idx in enumerate(distinct)}
        return cls(geometry=geometry, num_tokens=tuple(len(chunk_ids[i]) for i in distinct),
                   orders=tuple(np.asarray(orders[i]) for i in distinct),
                   occurrences=tuple(rank[tuple(ids)] for ids in chunk_ids), rows_per_block=rows_per_block)

    def __post_init__(self) -> None:
        for count, order in zip(self.num_tokens, self.orders, strict=True):
            if order.shape[-1] != count:
                raise ValueError(f"a row order of {order.shape[-1]} tokens was given for a chunk of {count}")

    @cached_property
    def num_context_tokens(self) -> int:
        return sum(self.num_tokens[i] for i in self.occurrences)

    @cached_property
    def row_base(self) -> np.ndarray:
        """[U + 1] first row of each distinct chunk; the last entry is the number of rows, padding included."""
        unit = lcm(PAGE_BYTES, self.geometry.row_bytes * self.rows_per_block) // self.geometry.row_bytes
        return np.cumsum([0, *(round_up(count, unit) for count in self.num_tokens)])

    @property
    def num_rows(self) -> int:
        return int(self.row_base[-1])

    @property
    def num_blocks(self) -> int:
        return self.num_rows // self.rows_per_block

    @cached_property
    def block_chunk(self) -> np.ndarray:
        """[num_blocks] the distinct chunk of each block."""
        return np.repeat(np.arange(len(self.num_tokens)), np.diff(self.row_base) // self.rows_per_block)

    @cached_property
    def block_rows(self) -> np.ndarray:
        """[num_blocks] rows that really exist in each block."""
        first_row = np.arange(self.num_blocks) * self.rows_per_block
        ends = self.row_base[:-1] + np.asarray(self.num_tokens)
        return np.clip(ends[self.block_chunk] - first_row, 0, self.rows_per_block)

    def rows_and_tokens(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """[N], [N]: row and context index of each pair; a row appears once per occurrence of its chunk."""
        return self._pairs(layer) if self.has_layer_orders else self._shared_pairs

    @cached_property
    def has_layer_orders(self) -> bool:
        """Whether ranks differ by layer."""
        return any(order.ndim == 2 for order in self.orders)

    @cached_property
    def _shared_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        return self._pairs(1)

    def _pairs(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        rows, tokens, start = [], [], 0
        for chunk in self.occurrences:
            order = self.orders[chunk]
            tokens.append(start + (order[layer - 1] if order.ndim == 2 else order))
            rows.append(self.row_base[chunk] + np.arange(self.num_tokens[chunk]))
            start += self.num_tokens[chunk]
        return np.concatenate(rows), np.concatenate(tokens)

    def row_of_token(self, layer: int) -> np.ndarray:
        """[N] int64: the row that holds each context token's K and V in a layer (as place_kv wants it)."""
        rows, tokens = self.rows_and_tokens(layer)
        found = np.empty(self.num_context_tokens, np.int64)
        found[tokens] = rows
        return found

    def rows_for(self, tokens: np.ndarray, layer: int) -> np.ndarray:
        """[num_rows] bool: the rows that any of the marked context tokens (bool [N]) needs."""
        rows, token_of = self.rows_and_tokens(layer)
        wanted = np.zeros(self.num_rows, bool)
        wanted[rows[tokens[token_of]]] = True
        return wanted

    def leading_rows(self, counts: Sequence[int]) -> np.ndarray:
        """[num_rows] bool: the first counts[i] rows (best anchor ranks) of each distinct chunk."""
        wanted = np.zeros(self.num_rows, bool)
        for base, count in zip(self.row_base, counts, strict=False):
            wanted[base : base + count] = True
        return wanted

    def trailing_rows(self, share: float) -> np.ndarray:
        """[num_rows] bool: the last floor(share x n) rows (lowest anchor ranks) of each distinct chunk."""
        wanted = np.zeros(self.num_rows, bool)
        for base, count in zip(self.row_base, self.num_tokens, strict=False):
            wanted[base + count - int(share * count) : base + count] = True
        return wanted
