"""CacheBlend's variants against a slow, dense reference; their budgets, their ends, and what they read."""

from __future__ import annotations

import pytest
import torch

from qcfuse.fusion.layout import Layout
from qcfuse.selectors.cacheblend import falling_counts
from qcfuse.types import budget
from tests.factories import rule, selector
from tests.fusion.conftest import Rig, make_request
from tests.fusion.test_invariants import CLOSE, stored_layer
from tests.fusion.test_linked import LinkedRig, assert_same

VARIANTS = ("paper", "author_repo", "lmcache")


def slow_cacheblend(rig: Rig, variant: str, rho: float) -> tuple[torch.Tensor, list[int], list[int]]:
    """Dense and masked: all rows run at every layer, those out of play get their stored K and V and a frozen state.

    Returns logits, the kept context indices and how many context rows were computed at each layer from 1 on.
    """
    layout, decoder, model = rig.layout, rig.decoder, rig.model
    num, p, n = layout.num_tokens, layout.num_prefix, layout.num_context
    later = decoder.num_layers - 2
    counts = falling_counts(rho, n, later, 1.3) if variant == "paper" else [budget(rho, n)]
    in_play = list(range(n))
    computed = []
    hidden = model.model.embed_tokens(layout.ids)
    visible = torch.arange(num)[None] <= torch.arange(num)[:, None]
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(num)[None])
    half = decoder.head_dim // 2

    def rotated(x):
        return x * cos[0, :, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[0, :, None]

    for layer, block in enumerate(model.model.layers):
        attn, normed = block.self_attn, block.input_layernorm(hidden)
        q, k, v = (f(normed).unflatten(-1, (-1, decoder.head_dim)) for f in (attn.q_proj, attn.k_proj, attn.v_proj))
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        goes_on = in_play
        if layer:
            computed.append(len(in_play))
            stored_k, stored_v = stored_layer(rig, layer)
            out = [t for t in range(n) if t not in in_play]
            if layer <= len(counts):
                if variant == "paper":
                    gap = ((k - stored_k).abs() + (v - stored_v).abs()).sum((1, 2))
                else:
                    gap = ((v - stored_v) if variant == "author_repo" else (k - stored_k)).square().sum((1, 2))
                by_gap = sorted(in_play, key=lambda t: (-float(gap[p + t]), t))
                goes_on = sorted(by_gap[: counts[layer - 1]])
                if variant == "lmcache":
                    out = [t for t in range(n) if t not in goes_on]
            fixed = [*range(p), *(p + t for t in out)]
            k[fixed], v[fixed] = stored_k[fixed], stored_v[fixed]
        group = decoder.num_heads // decoder.num_kv_heads
        q, k, v = rotated(q), rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("rhd,shd->hrs", q, k) / decoder.head_dim**0.5
        out = torch.einsum("hrs,shd->rhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v).flatten(1)
        hidden = hidden + attn.o_proj(out)
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        in_play = goes_on
    return model.lm_head(model.model.norm(hidden[-1:])), in_play, computed


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rho", [0.1, 0.35, 0.8])
def test_every_variant_equals_a_slow_reference(rig, variant, rho):
    logits, selection, cache = rig.fuse(selector("cacheblend", variant=variant), rho)
    expected, kept, computed = slow_cacheblend(rig, variant, rho)
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert selection.selected.tolist() == kept
    layers, n = rig.decoder.num_layers, rig.layout.num_context
    assert selection.recomputed_frac == pytest.approx(sum(computed) / ((layers - 1) * n))
    assert not cache.k.isnan().any() and not cache.v.isnan().any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_ends_are_direct_reuse_and_full_prefill(rig, variant):
    method = selector("cacheblend", variant=variant)
    logits, selection, _ = rig.fuse(method, 0)
    torch.testing.assert_close(logits, rig.fuse(selector("direct_reuse"), 0)[0], rtol=0, atol=1e-6)
    assert selection.selected.numel() == 0
    torch.testing.assert_close(rig.fuse(method, 1)[0], rig.full_by_transformers()[0], **CLOSE)
    assert rig.fuse(method, 0.01)[1].selected.numel() == 0, "less than one token is none"


@pytest.mark.parametrize("rho", [0.01, 0.1, 0.15, 0.35, 0.5, 0.77, 0.9, 0.99, 1])
@pytest.mark.parametrize("num_context,num_layers", [(7, 1), (40, 2), (1024, 28), (333, 34)])
def test_the_falling_share_has_the_exact_total_and_never_rises(rho, num_context, num_layers):
    counts = falling_counts(rho, num_context, num_layers, 1.3)
    assert sum(counts) == num_layers * budget(rho, num_context) and len(counts) == num_layers
    assert all(0 <= c <= num_context for c in counts) and counts == sorted(counts, reverse=True)
    if num_layers > 2 and 1.3 * rho <= 1:
        assert counts[0] == pytest.approx(1.3 * rho * num_context, abs=2)
        assert counts[-1] == pytest.approx(0.7 * rho * num_context, abs=2)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("changes", [{}, {"speculate": True}], ids=str)
def test_over_a_link_it_reads_what_it_compares(rig, tmp_path, variant, changes):
    method = selector("cacheblend", variant=variant)
    linked = LinkedRig(rig, tmp_path, rows_per_block=1, **changes)
    mine = linked.fuse(method, 0.35)
    assert_same(mine, rig.fuse(method, 0.35))
    layers, n, p = rig.decoder.num_layers, rig.layout.num_context, mine[1].selected.shape[0]
    row_pair = linked.bytes["total_kv"] / layers / n
    compared = layers - 2 if variant == "paper" else 1
    rows = compared * n + (layers - 1 - compared) * (n - p)
    assert linked.bytes["requested"] == rows * row_pair
    assert linked.bytes["before_recompute"] == 0
    assert linked.timeline.stages_s()["select"] > 0


@pytest.mark.parametrize("name", ["knorm"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_orders_per_layer_and_odd_chunks(tiny, tmp_path, name, variant):
    per_layer = rule(name, scope="layer", num_sinks=1)
    rig = Rig(tiny, make_request(chunks=(1, 9, 1, 14)), per_layer)
    method = selector("cacheblend", variant=variant)
    mine = rig.fuse(method, 0.4)
    torch.testing.assert_close(mine[0], slow_cacheblend(rig, variant, 0.4)[0], **CLOSE)
    assert_same(LinkedRig(rig, tmp_path, per_layer).fuse(method, 0.4), mine)


def test_settings_that_are_refused():
    with pytest.raises(ValueError, match="variant='newest'"):
        selector("cacheblend", variant="newest")
    with pytest.raises(ValueError, match="first_share=0.5"):
        selector("cacheblend", first_share=0.5)


def test_the_rule_says_nothing_where_there_is_nothing_to_narrow():
    layout = Layout(make_request(), "cpu")
    method = selector("cacheblend")
    assert method.narrowing(layout, 0, 30) is None and method.narrowing(layout, 1, 30) is None
    assert method.narrowing(layout, 0.5, 2) is None, "two layers: layer 1 is the first that can differ and the last"
    assert set(method.narrowing(layout, 0.5, 5).counts) == {1, 2, 3}
    assert method.pick(layout, 0.5, None, 0).tolist() == list(range(layout.num_context))
