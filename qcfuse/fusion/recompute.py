"""Layer-wise selective recompute over a fused cache; full prefill and direct reuse are its two ends."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from kernels.place_kv import place_kv, rotate
from kernels.recompute_attention import recompute_attention
from qcfuse.decoder.base import Decoder
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.source import MemorySource, Subset
from qcfuse.fusion.timeline import Timeline


class StoredRows:
    """Places stored rows (or, at layer 0, exact ones computed from the embeddings) into a cache, each once.

    slots: where the rows go; None: at their request positions. positions: what keys are rotated at; None: the same.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: Layout,
        source: MemorySource,
        subset: Subset,
        *,
        slots: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.decoder, self.layout, self.source, self.subset = decoder, layout, source, subset
        self.slots = subset.positions if slots is None else slots
        self.cos, self.sin = decoder.rotary(subset.positions if positions is None else positions)

    def place(self, layer: int, cache: KVCache, *, values: bool = True) -> None:
        """Writes the rows of `layer` into the cache in place, keys alone or both; what it already has is left."""
        new_keys = layer not in cache.has_keys
        new_values = values and layer not in cache.has_values
        if not (new_keys or new_values):
            return
        k = self._keys(layer) if new_keys else None
        v = self._values(layer) if new_values else None
        self._write(k, v, cache.k[layer], cache.v[layer])
        cache.has_keys.update([layer] if new_keys else [])
        cache.has_values.update([layer] if new_values else [])

    def place_into(self, layer: int, k_out: Tensor, v_out: Tensor | None = None) -> None:
        """Writes the rows of `layer` to k_out [S, Hkv, D] (and v_out) in place, without any book-keeping."""
        self._write(self._keys(layer), None if v_out is None else self._values(layer), k_out, v_out)

    def _write(self, k: Tensor | None, v: Tensor | None, k_out: Tensor, v_out: Tensor | None) -> None:
        if k is None:
            v_out.index_copy_(0, self.slots, v)
        else:
            place_kv(k, v, self.cos, self.sin, self.slots, k_out, None if v is None else v_out)

    def _keys(self, layer: int) -> Tensor:
        return self.source.keys(layer, self.subset) if layer else self._layer_0[0]

    def _values(self, layer: int) -> Tensor:
        return self.source.values(layer, self.subset) if layer else self._layer_0[1]

    @cached_property
    def _layer_0(self) -> tuple[Tensor, Tensor]:
        ids = self.layout.ids[self.subset.positions]
        return self.decoder.project_kv(0, self.decoder.embed(ids))


def stored_rows(decoder: Decoder, layout: Layout, source: MemorySource, keep: Tensor) -> list[StoredRows]:
    """One StoredRows per layer for the kept context rows (keep [N] bool) and the prefix; shared where ranks are."""
    if source.per_layer_order:
        layers = range(decoder.num_layers)
        return [StoredRows(decoder, layout, source, source.subset(keep, prefix=True, layer=n)) for n in layers]
    return [StoredRows(decoder, layout, source, source.subset(keep, prefix=True))] * decoder.num_layers


def recompute(
    decoder: Decoder,
    layout: Layout,
    cache: KVCache,
    rows: Tensor,
    stored: list[StoredRows] | None,
    timeline: Timeline,
) -> Tensor:
    """Runs the rows through all layers over the fused cache; returns the last row's final hidden state [1, H].

    rows: [R] int64 positions, sorted; the last one is the prompt's last token. Every row's fresh K and V go into the
    cache before any row of that layer attends, and row i sees the positions up to its own, exactly (paper sec. 4.1).
    stored: what fills the other rows, layer by layer; None when rows cover everything (full prefill).
    At the last layer only the last row is attended and finished: the others are needed there for K and V alone.
    """
    cos, sin = decoder.rotary(rows)
    hidden = decoder.embed(layout.ids[rows])
    last = decoder.num_layers - 1
    for layer in range(last):
        _fill(stored, layer, cache, timeline)
        q, k, v = decoder.project(layer, hidden)
        place_kv(k, v, cos, sin, rows, cache.k[layer], cache.v[layer])
        attn = recompute_attention(rotate(q, cos, sin), *cache.upto(layer, layout.num_tokens), rows)
        hidden = decoder.finish(layer, hidden, attn)
    _fill(stored, last, cache, timeline)
    k, v = decoder.project_kv(last, hidden)
    place_kv(k, v, cos, sin, rows, cache.k[last], cache.v[last])
    hidden = hidden[-1:]
    q = rotate(decoder.project(last, hidden)[0], cos[-1:], sin[-1:])
    return decoder.finish(last, hidden, recompute_attention(q, *cache.upto(last, layout.num_tokens), rows[-1:]))


def _fill(stored: list[StoredRows] | None, layer: int, cache: KVCache, timeline: Timeline) -> None:
    if stored is not None:
        timeline.to("place", layer)
        stored[layer].place(layer, cache)
    timeline.to("recompute", layer)
