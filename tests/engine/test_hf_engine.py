"""The HF engine: its baseline, batched judging against one arm alone, decoding against transformers' generate."""

from __future__ import annotations

import pytest
import torch

from qcfuse.engine.base import Arm
from qcfuse.engine.branches import Branch, Branches
from qcfuse.engine.decode import extend, greedy
from qcfuse.fusion.cache import KVCache
from qcfuse.metrics.fidelity import kl_divergence
from runners.cell import Cell
from runners.dispatch import Engines
from tests.factories import SWEPT, selector
from tests.fusion.conftest import Rig, make_request
from tests.runners.conftest import SMALL, composed


@pytest.fixture(scope="module")
def opened(tiny_dir, tmp_path_factory):
    job = [
        "model=qwen3_8b", f"model.path={tiny_dir('qwen3')}", "model.stop_tokens=[]", "dataset=ruler_mv", *SMALL,
        "selector.layers=[1,2]", f"storage.root={tmp_path_factory.mktemp('store')}",
    ]  # fmt: skip
    cell = Cell.of(*composed(job))
    engine = Engines().of(cell)
    return engine, cell.dataset.request(0, engine.tokenizer, cell.model.template)


def arms(*rhos: float) -> list[Arm]:
    swept = [
        Arm(selector=selector(n, **({"layers": [1, 2]} if n == "qcfuse" else {})), rho=r, seed=0)
        for n in SWEPT
        for r in rhos
    ]
    return [
        Arm(selector=selector("full_prefill"), rho=1, seed=0),
        Arm(selector=selector("direct_reuse"), rho=0, seed=0),
        *swept,
    ]


def test_the_baseline_is_transformers_without_a_mask_and_with_one_row_of_logits(opened, monkeypatch):
    engine, request = opened
    seen = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **options):
        seen.append((attn_mask, options["is_causal"], query.shape[2]))
        return sdpa(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with torch.inference_mode():
        logits = engine._engine_prefill(request)
    assert seen == [(None, True, request.num_tokens)] * engine.decoder.num_layers
    assert logits.shape == (1, engine.decoder.vocab_size)


def test_judging_many_arms_together_equals_each_alone(opened):
    engine, request = opened
    reference = engine.reference(request)
    together = engine.judge(request, arms(0.2, 0.5), reference)
    for arm, quality in zip(arms(0.2, 0.5), together, strict=True):
        (alone,) = engine.judge(request, [arm], reference)
        assert alone.selection.selected.tolist() == quality.selection.selected.tolist()
        assert alone.output_ids == quality.output_ids
        torch.testing.assert_close(alone.first_logits, quality.first_logits, rtol=1e-4, atol=1e-4)


def test_kl_is_that_of_the_fused_distribution_and_zero_for_full_prefill(opened):
    engine, request = opened
    reference = engine.reference(request)
    full, direct, *_ = engine.judge(request, arms(0.2), reference)
    assert full.answer_kl < 1e-6 and full.top1_agrees and full.answer_agreement_frac == 1
    assert direct.first_token_kl == pytest.approx(float(kl_divergence(reference.logits[0], direct.first_logits)))
    assert direct.answer_kl > 1e-4


def test_every_arm_is_timed_and_its_stages_add_up(opened):
    engine, request = opened
    for arm in arms(0.3):
        timing = engine.time(request, arm, decode=True)
        assert sum(timing.stages_s.values()) == pytest.approx(timing.ttft_s, rel=0.02)
        assert timing.decode_s > 0
    assert set(engine.time(request, arms()[0], decode=False).arms) == {"engine", "loop"}


def test_kl_of_hand_made_distributions():
    full, other = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    expected = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()
    assert float(kl_divergence(full, other)) == pytest.approx(float(expected))


def test_greedy_equals_generate_and_stops(tiny):
    rig = Rig(tiny, make_request())
    num = rig.layout.num_tokens
    with torch.no_grad():
        ids = torch.tensor([rig.request.input_ids])
        options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": -1}
        expected = tiny.generate(ids, max_new_tokens=8, **options)[0, num:].tolist()
    logits, cache = rig.full_by_loop()
    for stops in ((), (expected[3],)):
        branches = [Branch.of(cache, torch.arange(num)) for _ in range(3)]
        outputs, steps = greedy(rig.decoder, logits.repeat(3, 1), Branches(cache, 0, branches, 8), num, 8, stops)
        end = expected.index(expected[3]) if stops else 8
        assert outputs == [expected[:end]] * 3
        assert torch.cat([step[:1] for step in steps]).argmax(-1).tolist()[:end] == expected[:end]


def test_extend_many_rows_equals_one_by_one(tiny):
    rig = Rig(tiny, make_request())
    num, new = rig.layout.num_tokens, torch.tensor([[40, 50, 60], [70, 80, 90]])
    cache = rig.full_by_loop()[1]

    def batch() -> Branches:
        return Branches(cache, 0, [Branch.of(cache, torch.arange(num))] * 2, 3)

    together = extend(rig.decoder, new, batch(), num)
    caches = batch()
    single = [extend(rig.decoder, new[:, i : i + 1], caches, num, i) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(single, 1), rtol=1e-4, atol=1e-4)


def test_shared_rows_are_those_that_a_sequence_does_not_own(tiny):
    """Three sequences with other owned rows, one dropped midway, against each with everything its own."""
    rig = Rig(tiny, make_request())
    num, base = rig.layout.num_tokens, rig.full_by_loop()[1]
    owned = [torch.arange(30, num), torch.tensor([2, 7, *range(40, num)]), torch.arange(30, num)]
    fused = []
    for seed, rows in enumerate(owned):
        cache = KVCache(k=base.k.clone(), v=base.v.clone())
        noise = torch.randn(2, *cache.k[:, rows].shape, generator=torch.Generator().manual_seed(seed))
        cache.k[:, rows], cache.v[:, rows] = noise[0], noise[1]
        fused.append(cache)
    garbage = KVCache(k=base.k.clone(), v=base.v.clone())
    garbage.k[:, 40:], garbage.v[:, 40:] = torch.nan, torch.nan
    caches = Branches(garbage, 40, [Branch.of(c, r) for c, r in zip(fused, owned, strict=True)], 4)
    alone = [Branches(c, 0, [Branch.of(c, torch.arange(num))], 4) for c in fused]
    tokens = torch.tensor([[40, 50], [60, 70], [80, 90]])
    expected = torch.cat([extend(rig.decoder, tokens[i : i + 1], alone[i], num) for i in range(3)])
    torch.testing.assert_close(extend(rig.decoder, tokens, caches, num), expected, rtol=1e-4, atol=1e-4)
    caches.keep([1, 2])
    expected = torch.cat([extend(rig.decoder, tokens[i : i + 1, :1], alone[i], num, 2) for i in (1, 2)])
    torch.testing.assert_close(extend(rig.decoder, tokens[1:, :1], caches, num, 2), expected, rtol=1e-4, atol=1e-4)
