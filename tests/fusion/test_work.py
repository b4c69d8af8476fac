"""The FLOP model against torch's own counter (matrix products) and hand counts (attention)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qcfuse.fusion.probe import ProbeSpec
from qcfuse.fusion.work import Work
from tests.factories import selector
from tests.fusion.conftest import Rig, make_request

PRODUCTS = ("aten.mm", "aten.addmm")


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if str(op) in PRODUCTS)


def products(work: Work, layout, selected=None) -> int:
    """The model with attention taken out."""
    attention = 4 * work.num_heads * work.head_dim
    rows = layout.positions if selected is None else torch.cat([selected + layout.num_prefix, layout.suffix_positions])
    visible = int((rows + 1).sum()) * (work.num_layers - 1) + layout.num_tokens
    total = work.full_prefill(layout) if selected is None else work.fusion(layout, selected)
    return total - attention * visible


def test_full_prefill_counts_what_torch_counts(tiny_llama):
    rig = Rig(tiny_llama, make_request())
    # The last row's k and v are projected once more with its q: two small products that the model leaves out.
    extra = Work.of(rig.decoder)._kv
    assert counted(rig.full_by_loop) == products(Work.of(rig.decoder), rig.layout) + extra


@pytest.mark.parametrize("rho", [0, 0.3])
def test_fusion_counts_what_torch_counts(tiny_llama, rho):
    rig = Rig(tiny_llama, make_request())
    fusion = rig.fusion()
    selected = fusion.select(selector("random"), rho, 0, None).selected
    work = Work.of(rig.decoder)
    assert counted(lambda: fusion.recompute(selected)) == products(work, rig.layout, selected) + work._kv


def test_selection_counts_what_torch_counts_but_for_attention(tiny_llama):
    rig = Rig(tiny_llama, make_request(chunks=(10, 20)))
    spec = ProbeSpec(anchor_ratio=0.1, layers=(1, 2), reduce="max")
    work, fusion = Work.of(rig.decoder), rig.fusion()
    start, end = rig.layout.question
    num_rows, seen = end - rig.layout.context_end, rig.layout.num_prefix + 1 + 2
    heads = work.num_heads * work.head_dim
    attention = 2 * 4 * heads * (num_rows * seen + num_rows * (num_rows + 1) // 2)
    scores = 2 * 2 * heads * sum(range(start + 1, end + 1))
    assert counted(lambda: fusion.probe(spec)) == work.selection(rig.layout, spec) - attention - scores


def test_more_recompute_is_more_work_and_the_bound_is_below_one_over_rho(tiny_llama):
    layout, work = Rig(tiny_llama, make_request(chunks=(200,))).layout, None
    work = Work(
        num_layers=4, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512
    )
    half = work.fusion(layout, torch.arange(100))
    assert work.fusion(layout, torch.arange(50)) < half < work.full_prefill(layout)
    assert 1 < work.full_prefill(layout) / half < 2.5
