"""The probe: question states conditioned on what a selector may see, and the attention that they pay to the context.

One function serves every query-aware selector (paper sec. 4.2): they differ in what the probe sees (nothing, anchors,
everything) and in the layers that are scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.place_kv import place_kv, rotate
from kernels.recompute_attention import recompute_attention
from kernels.score import score
from qcfuse.decoder.base import Decoder
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.source import Source
from qcfuse.fusion.stitch import Stitch, StoredRows, everything
from qcfuse.fusion.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """anchor_ratio: share of each chunk that the probe sees. layers: the layers scored, ascending.

    reduce: over question rows and heads. score_rope: where keys and queries stand when scored (see `_local_keys`).
    """

    anchor_ratio: float
    layers: tuple[int, ...]
    reduce: Literal["max", "mean"]
    score_rope: Literal["request", "chunk_local"] = "request"


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """importance: [len(layers), N] float64, one row per scored layer. anchors: [A] context indices the probe saw."""

    layers: tuple[int, ...]
    importance: Tensor
    anchors: Tensor


class Probe:
    """Runs probes for one request; `cache` is the request's fused cache, whose context keys serve the scoring.

    What is placed into the cache stays there for the fusion; suffix rows are overwritten by it later.
    """

    def __init__(
        self, decoder: Decoder, layout: Layout, source: Source, cache: KVCache, timeline: Timeline
    ) -> None:
        self.decoder, self.layout, self.source = decoder, layout, source
        self.cache, self.timeline = cache, timeline
        start, self.end = layout.question
        self.rows = layout.positions[layout.context_end : self.end]
        self.question_rows = layout.positions[start : self.end]
        self.num_before_question = start - layout.context_end
        self.cos, self.sin = decoder.rotary(self.rows)
        self.stitch = Stitch(decoder, layout, source, cache, everything(layout))

    def run(self, spec: ProbeSpec) -> ProbeResult:
        """Suffix tokens up to the end of the question, from layer 0 to the deepest scored layer and no further.

        What follows the question cannot change its states (causality), so it is left out. At the deepest layer only
        the projections are needed. Layers are scored after the last of them was reached, so that the probe runs on
        while their keys are still being read.
        """
        self.timeline.to("probe")
        view = _view(self, spec)
        hidden = self.decoder.embed(self.layout.ids[self.rows])
        deepest = max(spec.layers)
        states = {}
        for layer in range(deepest + 1):
            if layer < deepest:
                self.source.await_view(layer)
            self.timeline.to("probe", layer)
            q, k, v = self.decoder.project(layer, hidden)
            if layer in spec.layers:
                states[layer] = (q[self.num_before_question :], k)
            if layer < deepest:
                attn = view.attend(layer, q, k, v)
                self.source.release("view", layer)
                hidden = self.decoder.finish(layer, hidden, attn)
        scores = []
        for layer, (q, k) in states.items():
            self.source.await_keys(layer)
            self.timeline.to("score", layer)
            scores.append(self._score(spec, layer, q, k))
            self.source.release("keys", layer)
        return ProbeResult(layers=spec.layers, importance=torch.stack(scores), anchors=view.anchors)

    def _score(self, spec: ProbeSpec, layer: int, q: Tensor, k: Tensor) -> Tensor:
        """Importance of the context at one layer, [N] float64: softmax over prefix, PIC keys and suffix, causally."""
        cos, sin = self.cos, self.sin
        keys = self.cache.k[layer]
        if spec.score_rope == "chunk_local":
            keys, cos, sin = self._local_keys(layer)
        self.stitch.place(layer, values=False)
        place_kv(k, None, cos, sin, self.rows, keys, None)
        q = rotate(q, cos[self.num_before_question :], sin[self.num_before_question :])
        span = (self.layout.num_prefix, self.layout.context_end)
        return score(q[None], [keys[: self.end]], self.question_rows, span, spec.reduce)[0].double()

    def _local_keys(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Position-free scoring (FusionRAG): every chunk stands right behind the prefix, the suffix behind the
        longest chunk, so that a score does not depend on the order of the chunks. Returns keys, suffix cos, sin."""
        layout = self.layout
        subset = self.source.subset(everything(layout), layer)
        starts = torch.tensor(layout.chunk_starts, device=layout.device)[layout.chunk_of]
        local = layout.positions.clone()
        local[layout.num_prefix : layout.context_end] -= starts
        shift = layout.num_context - max(layout.chunk_lengths)
        scratch = KVCache.empty(self.decoder, layout.num_tokens, num_layers=1)
        rows = StoredRows(
            self.decoder, layout, self.source, subset, slots=subset.positions, positions=local[subset.positions]
        )
        rows.place(layer, scratch.k[0], None)
        return scratch.k[0], *self.decoder.rotary(self.rows - shift)


class _FullView:
    """The probe sees the whole fused cache; its own rows stand at their request positions."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.anchors = torch.arange(probe.layout.num_context, device=probe.layout.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probe, cache = self.probe, self.probe.cache
        probe.stitch.place(layer)
        place_kv(k, v, probe.cos, probe.sin, probe.rows, cache.k[layer], cache.v[layer])
        return recompute_attention(rotate(q, probe.cos, probe.sin), *cache.upto(layer, probe.end), probe.rows)


class _CompactView:
    """The probe sees prefix ++ anchors ++ its own rows, in a cache of just those; keys keep request positions.

    Stored rows go on into the fused cache, so that whoever brought them may forget them.
    """

    def __init__(self, probe: Probe, anchor_ratio: float) -> None:
        self.probe = probe
        layout, source, decoder = probe.layout, probe.source, probe.decoder
        layers = range(decoder.num_layers) if source.per_layer_order else [1]
        self.seen = {layer: everything(layout) for layer in layers}
        for layer, mask in self.seen.items():
            mask[layout.num_prefix :] = source.anchor_mask(anchor_ratio, layer)
        subsets = {layer: source.subset(mask, layer) for layer, mask in self.seen.items()}
        seen_anywhere = torch.stack(list(self.seen.values())).any(0)
        self.anchors = seen_anywhere[layout.num_prefix :].nonzero()[:, 0]
        num_stored = subsets[layers[0]].positions.shape[0]
        slots = torch.arange(num_stored + probe.rows.shape[0], device=layout.device)
        self.num_stored, self.rows = num_stored, slots[num_stored:]
        self.cache = KVCache.empty(decoder, slots.shape[0], num_layers=1)
        self.stored = {
            layer: StoredRows(decoder, layout, source, subset, slots=slots[:num_stored])
            for layer, subset in subsets.items()
        }

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probe, cache = self.probe, self.cache
        of = layer if probe.source.per_layer_order else 1
        self.stored[of].place(layer, cache.k[0], cache.v[0])
        self._pass_on(layer, self.seen[of], self.stored[of].subset.positions)
        place_kv(k, v, probe.cos, probe.sin, self.rows, cache.k[0], cache.v[0])
        return recompute_attention(rotate(q, probe.cos, probe.sin), cache.k[0], cache.v[0], self.rows)

    def _pass_on(self, layer: int, seen: Tensor, positions: Tensor) -> None:
        fused = self.probe.cache
        # Layer 0 is computed, not brought: recompute makes all of it at once, rounded as in direct reuse.
        if layer == 0 or layer in fused.placed_k:
            return
        fused.k[layer].index_copy_(0, positions, self.cache.k[0, : self.num_stored])
        fused.v[layer].index_copy_(0, positions, self.cache.v[0, : self.num_stored])
        fused.placed_k[layer] = fused.placed_v[layer] = seen


def _view(probe: Probe, spec: ProbeSpec) -> _FullView | _CompactView:
    return _FullView(probe) if spec.anchor_ratio >= 1 else _CompactView(probe, spec.anchor_ratio)
