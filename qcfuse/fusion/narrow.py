"""Rows that stop being computed on the way down: CacheBlend's gradual filtering, as one hook in the recompute loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse.decoder.base import Decoder
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.source import Source
from qcfuse.fusion.stitch import Stitch, StoredRows, everything
from qcfuse.fusion.timeline import Timeline

Deviation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class NarrowingRule:
    """counts: layer -> how many context rows go on beyond it; layers that are not named keep all.

    deviation: fresh k, v and stored k, v (un-rotated, [R, Hkv, D]) to [R]; the largest go on. keeps_fresh: whether rows
    that stop at a layer keep their fresh K and V there.
    """

    counts: Mapping[int, int]
    deviation: Deviation
    keeps_fresh: bool


@dataclass(kw_only=True)
class Narrowing:
    """A rule at work on one request. stitch: what fills the rows that are no longer computed, after the latest step.

    kept: [R] context indices in play; token_layers: rows computed at layers 1 and up, so far.
    """

    decoder: Decoder
    layout: Layout
    source: Source
    cache: KVCache
    timeline: Timeline
    rule: NarrowingRule
    kept: Tensor = field(init=False)
    stitch: Stitch = field(init=False)
    token_layers: int = 0

    def __post_init__(self) -> None:
        self.kept = self.layout.positions[: self.layout.num_context]
        self.stitch = self._stitch()
        self._ask(first=1)

    def compares(self, layer: int) -> bool:
        return layer in self.rule.counts

    def step(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """After the rows' fresh K and V of a layer are placed: [R'] which rows go on, None for all.

        rows: [R] positions, context rows first; k un-rotated, v [R, Hkv, D].
        """
        num_context = self.kept.shape[0]
        self.token_layers += num_context if layer else 0
        if not self.compares(layer):
            return None
        self.timeline.to("select", layer)
        count = self.rule.counts[layer]
        subset = self.source.subset(self._in_play(), layer)
        stored = (self.source.keys(layer, subset), self.source.values(layer, subset))
        deviation = self.rule.deviation(k[:num_context], v[:num_context], *stored)
        order = torch.sort(deviation, descending=True, stable=True).indices
        chosen = order[:count].sort().values
        if not self.rule.keeps_fresh:
            self._put_back(layer, order[count:])
        self.kept = self.kept[chosen]
        self.stitch = self._stitch()
        if layer == max(self.rule.counts):
            self._ask(first=layer + 1)
        suffix = torch.arange(num_context, rows.shape[0], device=rows.device)
        return torch.cat([chosen, suffix])

    def _in_play(self) -> Tensor:
        """[prefix + N] bool, the context rows that are still computed."""
        mask = torch.zeros(self.layout.context_end, dtype=torch.bool, device=self.layout.device)
        mask[self.kept + self.layout.num_prefix] = True
        return mask

    def _stitch(self) -> Stitch:
        keep = everything(self.layout) & ~self._in_play()
        return Stitch(self.decoder, self.layout, self.source, self.cache, keep)

    def _put_back(self, layer: int, dropped: Tensor) -> None:
        """Rows that stop here get their stored K and V back at this very layer."""
        mask = torch.zeros(self.layout.context_end, dtype=torch.bool, device=self.layout.device)
        mask[self.kept[dropped] + self.layout.num_prefix] = True
        rows = StoredRows(self.decoder, self.layout, self.source, self.source.subset(mask, layer))
        if rows.subset.positions.shape[0]:
            rows.place(layer, self.cache.k[layer], self.cache.v[layer])

    def _ask(self, first: int) -> None:
        """Decides the reads from a layer on: everything where rows will be compared (rows in play and the others), only
        what is no longer computed behind the last comparison."""
        last = max(self.rule.counts)
        if first <= last:
            self.source.decide(self.kept[:0], first=first, last=last)
        else:
            self.source.decide(self.kept, first=first)
