"""Exact prefill of a run of tokens: chunks alone, prefixes, and whatever continues a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.place_kv import place_kv, rotate
from kernels.recompute_attention import recompute_attention
from qcfuse.decoder.base import Decoder
from qcfuse.fusion.cache import KVCache

Observer = Callable[[int, Tensor, Tensor, Tensor], None]


def prefill(decoder: Decoder, ids: Tensor, cache: KVCache, start: int = 0, observe: Observer | None = None) -> Tensor:
    """Runs ids [R] at positions start, start + 1, ... over the cache, causally; returns hidden [R, H].

    Cache rows start..start+R-1 are written in place. observe(layer, q, k, v) is called before a layer attends: q
    rotated [R, Hq, D], k un-rotated and v [R, Hkv, D]; the layer's keys are in the cache by then.
    """
    end = start + ids.shape[0]
    rows = torch.arange(start, end, device=ids.device)
    cos, sin = decoder.rotary(rows)
    hidden = decoder.embed(ids)
    for layer in range(decoder.num_layers):
        q, k, v = decoder.project(layer, hidden)
        q = rotate(q, cos, sin)
        place_kv(k, v, cos, sin, rows, cache.k[layer], cache.v[layer])
        if observe is not None:
            observe(layer, q, k, v)
        hidden = decoder.finish(layer, hidden, recompute_attention(q, *cache.upto(layer, end), rows))
    return hidden


class KVRecorder:
    """An observer that keeps un-rotated K and V of every layer. k, v: [L, R, Hkv, D]."""

    def __init__(self, decoder: Decoder, num_rows: int) -> None:
        shape = (decoder.num_layers, num_rows, decoder.num_kv_heads, decoder.head_dim)
        self.k = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self.v = torch.empty_like(self.k)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[layer], self.v[layer] = k, v
