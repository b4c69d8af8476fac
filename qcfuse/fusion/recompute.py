"""Layer-wise selective recompute over a fused cache; full prefill and direct reuse are its two ends."""

from __future__ import annotations

from torch import Tensor

from kernels.place_kv import place_kv, rotate
from kernels.recompute_attention import recompute_attention
from qcfuse.decoder.base import Decoder
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.narrow import Narrowing
from qcfuse.fusion.stitch import Stitch
from qcfuse.fusion.timeline import Timeline


def recompute(
    decoder: Decoder,
    layout: Layout,
    cache: KVCache,
    rows: Tensor,
    stitch: Stitch | None,
    timeline: Timeline,
    narrowing: Narrowing | None = None,
) -> Tensor:
    """Runs the rows through all layers over the fused cache; returns the last row's final hidden state [1, H].

    rows: [R] int64 positions, sorted; the last one is the prompt's last token. Every row's fresh K and V go into the
    cache before any row of that layer attends, and row i sees the positions up to its own, exactly (paper sec. 4.1).
    stitch: what fills the other rows, layer by layer; None when rows cover everything (full prefill).
    narrowing: drops rows on the way down, with the stitch that fills them from then on.
    At the last layer only the last row is attended and finished: the others are needed there for K and V alone.
    """
    cos, sin = decoder.rotary(rows)
    hidden = decoder.embed(layout.ids[rows])
    last = decoder.num_layers - 1
    for layer in range(last):
        compares = narrowing is not None and narrowing.compares(layer)
        _fill(stitch, layer, timeline, release=not compares)
        q, k, v = decoder.project(layer, hidden)
        place_kv(k, v, cos, sin, rows, cache.k[layer], cache.v[layer])
        if narrowing is not None and (going_on := narrowing.step(layer, rows, k, v)) is not None:
            rows, hidden, q, cos, sin = (x[going_on] for x in (rows, hidden, q, cos, sin))
            stitch = narrowing.stitch
            stitch.source.release("rest", layer)
            timeline.to("recompute", layer)
        attn = recompute_attention(rotate(q, cos, sin), *cache.upto(layer, layout.num_tokens), rows)
        hidden = decoder.finish(layer, hidden, attn)
    _fill(stitch, last, timeline)
    if narrowing is not None:
        narrowing.token_layers += narrowing.kept.shape[0]
    k, v = decoder.project_kv(last, hidden)
    place_kv(k, v, cos, sin, rows, cache.k[last], cache.v[last])
    hidden = hidden[-1:]
    q = rotate(decoder.project(last, hidden)[0], cos[-1:], sin[-1:])
    return decoder.finish(last, hidden, recompute_attention(q, *cache.upto(last, layout.num_tokens), rows[-1:]))


def _fill(stitch: Stitch | None, layer: int, timeline: Timeline, *, release: bool = True) -> None:
    if stitch is not None:
        stitch.source.await_rest(layer)
        timeline.to("place", layer)
        stitch.place(layer)
        if release:
            stitch.source.release("rest", layer)
    timeline.to("recompute", layer)
