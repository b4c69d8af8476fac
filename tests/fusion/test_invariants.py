"""The invariants that every method and model family must keep (design, section 11); transformers is the reference."""

from __future__ import annotations

import pytest
import torch

from qcfuse.fusion.layout import Layout
from tests.conftest import tiny_model
from tests.factories import SWEPT, rule, selector
from tests.fusion.conftest import Rig, make_request

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
ROPES = {
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip


def test_full_prefill_by_the_loop_equals_transformers(rig):
    logits, layers = rig.full_by_transformers()
    mine, cache = rig.full_by_loop()
    torch.testing.assert_close(mine, logits, **CLOSE)
    for layer, kept in enumerate(layers):
        torch.testing.assert_close(cache.k[layer], kept.keys[0].transpose(0, 1), **CLOSE)
        torch.testing.assert_close(cache.v[layer], kept.values[0].transpose(0, 1), **CLOSE)


@pytest.mark.parametrize("name", SWEPT)
def test_rho_1_equals_full_prefill(rig, name):
    logits, selection, cache = rig.fuse(selector(name), 1)
    torch.testing.assert_close(logits, rig.full_by_transformers()[0], **CLOSE)
    torch.testing.assert_close(cache.k, rig.full_by_loop()[1].k, **CLOSE)
    assert selection.selected.tolist() == list(range(rig.layout.num_context))


@pytest.mark.parametrize("name", SWEPT)
def test_rho_0_equals_direct_reuse(rig, name):
    logits, selection, cache = rig.fuse(selector(name), 0)
    direct, _, direct_cache = rig.fuse(selector("direct_reuse"), 0)
    assert selection.selected.numel() == 0
    torch.testing.assert_close(logits, direct, rtol=0, atol=1e-6)
    torch.testing.assert_close(cache.k, direct_cache.k, rtol=0, atol=1e-6)


def test_direct_reuse_differs_from_full_prefill_where_chunks_matter(rig):
    logits, _, _ = rig.fuse(selector("direct_reuse"), 0)
    assert (logits - rig.full_by_transformers()[0]).abs().max() > 1e-2


def test_one_chunk_without_prefix_at_rho_0_equals_full_prefill(tiny):
    rig = Rig(tiny, make_request(chunks=(25,), prefix=0))
    torch.testing.assert_close(rig.fuse(selector("direct_reuse"), 0)[0], rig.full_by_transformers()[0], **CLOSE)


def test_layer_0_is_exact_after_rotation_and_prefix_at_every_layer(rig):
    _, layers = rig.full_by_transformers()
    cache = rig.fuse(selector("direct_reuse"), 0)[2]
    torch.testing.assert_close(cache.k[0], layers[0].keys[0].transpose(0, 1), **CLOSE)
    torch.testing.assert_close(cache.v[0], layers[0].values[0].transpose(0, 1), **CLOSE)
    prefix = slice(0, rig.layout.num_prefix)
    for layer, kept in enumerate(layers):
        torch.testing.assert_close(cache.k[layer, prefix], kept.keys[0].transpose(0, 1)[prefix], **CLOSE)


def test_partial_recompute_equals_a_slow_reference(rig):
    """The whole rule by hand: stored rows rotated, P and suffix recomputed layer by layer under an explicit mask."""
    logits, selection, cache = rig.fuse(selector("random"), 0.4)
    torch.testing.assert_close(logits, slow_fusion(rig, selection.selected.tolist()), **CLOSE)
    assert not cache.k.isnan().any() and not cache.v.isnan().any()


def slow_fusion(rig: Rig, selected: list[int]) -> torch.Tensor:
    """Dense and masked: every row is run, rows that are not recomputed get their stored K and V back."""
    layout, decoder, model = rig.layout, rig.decoder, rig.model
    num, p = layout.num_tokens, layout.num_prefix
    fresh = torch.zeros(num, dtype=torch.bool)
    fresh[[p + i for i in selected]] = True
    fresh[layout.context_end :] = True
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(num)[None])
    half = decoder.head_dim // 2

    def rotated(x):
        swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos[0, :, None] + swapped * sin[0, :, None]

    hidden = model.model.embed_tokens(layout.ids)
    visible = torch.arange(num)[None] <= torch.arange(num)[:, None]
    for layer, block in enumerate(model.model.layers):
        normed = block.input_layernorm(hidden)
        attn = block.self_attn
        q, k, v = (f(normed).unflatten(-1, (-1, decoder.head_dim)) for f in (attn.q_proj, attn.k_proj, attn.v_proj))
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        if layer:
            stored_k, stored_v = stored_layer(rig, layer)
            k[~fresh], v[~fresh] = stored_k[~fresh], stored_v[~fresh]
        group = decoder.num_heads // decoder.num_kv_heads
        q, k, v = rotated(q), rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("rhd,shd->hrs", q, k) / decoder.head_dim**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out = torch.einsum("hrs,shd->rhd", weights, v).flatten(1)
        hidden = hidden + attn.o_proj(out)
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden[-1:]))


def stored_layer(rig: Rig, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, Hkv, D] un-rotated k and v in request order; suffix rows are zero."""
    shape = (rig.layout.num_tokens, rig.decoder.num_kv_heads, rig.decoder.head_dim)
    k, v = torch.zeros(shape), torch.zeros(shape)
    p = rig.layout.num_prefix
    k[:p], v[:p] = rig.prefix.k[layer - 1], rig.prefix.v[layer - 1]
    for start, chunk in zip(rig.layout.chunk_starts, rig.chunks, strict=True):
        order = chunk.order if chunk.order.dim() == 1 else chunk.order[layer - 1]
        k[p + start + order], v[p + start + order] = chunk.k[layer - 1], chunk.v[layer - 1]
    return k, v


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", ["qcfuse", "direct_reuse"])
def test_rope_scaling_of_the_model_is_kept(rope, name):
    model = tiny_model("llama", rope_parameters=ROPES[rope])
    rig = Rig(model, make_request(chunks=(30, 25)))
    torch.testing.assert_close(rig.fuse(selector("epic"), 1)[0], rig.full_by_transformers()[0], **CLOSE)
    logits, selection, _ = rig.fuse(selector(name), 0.3 if name == "qcfuse" else 0)
    torch.testing.assert_close(logits, slow_fusion(rig, selection.selected.tolist()), **CLOSE)


def test_anchors_at_ratio_1_and_all_layers_make_qcfuse_prophetkv(rig):
    mine = rig.fuse(selector("qcfuse", anchor_ratio=1.0, layers="all"), 0.3)[1]
    theirs = rig.fuse(selector("prophetkv"), 0.3)[1]
    torch.testing.assert_close(mine.importance, theirs.importance, rtol=0, atol=0)
    assert mine.selected.tolist() == theirs.selected.tolist()


def test_a_compact_view_of_all_anchors_scores_like_the_full_view(rig):
    """Both code paths of the probe agree: 0.999 keeps every token of these chunks, yet takes the compact one."""
    compact = rig.fuse(selector("qcfuse", anchor_ratio=0.999, layers="all"), 0.3)[1]
    full = rig.fuse(selector("prophetkv"), 0.3)[1]
    assert compact.anchors.tolist() == list(range(rig.layout.num_context))
    torch.testing.assert_close(compact.importance, full.importance, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SWEPT)
@pytest.mark.parametrize("rho", [0, 0.01, 0.1, 0.35, 0.5, 0.99, 1])
def test_budget_is_exact_sorted_unique_and_inside_the_context(rig, name, rho):
    selected = rig.fuse(selector(name), rho)[1].selected.tolist()
    assert len(selected) == int(str(round(rho * 100 * rig.layout.num_context))) // 100
    assert selected == sorted(set(selected))
    assert all(0 <= i < rig.layout.num_context for i in selected)


EDGES = {
    "same chunk twice": None,
    "one-token chunks": make_request(chunks=(1, 1, 1)),
    "one-token question": make_request(question=(2, 3)),
    "question ends the suffix": make_request(suffix=3, question=(2, 3)),
    "chunk shorter than the anchor count": make_request(chunks=(1, 2, 30)),
    "no prefix": make_request(prefix=0),
    "rho times N below one": make_request(chunks=(2, 2)),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", ["qcfuse", "prophetkv", "fusionrag", "epic"])
def test_edge_requests(tiny_llama, edge, name):
    request = EDGES[edge]
    if request is None:
        base = make_request(chunks=(9, 8))
        request = type(base)(
            **{**base.__dict__, "chunk_ids": (base.chunk_ids[0], base.chunk_ids[1], base.chunk_ids[0])}
        )
    request = type(request)(**{f: getattr(request, f) for f in request.__dataclass_fields__})
    rig = Rig(tiny_llama, request)
    for rho in (0.2, 0.5):
        logits, selection, cache = rig.fuse(selector(name), rho)
        torch.testing.assert_close(logits, slow_fusion(rig, selection.selected.tolist()), **CLOSE)
        assert not cache.k.isnan().any()


def permuted(rig: Rig, order: list[int]) -> Rig:
    request = rig.request
    fields = {f: getattr(request, f) for f in request.__dataclass_fields__}
    return Rig(rig.model, type(request)(**{**fields, "chunk_ids": tuple(request.chunk_ids[i] for i in order)}))


def test_fusionrag_query_states_ignore_chunk_order_and_local_scores_follow_the_chunk(rig):
    order = [2, 0, 3, 1]
    other = permuted(rig, order)
    local = selector("fusionrag", score_rope="chunk_local")
    first, second = (r.fuse(local, 0.3)[1].importance for r in (rig, other))
    pieces = [first[s : s + n] for s, n in zip(rig.layout.chunk_starts, rig.layout.chunk_lengths, strict=True)]
    torch.testing.assert_close(torch.cat([pieces[i] for i in order]), second, rtol=1e-4, atol=1e-7)
    request_rope = [r.fuse(selector("fusionrag"), 0.3)[1].importance for r in (rig, other)]
    moved = [request_rope[0][s : s + n] for s, n in zip(rig.layout.chunk_starts, rig.layout.chunk_lengths, strict=True)]
    assert not torch.allclose(torch.cat([moved[i] for i in order]), request_rope[1], rtol=1e-4)


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_scores_equal_attention_that_transformers_reports(tiny_llama, reduce):
    """One chunk and no prefix: PIC keys are exact, so ProphetKV's scores are the model's own attention rows."""
    rig = Rig(tiny_llama, make_request(chunks=(30,), prefix=0))
    importance = rig.fuse(selector("prophetkv", reduce=reduce), 0.3)[1].importance
    tiny_llama.set_attn_implementation("eager")
    try:
        ids = torch.tensor([rig.request.input_ids])
        with torch.no_grad():
            maps = torch.stack(tiny_llama(ids, output_attentions=True).attentions)[:, 0]
    finally:
        tiny_llama.set_attn_implementation("sdpa")
    start, end = rig.layout.question
    rows = maps[:, :, start:end, : rig.layout.num_context].flatten(1, 2)
    expected = (rows.amax(1) if reduce == "max" else rows.mean(1)).sum(0)
    torch.testing.assert_close(importance.float(), expected, rtol=1e-3, atol=1e-5)


def test_probe_stops_after_the_deepest_scored_layer(rig, monkeypatch):
    finished = []
    original = rig.decoder.finish
    monkeypatch.setattr(rig.decoder, "finish", lambda layer, *a: finished.append(layer) or original(layer, *a))
    fusion = rig.fusion()
    fusion.probe(fusion.spec(selector("qcfuse", layers=[0, 2])))
    assert finished == [0, 1]


def test_a_ranking_per_layer_fuses_to_the_same_cache(rig):
    """Rank order is storage only: rho fixed, the fused logits do not depend on how rows were stored."""
    per_layer = Rig(rig.model, rig.request, rule("kvzip", scope="layer", num_sinks=4))
    assert per_layer.chunks[0].order.dim() == 2
    torch.testing.assert_close(per_layer.fuse(selector("epic"), 0.3)[0], rig.fuse(selector("epic"), 0.3)[0], **CLOSE)
    torch.testing.assert_close(
        per_layer.fuse(selector("prophetkv"), 0.3)[1].importance,
        rig.fuse(selector("prophetkv"), 0.3)[1].importance,
        **CLOSE,
    )


def test_rotation_by_a_then_b_is_rotation_by_a_plus_b(rig):
    x = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(3))
    a, b = torch.arange(9), torch.arange(9) * 5 + 2
    twice = rig.decoder.rotate(rig.decoder.rotate(x, a), b)
    torch.testing.assert_close(twice, rig.decoder.rotate(x, a + b), **CLOSE)


def test_fusion_calls_only_the_three_ops_and_once_per_layer(rig):
    import kernels

    kernels.calls.clear()
    fusion = rig.fusion()
    probed = fusion.probe(fusion.spec(selector("qcfuse", layers=[1, 2])))
    assert kernels.calls["score"] == 2
    before = kernels.calls["recompute_attention"]
    assert before == 2, "the probe attends below its deepest layer"
    fusion.recompute(fusion.select(selector("qcfuse", layers=[1, 2]), 0.3, 0, probed).selected)
    assert kernels.calls["recompute_attention"] - before == rig.decoder.num_layers


def test_layout_counts(rig):
    layout = Layout(rig.request, "cpu")
    assert layout.chunk_starts == (0, 7, 19, 20)
    assert layout.question == (5 + 40 + 1, 5 + 40 + 4)
    assert layout.chunk_of.tolist() == [0] * 7 + [1] * 12 + [2] + [3] * 20
