"""Fusion over a link: the same tokens, keys and logits as from memory, whatever the planner, link and faults do."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from qcfuse.engine.links import Links
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.fuse import Fusion
from qcfuse.fusion.prepare import prepare_chunk, prepare_prefix
from qcfuse.fusion.schedule import schedule_bound_s
from qcfuse.fusion.timeline import Timeline
from qcfuse.store import KVGeometry, LinkConfig, StoreConfig
from qcfuse.store.opened import Makers
from tests.factories import SWEPT, rule, selector
from tests.fusion.conftest import CRITICAL, Rig, encode, make_request

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LINK = LinkConfig(bandwidth_gb_per_s=None, latency_s=0.0, queue_depth=2, window_s=0.01, max_op_bytes=1 << 20,
                  direct="auto", verify=True, warn_below=0.97)  # fmt: skip


class LinkedRig:
    """A rig whose caches lie in a store and come over a link."""

    def __init__(self, rig: Rig, root, the_rule=None, **changes) -> None:
        self.rig, self.rule, self.made = rig, the_rule or rule("sink"), []
        decoder = rig.decoder
        config = StoreConfig(tier="disk", root=str(root), ram_gb=1.0, disk_gb=1.0, rows_per_block=2, head_groups=1,
                             gap=0, speculate=False, buffer_gb=0.1, match=None, presets={}, link=LINK)  # fmt: skip
        self.config = replace(config, **changes)
        geometry = KVGeometry.of(num_layers=decoder.num_layers, num_kv_heads=decoder.num_kv_heads,
                                 head_dim=decoder.head_dim, dtype=decoder.dtype, head_groups=1)  # fmt: skip
        self.store = self.config.open(model_key="m", anchor_key="a", geometry=geometry)
        makers = Makers(chunk=self.make, prefix=lambda ids: prepare_prefix(decoder, ids))
        self.links = Links(self.store, makers, pinned=False)
        for ids in rig.request.chunk_ids:
            self.store.put(ids, prepare_chunk(decoder, ids, self.rule, encode))
        if rig.request.prefix_ids:
            self.store.put_prefix(rig.request.prefix_ids, prepare_prefix(decoder, rig.request.prefix_ids))

    def make(self, ids):
        self.made.append(ids)
        return prepare_chunk(self.rig.decoder, ids, self.rule, encode)

    def fuse(self, the_selector, rho, gb_per_s=None, between=None):
        """between: called when P is known, before the rest is read."""
        rig = self.rig
        timeline = Timeline()
        timeline.to("engine")
        cache = KVCache.empty(rig.decoder, rig.layout.num_tokens)
        for tensor in (cache.k, cache.v):
            tensor.fill_(torch.nan)
        with self.links.source(rig.request, rig.layout, timeline, gb_per_s=gb_per_s, rho=rho) as source:
            fusion = Fusion(decoder=rig.decoder, layout=rig.layout, source=source, cache=cache, timeline=timeline,
                            critical=CRITICAL)  # fmt: skip
            selection = fusion.select(the_selector, rho, 0, fusion.probe(fusion.spec(the_selector)))
            if between is not None:
                between()
            logits, selection = fusion.finish(the_selector, rho, selection)
            self.ttft_s = timeline.finish()
            source.add_spans()
            self.bytes, self.timeline = source.bytes(), timeline
        assert self.links._pool.held_bytes <= self.config.buffer_bytes
        return logits, selection, cache

    def paths(self):
        return sorted(self.config.root_path.glob("*/a/*/*.safetensors"))


def assert_same(mine, theirs):
    torch.testing.assert_close(mine[0], theirs[0], **CLOSE)
    assert mine[1].selected.tolist() == theirs[1].selected.tolist()
    torch.testing.assert_close(mine[2].k, theirs[2].k, **CLOSE)
    torch.testing.assert_close(mine[2].v, theirs[2].v, **CLOSE)


@pytest.mark.parametrize("name", [*SWEPT, "direct_reuse"])
@pytest.mark.parametrize("rho", [0, 0.3, 1])
@pytest.mark.parametrize("changes", [{}, {"gap": 3, "rows_per_block": 1}, {"speculate": True}], ids=str)
def test_a_link_gives_what_memory_gives(rig, tmp_path, name, rho, changes):
    linked = LinkedRig(rig, tmp_path, **changes)
    assert_same(linked.fuse(selector(name), rho), rig.fuse(selector(name), rho))
    assert not linked.made and all(s >= 0 for s in linked.timeline.stages_s().values())


@pytest.mark.parametrize("changes", [{"score_rope": "chunk_local"}, {"layers": "all"}, {"layers": [0]}, {"layers": [1]},
                                     {"anchor_ratio": 1.0}, {"anchor_ratio": 0.0}], ids=str)  # fmt: skip
@pytest.mark.parametrize("speculate", [False, True])
def test_variants_of_the_probe_over_a_link(rig, tmp_path, changes, speculate):
    the_selector = selector("qcfuse", **changes)
    linked = LinkedRig(rig, tmp_path, speculate=speculate)
    assert_same(linked.fuse(the_selector, 0.4), rig.fuse(the_selector, 0.4))


@pytest.mark.parametrize("name", ["qcfuse", "prophetkv", "epic"])
def test_orders_per_layer_over_a_link(tiny, tmp_path, name):
    per_layer = rule("knorm", scope="layer", num_sinks=1)
    rig = Rig(tiny, make_request(), per_layer)
    assert_same(LinkedRig(rig, tmp_path, per_layer).fuse(selector(name), 0.3), rig.fuse(selector(name), 0.3))


@pytest.mark.parametrize("chunks, prefix", [((7, 12), 0), ((1, 1), 3), ((30,), 5)])
def test_no_prefix_one_token_chunks_one_chunk(tiny, tmp_path, chunks, prefix):
    rig = Rig(tiny, make_request(chunks=chunks, prefix=prefix))
    for name in ("qcfuse", "prophetkv", "random"):
        assert_same(LinkedRig(rig, tmp_path / name).fuse(selector(name), 0.5), rig.fuse(selector(name), 0.5))


def test_a_chunk_that_occurs_twice_is_read_once(tiny, tmp_path):
    once = make_request(chunks=(9, 14))
    request = replace(once, chunk_ids=(*once.chunk_ids, once.chunk_ids[0]))
    rig = Rig(tiny, request)
    linked = LinkedRig(rig, tmp_path)
    assert_same(linked.fuse(selector("qcfuse"), 0.3), rig.fuse(selector("qcfuse"), 0.3))
    linked.fuse(selector("direct_reuse"), 0)
    per_token = linked.bytes["total_kv"] / request.num_context_tokens
    layers = rig.decoder.num_layers
    assert linked.bytes["requested"] == 23 * per_token * (layers - 1) / layers


@pytest.mark.parametrize("name", ["qcfuse", "prophetkv", "fusionrag"])
@pytest.mark.parametrize("speculate", [False, True])
def test_buffers_of_two_layers_are_enough(rig, tmp_path, name, speculate):
    linked = LinkedRig(rig, tmp_path)
    with linked.links.source(rig.request, rig.layout, Timeline(), gb_per_s=None, rho=0) as source:
        two = 2 * sum(2 * owner.rows.num_rows * owner.rows.geometry.row_bytes
                      for owner in (source._context, source._prefix))  # fmt: skip
    small = LinkedRig(rig, tmp_path, buffer_gb=two / 1e9, speculate=speculate)
    assert_same(small.fuse(selector(name), 0.3), rig.fuse(selector(name), 0.3))
    assert 0 < small.links._pool.held_bytes <= two
    with pytest.raises(ValueError, match=r"storage\.buffer_gb=.* two layers"):
        LinkedRig(rig, tmp_path, buffer_gb=two * 0.9 / 1e9).fuse(selector(name), 0.3)


def test_buffers_are_reused(rig, tmp_path):
    linked = LinkedRig(rig, tmp_path)
    linked.fuse(selector("prophetkv"), 0.3)
    held = linked.links._pool.held_bytes
    for _ in range(3):
        linked.fuse(selector("qcfuse"), 0.3)
    assert linked.links._pool.held_bytes == held


def test_bytes_are_the_plan_and_stages_add_up(rig, tmp_path):
    linked = LinkedRig(rig, tmp_path, rows_per_block=1)
    linked.fuse(selector("prophetkv"), 0.3)
    found = linked.bytes
    layers, total = rig.decoder.num_layers, found["total_kv"]
    assert found["before_recompute"] == total * (2 * (layers - 1) - 1) / (2 * layers), "all but the last layer's values"
    assert found["before_recompute"] <= found["requested"] <= total and found["device"] >= found["requested"]
    assert found["wasted"] == 0 and found["prefix"] > 0
    stages = linked.timeline.stages_s()
    assert sum(stages.values()) == pytest.approx(linked.ttft_s, rel=0.02)
    kinds = {span.kind for span in linked.timeline.spans if span.thread == "link"}
    assert kinds == {"prefix", "view", "keys", "rest"}
    assert json.dumps(linked.timeline.chrome_trace())
    reads = [span for span in linked.timeline.spans if span.thread == "link"]
    assert sum(span.num_bytes for span in reads if span.kind != "prefix") == found["device"]


def test_speculation_reads_ahead_and_counts_its_waste(rig, tmp_path):
    linked = LinkedRig(rig, tmp_path, rows_per_block=1, speculate=True)
    linked.fuse(selector("qcfuse"), 0.5)
    spans = [span for span in linked.timeline.spans if span.kind == "speculate"]
    assert spans and sum(s.num_bytes for s in spans) >= linked.bytes["wasted"] >= 0
    assert linked.bytes["before_recompute"] <= linked.bytes["requested"]


def test_dropped_speculation_takes_no_part_in_the_replay(rig, tmp_path):
    linked = LinkedRig(rig, tmp_path, speculate=True)
    linked.fuse(selector("qcfuse"), 0.5, gb_per_s=1e-3)
    submitted = [event[2] for event in linked.timeline.program if event[0] == "submit"]
    assert sum(submitted) == sum(span.num_bytes for span in linked.timeline.spans if span.thread == "link")
    assert schedule_bound_s(linked.timeline.program, bytes_per_s=1e6) <= 1.01 * linked.ttft_s


def flip(path, at: float) -> None:
    """Damages the file from a point on, a byte in every 256."""
    data = bytearray(path.read_bytes())
    for place in range(int(len(data) * at), len(data), 256):
        data[place] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["qcfuse", "prophetkv", "random"])
@pytest.mark.parametrize("at", [0.35, 0.6, 0.9])
def test_a_flipped_byte_leads_to_a_recompute_never_to_wrong_rows(tiny, tmp_path, name, at):
    rig = Rig(tiny, make_request(chunks=(40, 25)))
    linked = LinkedRig(rig, tmp_path)
    for path in linked.paths():
        flip(path, at)
    assert_same(linked.fuse(selector(name), 0.2), rig.fuse(selector(name), 0.2))
    assert len(linked.made) == linked.store.counters["corrupt"] + linked.store.counters["truncated"] > 0
    linked.made.clear()
    assert_same(linked.fuse(selector(name), 0.2), rig.fuse(selector(name), 0.2))
    assert not linked.made, "what was computed again is stored again"


def test_a_missing_a_truncated_and_a_foreign_chunk_are_computed_again(tiny, tmp_path):
    rig = Rig(tiny, make_request(chunks=(20, 25, 30)))
    linked = LinkedRig(rig, tmp_path)
    missing, truncated, foreign = linked.paths()
    foreign.write_bytes(truncated.read_bytes())
    truncated.write_bytes(truncated.read_bytes()[:-5000])
    missing.unlink()
    assert_same(linked.fuse(selector("qcfuse"), 0.2), rig.fuse(selector("qcfuse"), 0.2))
    counters = linked.store.counters
    assert (counters["missing"], counters["truncated"], counters["foreign"]) == (1, 1, 1) and len(linked.made) == 3


def test_a_damaged_prefix_is_computed_again(rig, tmp_path):
    linked = LinkedRig(rig, tmp_path)
    (path,) = linked.config.root_path.glob("*/prefix/*/*.safetensors")
    flip(path, 0.35)
    assert_same(linked.fuse(selector("qcfuse"), 0.3), rig.fuse(selector("qcfuse"), 0.3))
    assert linked.store.counters["corrupt"] == 1


def test_chunks_that_vanish_while_the_request_runs_stay_readable(rig, tmp_path):
    linked = LinkedRig(rig, tmp_path)
    vanish = lambda: [path.unlink() for path in linked.paths()]  # noqa: E731
    assert_same(linked.fuse(selector("qcfuse"), 0.3, between=vanish), rig.fuse(selector("qcfuse"), 0.3))
    assert not linked.made


def test_the_link_keeps_its_speed_and_the_bound_is_below_ttft(rig, tmp_path):
    linked = LinkedRig(rig, tmp_path)
    linked.fuse(selector("direct_reuse"), 0, gb_per_s=1e-3)
    num_bytes = linked.bytes["device"] + linked.bytes["prefix"]
    assert linked.ttft_s >= 0.97 * num_bytes / 1e6
    bound_s = schedule_bound_s(linked.timeline.program, bytes_per_s=1e6)
    assert 0.5 * linked.ttft_s < bound_s <= 1.01 * linked.ttft_s
    assert linked.timeline.stages_s()["wait_layer"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_in_any_file_never_become_kv(tiny, tmp_path, seed):
    """A fuzz of the loader: files of the right length and of others, random from a random place on."""
    rig = Rig(tiny, make_request(chunks=(20, 25, 30)))
    linked = LinkedRig(rig, tmp_path)
    expected = rig.fuse(selector("qcfuse"), 0.3)
    rng = random.Random(seed)
    for path in linked.config.root_path.glob("*/*/*/*.safetensors"):
        data = path.read_bytes()
        start = rng.randrange(len(data))
        path.write_bytes(data[:start] + rng.randbytes(rng.choice([len(data) - start, rng.randrange(9000)])))
    assert_same(linked.fuse(selector("qcfuse"), 0.3), expected)
