"""Stored rows on their way into a fused cache: gathered, rotated at their request positions, placed, each once."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kernels.place_kv import place_kv
from qcfuse.decoder.base import Decoder
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.source import Source, Subset


class StoredRows:
    """One subset of stored rows (at layer 0: exact ones, computed from the embeddings).

    slots: where the rows go; None: at their request positions. positions: what keys are rotated at; None: the same.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: Layout,
        source: Source,
        subset: Subset,
        *,
        slots: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.decoder, self.layout, self.source, self.subset = decoder, layout, source, subset
        self.slots = subset.positions if slots is None else slots
        self.cos, self.sin = decoder.rotary(subset.positions if positions is None else positions)

    def place(self, layer: int, k_out: Tensor | None, v_out: Tensor | None) -> None:
        """Writes the rows of `layer` to k_out, v_out [S, Hkv, D] in place, or to one of them alone."""
        if k_out is None:
            v_out.index_copy_(0, self.slots, self._values(layer))
        else:
            v = None if v_out is None else self._values(layer)
            place_kv(self._keys(layer), v, self.cos, self.sin, self.slots, k_out, v_out)

    def _keys(self, layer: int) -> Tensor:
        return self.source.keys(layer, self.subset) if layer else self._layer_0[0]

    def _values(self, layer: int) -> Tensor:
        return self.source.values(layer, self.subset) if layer else self._layer_0[1]

    @cached_property
    def _layer_0(self) -> tuple[Tensor, Tensor]:
        ids = self.layout.ids[self.subset.positions]
        return self.decoder.project_kv(0, self.decoder.embed(ids))


class Stitch:
    """Fills a fused cache with the stored rows of `keep` ([prefix + N] bool), leaving alone what stands there."""

    def __init__(self, decoder: Decoder, layout: Layout, source: Source, cache: KVCache, keep: Tensor) -> None:
        self.decoder, self.layout, self.source, self.cache, self.keep = decoder, layout, source, cache, keep
        self._missing: dict[tuple[int, int], tuple[Tensor | None, StoredRows | None, Tensor]] = {}

    def place(self, layer: int, *, values: bool = True) -> None:
        """Places what is missing at a layer, keys alone or both."""
        cache = self.cache
        keys, placed_k = self._rows(layer, cache.placed_k.get(layer))
        vals, placed_v = self._rows(layer, cache.placed_v.get(layer)) if values else (None, None)
        if keys is not None and keys is vals:
            keys.place(layer, cache.k[layer], cache.v[layer])
        else:
            if keys is not None:
                keys.place(layer, cache.k[layer], None)
            if vals is not None:
                vals.place(layer, None, cache.v[layer])
        cache.placed_k[layer] = placed_k
        if values:
            cache.placed_v[layer] = placed_v

    def _rows(self, layer: int, placed: Tensor | None) -> tuple[StoredRows | None, Tensor]:
        """What is missing beside `placed`, None where nothing is, and the mask of what stands there afterwards."""
        key = (id(placed), layer if self.source.per_layer_order else 0)
        if key not in self._missing:
            missing = self.keep if placed is None else self.keep & ~placed
            after = self.keep if placed is None else self.keep | placed
            rows = None
            if bool(missing.any()):
                rows = StoredRows(self.decoder, self.layout, self.source, self.source.subset(missing, layer))
            self._missing[key] = (placed, rows, after)  # holding `placed` keeps its id its own
        return self._missing[key][1:]


def everything(layout: Layout) -> Tensor:
    """[prefix + N] bool, all true."""
    return torch.ones(layout.context_end, dtype=torch.bool, device=layout.device)
