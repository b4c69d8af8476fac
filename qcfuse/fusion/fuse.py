"""One request through cache fusion: probe, select, recompute. The order of section 4.3's pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcfuse.decoder.base import Decoder
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.narrow import Narrowing
from qcfuse.fusion.probe import Probe, ProbeResult, ProbeSpec
from qcfuse.fusion.recompute import recompute
from qcfuse.fusion.source import Source
from qcfuse.fusion.stitch import Stitch, everything
from qcfuse.fusion.timeline import Timeline
from qcfuse.selectors.base import Selector
from qcfuse.types import Selection


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """The fusion of one request over one cache; each step may be called alone (tests, sample-major passes)."""

    decoder: Decoder
    layout: Layout
    source: Source
    cache: KVCache
    timeline: Timeline
    critical: Mapping[str, Sequence[int]]

    def spec(self, selector: Selector) -> ProbeSpec | None:
        return selector.probe_spec(self.decoder.num_layers, self.critical)

    def probe(self, spec: ProbeSpec | None) -> ProbeResult | None:
        """Starts the request's reads and runs the probe of a selector that has one; it does not depend on rho."""
        self.source.begin(spec)
        if spec is None:
            return None
        return Probe(self.decoder, self.layout, self.source, self.cache, self.timeline).run(spec)

    def select(self, selector: Selector, rho: float, seed: int, probed: ProbeResult | None) -> Selection:
        """Exactly floor(rho * N) context tokens: scores summed over the layers (eq. for I(t)), then the top."""
        self.timeline.to("select")
        if probed is None:
            return Selection(selected=selector.pick(self.layout, rho, None, seed))
        importance = probed.importance.sum(0)
        return Selection(
            selected=selector.pick(self.layout, rho, importance, seed),
            importance=importance,
            anchors=probed.anchors,
            layers=probed.layers,
        )

    def finish(self, selector: Selector, rho: float, selection: Selection) -> tuple[Tensor, Selection]:
        """Fuses the cache in place; first-token logits [1, vocab] and what was recomputed in the end: a method that
        compares fresh and stored rows narrows the selection on its way down."""
        rule = selector.narrowing(self.layout, rho, self.decoder.num_layers)
        if rule is None:
            return self.recompute(selection.selected), selection
        narrowing = Narrowing(
            decoder=self.decoder, layout=self.layout, source=self.source, cache=self.cache, timeline=self.timeline,
            rule=rule,
        )  # fmt: skip
        rows = self.layout.positions[self.layout.num_prefix :]
        hidden = recompute(self.decoder, self.layout, self.cache, rows, narrowing.stitch, self.timeline, narrowing)
        self.timeline.to("first_token")
        frac = narrowing.token_layers / ((self.decoder.num_layers - 1) * self.layout.num_context)
        return self.decoder.logits(hidden), replace(selection, selected=narrowing.kept, recomputed_frac=frac)

    def recompute(self, selected: Tensor) -> Tensor:
        """Fuses the cache in place around the selected tokens and the suffix; first-token logits [1, vocab]."""
        layout = self.layout
        self.source.decide(selected)
        keep = everything(layout)
        keep[selected + layout.num_prefix] = False
        stitch = Stitch(self.decoder, layout, self.source, self.cache, keep)
        rows = torch.cat([selected + layout.num_prefix, layout.suffix_positions])
        hidden = recompute(self.decoder, layout, self.cache, rows, stitch, self.timeline)
        self.timeline.to("first_token")
        return self.decoder.logits(hidden)

    def stitch(self) -> None:
        """Places every stored row of every layer, as direct reuse does."""
        stitch = Stitch(self.decoder, self.layout, self.source, self.cache, everything(self.layout))
        for layer in range(self.decoder.num_layers):
            stitch.place(layer)


def full_prefill(decoder: Decoder, layout: Layout, cache: KVCache, timeline: Timeline) -> Tensor:
    """Full prefill by the fusion loop (rho = 1, nothing loaded): first-token logits [1, vocab]; fills the cache."""
    hidden = recompute(decoder, layout, cache, layout.positions, None, timeline)
    timeline.to("first_token")
    return decoder.logits(hidden)
