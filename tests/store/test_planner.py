import numpy as np
import pytest

from qcfuse.store.context import ContextRows
from qcfuse.store.geometry import KVGeometry
from qcfuse.store.planner import Needs, ReadPlan, coalesce, runs_of
from tests.store.conftest import GEOMETRY, ids_of

SMOLLM2 = KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64, dtype="float32", head_groups=1)
QWEN3_8B = KVGeometry(num_layers=36, num_kv_heads=8, head_dim=128, dtype="bfloat16", head_groups=1)


def context(geometry, lengths, rows_per_block, seed=0, repeat=()):
    """repeat: places (indices into lengths) that occur again at the end."""
    rng = np.random.default_rng(seed)
    ids = [ids_of(n, seed + i) for i, n in enumerate(lengths)]
    orders = [rng.permutation(n) for n in lengths]
    places = [*range(len(lengths)), *repeat]
    return ContextRows.of(geometry, [ids[i] for i in places], [orders[i] for i in places], rows_per_block)


def select_random(num_tokens, rho, seed=0):
    chosen = np.zeros(num_tokens, bool)
    chosen[np.random.default_rng(seed).permutation(num_tokens)[: int(rho * num_tokens)]] = True
    return chosen


def read_rows(rows, steps):
    """[L, 2, num_rows] how often each row is read."""
    count = np.zeros((rows.geometry.num_layers, 2, rows.num_rows), int)
    for step in steps:
        for part, first, end in step.runs:
            count[step.layer, part, first * rows.rows_per_block : end * rows.rows_per_block] += 1
    return count


@pytest.mark.parametrize("geometry, lengths, critical", [
    (SMOLLM2, [128] * 8, (11, 14, 18)), (QWEN3_8B, [512] * 20, (20, 21, 18)),
])  # fmt: skip
def test_half_recompute_reads_about_half_and_little_before(geometry, lengths, critical):
    rows = context(geometry, lengths, 1)
    plan = ReadPlan(rows, gap=0)
    plan.select(Needs.scoring(critical), [-(-n // 10) for n in lengths])
    recomputed = select_random(sum(lengths), 0.5)
    for layer in range(1, geometry.num_layers):
        plan.rest(layer, ~recomputed)
    found = plan.bytes()
    full = 2 * geometry.num_layers * sum(lengths) * geometry.num_kv_heads * geometry.head_dim * geometry.item_bytes
    assert found["total_kv"] == full and found["fill"] == 0
    assert found["requested"] <= 0.62 * full and found["before_recompute"] <= 0.14 * full
    # By hand: anchors (2 parts), keys of three layers less the anchors' of the two shallower, then half of the rest.
    anchors = sum(-(-n // 10) for n in lengths) / sum(lengths)
    before = ((max(critical) - 1) * 2 * anchors + 3 - 2 * anchors) / (2 * geometry.num_layers)
    assert found["before_recompute"] / full == pytest.approx(before, abs=1e-9)


@pytest.mark.parametrize("gap", [0, 2, 5])
@pytest.mark.parametrize("rows_per_block", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_wanted_row_is_read_exactly_once(gap, rows_per_block, seed):
    lengths = [1, 63, 129, 7, 40]
    rows = context(GEOMETRY, lengths, rows_per_block, seed, repeat=(2, 0))
    total = rows.num_context_tokens
    recomputed = select_random(total, [0.0, 0.3, 0.9, 1.0][seed], seed)
    anchors = [-(-n // 10) for n in lengths]
    plan = ReadPlan(rows, gap=gap)
    steps = plan.select(Needs.scoring((2, 3)), anchors)
    steps += [plan.rest(layer, ~recomputed) for layer in (1, 2, 3)]
    count = read_rows(rows, steps)
    assert count.max() <= 1 and count[0].sum() == 0
    for layer in (1, 2, 3):
        for part in (0, 1):
            assert count[layer, part][rows.rows_for(~recomputed, layer)].all()
    for layer, part in ((2, 0), (3, 0)):
        assert count[layer, part][rows.row_of_token(layer)].all(), "critical layers need all keys"
    for layer in (1, 2):
        assert count[layer][:, rows.leading_rows(anchors)].all()
    if gap == 0 and rows_per_block == 1:
        assert not count[3, 1][~rows.rows_for(~recomputed, 3)].any(), "V rows of P in the deepest layer serve nobody"
    exists = np.repeat(rows.block_rows, rows_per_block) > np.tile(np.arange(rows_per_block), rows.num_blocks)
    assert plan.bytes()["requested"] + plan.bytes()["fill"] == (count * exists).sum() * GEOMETRY.row_bytes
    assert sum(s.requested_bytes + s.fill_bytes for s in steps) == (count * exists).sum() * GEOMETRY.row_bytes
    assert (plan.bytes()["fill"] > 0) <= (gap > 0)


def test_a_chunk_that_occurs_twice_is_read_once_and_kept_for_both():
    once, twice = context(GEOMETRY, [40, 24], 1), context(GEOMETRY, [40, 24], 1, repeat=(0,))
    assert twice.num_context_tokens == 104 and twice.num_rows == once.num_rows
    plan = ReadPlan(twice, gap=0)
    recomputed = np.zeros(104, bool)
    recomputed[:40] = True  # the first occurrence needs no rows, the second all
    assert plan.rest(1, ~recomputed).requested_bytes == 2 * 64 * GEOMETRY.row_bytes
    recomputed[64:] = True
    assert plan.rest(2, ~recomputed).requested_bytes == 2 * 24 * GEOMETRY.row_bytes


def test_needs_of_the_selectors():
    assert Needs.scoring((20, 21, 18)) == Needs(anchor_layers=tuple(range(1, 21)), key_layers=(18, 20, 21))
    assert Needs.scoring(range(4)) == Needs(anchor_layers=(1, 2), key_layers=(1, 2, 3))
    assert Needs.scoring(()) == Needs.scoring((0,)) == Needs(anchor_layers=(), key_layers=())
    rows = context(GEOMETRY, [40, 24], 1)
    prophet, fusionrag = ReadPlan(rows, gap=0), ReadPlan(rows, gap=0)
    prophet.select(Needs.scoring(range(4)), [40, 24])  # all it scores, all it attends to: V of the last layer is left
    assert prophet.bytes()["before_recompute"] == (2 * 3 - 1) * 64 * GEOMETRY.row_bytes
    fusionrag.select(Needs.scoring((3,)), [0, 0])
    assert fusionrag.bytes()["before_recompute"] == 64 * GEOMETRY.row_bytes


def test_orders_per_layer_lead_to_the_right_rows():
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(12) for _ in range(3)])
    rows = ContextRows.of(GEOMETRY, [ids_of(12)], [order], 1)
    for layer in (1, 2, 3):
        assert (rows.row_of_token(layer)[order[layer - 1]] == np.arange(12)).all()
    wanted = np.zeros(12, bool)
    wanted[order[1][:3]] = True
    plan = ReadPlan(rows, gap=0)
    assert plan.rest(2, wanted).runs.tolist() == [[0, 0, 3], [1, 0, 3]]
    assert plan.rest(3, wanted).requested_bytes == 6 * GEOMETRY.row_bytes


def test_runs_stop_at_chunks_and_gaps_are_read_through_unless_read_before():
    chunk = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1])
    mask = np.array([[1, 0, 1, 0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 0, 0, 0]], bool)
    runs = runs_of(mask, chunk)
    assert runs.tolist() == [[0, 0, 1], [0, 2, 3], [0, 5, 6], [0, 6, 7], [0, 8, 9], [1, 5, 6]]
    closed = np.zeros_like(mask)
    assert coalesce(runs, 1, chunk, closed).tolist() == runs.tolist()
    assert coalesce(runs, 2, chunk, closed).tolist() == [[0, 0, 3], [0, 5, 6], [0, 6, 9], [1, 5, 6]]
    assert coalesce(runs, 3, chunk, closed).tolist() == [[0, 0, 6], [0, 6, 9], [1, 5, 6]]
    closed[0, 4] = True
    assert coalesce(runs, 3, chunk, closed).tolist() == [[0, 0, 3], [0, 5, 6], [0, 6, 9], [1, 5, 6]]


def test_speculation_takes_low_ranks_first_and_its_waste_is_counted():
    rows = context(GEOMETRY, [40, 24], 1)
    plan = ReadPlan(rows, gap=0)
    plan.select(Needs(anchor_layers=(1,), key_layers=()), [4, 4])
    steps = list(plan.speculate(0.5, 5 * GEOMETRY.row_bytes))
    assert [step.layer for step in steps] == sorted(step.layer for step in steps)
    last_of_chunk = [run for step in steps if step.layer == 1 for run in step.runs.tolist() if run[0] == 0]
    assert last_of_chunk[0][2] == rows.row_base[1] + 24 and all(end - first <= 5 for _, first, end in last_of_chunk)
    count = read_rows(rows, steps)
    assert count.max() == 1 and (count[1:].sum((1, 2)) == 2 * (20 + 12)).all()
    for step in steps[:6]:
        plan.commit(step)
    recomputed = select_random(64, 0.5)
    taken = read_rows(rows, steps[:6])[1].astype(bool)
    kept = rows.rows_for(~recomputed, 1)
    assert plan.wasted_bytes(recomputed, 1) == (taken & ~kept).sum() * GEOMETRY.row_bytes > 0
    rest = plan.rest(1, ~recomputed)
    assert not (read_rows(rows, [rest])[1].astype(bool) & taken).any()
    assert plan.bytes()["before_recompute"] == 2 * 8 * GEOMETRY.row_bytes + taken.sum() * GEOMETRY.row_bytes


def test_bad_arguments_are_refused():
    rows = context(GEOMETRY, [5], 1)
    with pytest.raises(ValueError, match="gap=-1"):
        ReadPlan(rows, gap=-1)
    with pytest.raises(ValueError, match="share=2"):
        next(ReadPlan(rows, gap=0).speculate(2, 1))
    with pytest.raises(ValueError, match="row order"):
        ContextRows.of(GEOMETRY, [ids_of(5)], [np.arange(4)], 1)
