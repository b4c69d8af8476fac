"""The fused KV cache of one request: rotated keys and values of every layer, in request order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qcfuse.decoder.base import Decoder


@dataclass(kw_only=True)
class KVCache:
    """k, v: [L, S, Hkv, D]; k is rotated. Rows are request positions (or, for a compact view, its own order).

    placed_k, placed_v: layer -> [prefix + N] bool, the stored rows that stand in the cache already, so that nothing is
    placed twice. Masks are never written to: layers share them.
    """

    k: Tensor
    v: Tensor
    placed_k: dict[int, Tensor] = field(default_factory=dict)
    placed_v: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, decoder: Decoder, num_rows: int, num_layers: int | None = None) -> KVCache:
        shape = (num_layers or decoder.num_layers, num_rows, decoder.num_kv_heads, decoder.head_dim)
        k = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        return cls(k=k, v=torch.empty_like(k))

    @property
    def num_rows(self) -> int:
        return self.k.shape[1]

    def upto(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """k, v [end, Hkv, D] of a layer: what has been written, never the scratch behind it."""
        return self.k[layer, :end], self.v[layer, :end]

    def write(self, layer: int, rows: Tensor | slice, k: Tensor, v: Tensor) -> None:
        """k (rotated), v [R, Hkv, D] to rows of a layer, in place."""
        self.k[layer, rows] = k
        self.v[layer, rows] = v

    def copy_from(self, other: KVCache, num_rows: int) -> None:
        """The first rows of every layer, and what is known of them, in place."""
        self.k[:, :num_rows] = other.k[:, :num_rows]
        self.v[:, :num_rows] = other.v[:, :num_rows]
        self.placed_k, self.placed_v = dict(other.placed_k), dict(other.placed_v)
