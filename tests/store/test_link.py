import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qcfuse.store.bench import LinkArm, bench_link
from qcfuse.store.buffers import BufferPool, LayerBuffer
from qcfuse.store.context import ContextRows
from qcfuse.store.device_reads import device_reads
from qcfuse.store.geometry import KVGeometry
from qcfuse.store.link import Link
from qcfuse.store.planner import Needs, ReadPlan
from qcfuse.store.throttle import Throttle
from tests.store.conftest import GEOMETRY, LINK, ids_of, make_cache

LENGTHS = [1, 63, 129, 40]


def open_context(config, tier, geometry, lengths=LENGTHS, repeat=()):
    store = replace(config, tier=tier).open(model_key="model", anchor_key="kvzip", geometry=geometry)
    caches = [make_cache(n, geometry, seed=i) for i, n in enumerate(lengths)]
    ids = [ids_of(n, i) for i, n in enumerate(lengths)]
    for one, cache in zip(ids, caches, strict=True):
        assert store.put(one, cache)
    sources = [store.open(one) for one in ids]
    places = [*range(len(lengths)), *repeat]
    rows = ContextRows.of(geometry, [ids[i] for i in places], [sources[i].header.order for i in places],
                          config.rows_per_block)
    return store, sources, rows, [caches[i] for i in places], [ids[i] for i in places]


def token_order(caches, part, layer):
    """[N, Hkv, D] of one layer in the order of the context."""
    return torch.cat([getattr(cache, part)[layer - 1][torch.argsort(cache.order)] for cache in caches])


@pytest.mark.parametrize("tier, direct", [("disk", "auto"), ("disk", "never"), ("ram", "auto")])
@pytest.mark.parametrize("groups", [1, 2])
def test_planned_rows_arrive_where_they_belong(config, tier, direct, groups):
    geometry = replace(GEOMETRY, head_groups=groups)
    config = replace(config, link=replace(LINK, direct=direct, max_op_bytes=4096))
    _, sources, rows, caches, _ = open_context(config, tier, geometry, repeat=(2,))
    pool, link = BufferPool(10**8, pinned=False), Link(config.link)
    recomputed = np.random.default_rng(0).random(rows.num_context_tokens) < 0.5
    for group in range(groups):
        plan = ReadPlan(rows, gap=0)
        buffers = {layer: LayerBuffer(pool, rows) for layer in (1, 2, 3)}
        for buffer in buffers.values():
            buffer.memory.fill_(255)  # NaN in float32
        steps = plan.select(Needs.scoring((2, 3)), [1, 7, 13, 4])
        steps += [plan.rest(layer, ~recomputed) for layer in (1, 2, 3)]
        transfers = [link.submit(step, rows, sources, buffers[step.layer], group=group) for step in steps]
        assert [transfer.wait() for transfer in transfers] == [{}] * len(steps)
        assert sum(t.requested_bytes for t in transfers) == plan.bytes()["requested"]
        heads = slice(group * geometry.group_heads, (group + 1) * geometry.group_heads)
        kept = torch.from_numpy(~recomputed)
        for layer, buffer in buffers.items():
            at = torch.from_numpy(rows.row_of_token(layer))
            assert torch.equal(buffer.k[at][kept], token_order(caches, "k", layer)[kept][:, heads])
            assert torch.equal(buffer.v[at][kept], token_order(caches, "v", layer)[kept][:, heads])
        assert torch.equal(buffers[3].k[torch.from_numpy(rows.row_of_token(3))], token_order(caches, "k", 3)[:, heads])
        if tier == "ram":
            assert buffers[3].v.isnan().any(), "rows of P must not be read"
            assert sum(t.device_bytes for t in transfers) == plan.bytes()["requested"]
        for buffer in buffers.values():
            buffer.release()
    link.close()


def test_direct_reads_bypass_the_page_cache_and_match_the_device(config):
    geometry = KVGeometry(num_layers=3, num_kv_heads=3, head_dim=64, dtype="float32", head_groups=1)
    store, sources, rows, _, _ = open_context(config, "disk", geometry, [128, 100])
    if not sources[0].is_direct:
        pytest.skip("this file system has no O_DIRECT")
    recomputed = np.random.default_rng(0).random(rows.num_context_tokens) < 0.5
    plan, link, pool = ReadPlan(rows, gap=0), Link(config.link), BufferPool(10**8, pinned=False)
    for _ in range(2):  # a re-read is not served from the page cache either
        plan = ReadPlan(rows, gap=0)
        before = read_bytes()
        transfers = [link.submit(plan.rest(layer, ~recomputed), rows, sources, LayerBuffer(pool, rows))
                     for layer in (1, 2)]
        assert all(transfer.wait() == {} for transfer in transfers)
        device = sum(transfer.device_bytes for transfer in transfers)
        assert plan.bytes()["requested"] <= device == read_bytes() - before
    link.close()


def read_bytes():
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M).group(1))


@pytest.mark.parametrize("page_bytes, max_op_bytes", [(1, 4096), (4096, 4096), (4096, 1 << 20)])
def test_operations_cover_the_plan_once_and_stay_in_their_tensor(config, page_bytes, max_op_bytes):
    _, sources, rows, _, _ = open_context(config, "disk", GEOMETRY)
    headers = [source.header for source in sources]
    step = ReadPlan(rows, gap=0).rest(2, np.random.default_rng(1).random(rows.num_context_tokens) < 0.3)
    ops = device_reads(step, rows, headers, group=0, page_bytes=page_bytes, max_op_bytes=max_op_bytes)
    touched = np.zeros(2 * rows.num_rows * GEOMETRY.row_bytes, int)
    for chunk, offset, size, target in ops:
        assert 0 < size <= max_op_bytes and offset % page_bytes == target % page_bytes == size % page_bytes == 0
        part = target // (rows.num_rows * GEOMETRY.row_bytes)
        start = headers[chunk].offset(part, 2, 0)
        base = (part * rows.num_rows + rows.row_base[chunk]) * GEOMETRY.row_bytes
        assert offset - start == target - base and offset + size <= start + headers[chunk].layout.tensor_stride
        touched[target : target + size] += 1
    assert touched.max() == 1
    wanted = np.repeat([[part, row] for part, first, end in step.runs for row in range(first * 4, end * 4)], 1, axis=0)
    real = np.repeat(rows.block_rows, 4) > np.tile(np.arange(4), rows.num_blocks)
    for part, row in wanted:
        at = (part * rows.num_rows + row) * GEOMETRY.row_bytes
        assert not real[row] or touched[at : at + GEOMETRY.row_bytes].all()
    assert page_bytes > 1 or touched.sum() == step.requested_bytes


@pytest.mark.parametrize("tier", ["disk"])
def test_damaged_rows_fail_their_chunk_only_where_they_are_read(config, tier):
    store, sources, rows, _, ids = open_context(config, tier, GEOMETRY)
    path = config.root_path / store._path(store._identity(ids[2]))
    with path.open("r+b") as file:  # row 100 of k in layer 2
        file.seek(sources[2].header.offset(0, 2, 0) + 100 * GEOMETRY.row_bytes)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    link, pool = Link(config.link), BufferPool(10**8, pinned=False)
    plan, step_of = ReadPlan(rows, gap=0), {}
    for layer in (1, 2):
        step_of[layer] = plan.rest(layer, np.ones(rows.num_context_tokens, bool))
    anchors = ReadPlan(rows, gap=0).select(Needs(anchor_layers=(2,), key_layers=()), [1, 20, 20, 20])[0]
    found = {name: link.submit(step, rows, sources, LayerBuffer(pool, rows)).wait()
             for name, step in [(1, step_of[1]), (2, step_of[2]), ("anchors", anchors)]}
    assert found[1] == found["anchors"] == {} and list(found[2]) == [2] and found[2][2].reason == "corrupt"
    hits = store.counters["hits"]
    store.reject(ids[2], found[2][2])
    assert store.counters["corrupt"] == 1 and store.counters["hits"] == hits - 1 and store.open(ids[2]) is None
    link.close()


def test_a_file_cut_short_or_evicted_while_it_is_open(config):
    store, sources, rows, caches, ids = open_context(config, "disk", GEOMETRY, [40, 24])
    root = config.root_path
    (root / store._path(store._identity(ids[0]))).unlink()  # evicted: the open descriptor still reads it
    with (root / store._path(store._identity(ids[1]))).open("r+b") as file:
        file.truncate(sources[1].header.data_start)
    link, buffer = Link(config.link), LayerBuffer(BufferPool(10**8, pinned=False), rows)
    failed = link.submit(ReadPlan(rows, gap=0).rest(1, np.ones(64, bool)), rows, sources, buffer).wait()
    assert list(failed) == [1]
    assert torch.equal(buffer.k[:40], caches[0].k[0])
    link.close()


def test_speculation_waits_for_decided_reads_and_can_be_dropped(config):
    """A link of 0.2 s per page and one loader: what runs next is then decided by priority alone."""
    _, sources, rows, _, _ = open_context(config, "disk", GEOMETRY)
    link = Link(replace(LINK, bandwidth_gb_per_s=2e-5, queue_depth=1))
    pool, plan = BufferPool(10**8, pinned=False), ReadPlan(rows, gap=0)
    one = np.arange(rows.num_context_tokens) == 0
    speculated = [link.submit(step, rows, sources, LayerBuffer(pool, rows))
                  for step in list(plan.speculate(0.5, 1024)) if step.layer == 1]
    decided = link.submit(plan.rest(2, one), rows, sources, LayerBuffer(pool, rows))
    assert decided.num_ops == 2 and decided.wait() == {}
    dropped = link.drop_speculation()
    begun = [transfer for transfer in speculated if not transfer.is_cancelled]
    assert len(dropped) == len(speculated) - len(begun) > 0
    for transfer in speculated:
        assert transfer.wait() == {} and (transfer.start_s is None) == (transfer.step in dropped)
    for transfer in begun:
        assert transfer.start_s <= decided.start_s or transfer.start_s >= decided.end_s, "a decided read was delayed"
    link.close()


def run_line(throttle, sizes, delays, loaders=1):
    """Loaders that take operations in turn on a virtual clock, waking up late by the given delays."""
    now, previous, done = [0.0] * loaders, [0.0] * loaders, []
    for size, delay in zip(sizes, delays, strict=True):
        i = min(range(loaders), key=now.__getitem__)
        due = throttle.book(size, submitted_s=0.0, previous_done_s=previous[i], now_s=now[i])
        now[i] = max(now[i], due) + delay
        previous[i] = due
        done.append(now[i])
    return max(done)


def test_a_throttled_line_repays_late_wake_ups():
    line = Throttle(bytes_per_s=1e9, latency_s=0.0, window_s=0.01)
    assert run_line(line, [10**6] * 1000, [0.0] * 1000) == pytest.approx(1.0)
    line = Throttle(bytes_per_s=1e9, latency_s=0.0, window_s=0.01)
    late = run_line(line, [10**4] * 100_000, [80e-6] * 100_000)  # eight times the operation itself, every time
    assert late > 7, "no line can repay what is lost at every operation"
    line = Throttle(bytes_per_s=1e9, latency_s=0.0, window_s=0.01)
    delays = [0.002 if i % 10 == 0 else 0.0 for i in range(1000)]
    assert run_line(line, [10**6] * 1000, delays) == pytest.approx(1.0, rel=0.005)


def test_a_long_stall_is_not_made_up_for_and_idle_time_saves_nothing():
    line = Throttle(bytes_per_s=1e9, latency_s=0.0, window_s=0.01)
    delays = [0.5] + [0.0] * 999
    assert run_line(line, [10**6] * 1000, delays) == pytest.approx(1.5 - 0.01, abs=0.002)
    line = Throttle(bytes_per_s=1e9, latency_s=0.0, window_s=0.01)
    first = line.book(10**6, submitted_s=0.0, previous_done_s=0.0, now_s=0.0)
    assert line.book(10**6, submitted_s=5.0, previous_done_s=first, now_s=5.0) == pytest.approx(5.001)


@pytest.mark.parametrize("loaders, expected_s", [(1, 100 * 1.5e-3), (2, 100 * 0.75e-3), (4, 100 * 0.5e-3)])
def test_latencies_overlap_up_to_the_queue_depth(loaders, expected_s):
    line = Throttle(bytes_per_s=1e9, latency_s=1e-3, window_s=0.01)
    assert run_line(line, [500_000] * 100, [0.0] * 100, loaders) == pytest.approx(expected_s, rel=0.04)


def test_a_slow_setting_is_kept_and_a_fast_one_is_reported_as_missed(config, caplog):
    """Not a timing test: 20 ms of link time cannot pass in less, and no machine copies a million GB in a second."""
    _, sources, rows, _, _ = open_context(config, "ram", GEOMETRY)
    buffer = LayerBuffer(BufferPool(10**8, pinned=False), rows)
    step = ReadPlan(rows, gap=0).rest(1, np.ones(rows.num_context_tokens, bool))
    slow = Link(replace(LINK, bandwidth_gb_per_s=step.requested_bytes / 0.02 / 1e9))
    transfer = slow.submit(step, rows, sources, buffer)
    transfer.wait()
    assert transfer.end_s - transfer.submitted_s >= 0.0199 and slow.report().num_bytes == step.requested_bytes
    slow.close()
    fast = Link(replace(LINK, bandwidth_gb_per_s=1e6))
    fast.submit(step, rows, sources, buffer).wait()
    report = fast.report()
    assert report.reached is False and report.gb_per_s < 1e6 and "the device" in caplog.text
    fast.close()


def test_an_empty_step_is_done_at_once(config):
    _, sources, rows, _, _ = open_context(config, "ram", GEOMETRY)
    link = Link(LINK)
    step = ReadPlan(rows, gap=0).rest(1, np.zeros(rows.num_context_tokens, bool))
    assert link.submit(step, rows, sources, LayerBuffer(BufferPool(10**8, pinned=False), rows)).wait() == {}
    assert link.report().reached is None
    link.close()


def test_buffers_are_aligned_reused_and_limited():
    pool = BufferPool(3 * 8192, pinned=False)
    first, second = pool.acquire(8192), pool.acquire(5000)
    assert first.data_ptr() % 4096 == second.data_ptr() % 4096 == 0 and second.numel() == 8192
    pool.release(first)
    assert pool.acquire(8000).data_ptr() == first.data_ptr() and pool.held_bytes == 16384
    pool.release(second)
    assert pool.acquire(16384).numel() == 16384 and pool.held_bytes == 24576
    with pytest.raises(ValueError, match="buffer_gb"):
        pool.acquire(30_000)


def test_bench_link_measures_every_arm(config):
    settings = {"ram": 0.5, "disk": None}
    arms = [LinkArm(tier=tier, gb_per_s=speed, transfer_bytes=1 << 20) for tier, speed in settings.items()]
    found = bench_link(config, arms, file_bytes=8 << 20, seconds=0.02, rounds=2)
    assert set(found) == {"ram@0.5,1MiB", "disk@max,1MiB"} and all(len(arm["raw"]) == 2 for arm in found.values())
    assert 0 < found["ram@0.5,1MiB"]["median"] < 0.55 and found["disk@max,1MiB"]["reached"] is None


@pytest.mark.parametrize("change", [{"bandwidth_gb_per_s": 0}, {"queue_depth": 0}, {"max_op_bytes": 5000},
                                    {"direct": "yes"}, {"latency_s": -1}, {"window_s": 0},
                                    {"warn_below": 2}])  # fmt: skip
def test_bad_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change)).split("_")[0]):
        replace(LINK, **change)
