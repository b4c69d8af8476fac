import logging
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from qcfuse.store import file_io
from qcfuse.types import PrefixCache
from tests.store.conftest import GEOMETRY, assert_same, ids_of, make_cache


def fork(work, config):
    """Runs work(store, pipe) in another process; its return is this end of the pipe and the process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def body():
        # A forked child has none of its parent's OpenMP threads; a parallel region would wait for them for ever.
        torch.set_num_threads(1)
        work(config.open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY), there)

    process = context.Process(target=body)
    process.start()
    return here, process


@pytest.mark.parametrize("tier", ["ram", "disk", "ram_disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tier_gives_back_what_was_put(config, tier, dtype):
    geometry = replace(GEOMETRY, dtype=dtype)
    store = replace(config, tier=tier).open(model_key="model", anchor_key="kvzip", geometry=geometry)
    cache, ids = make_cache(37, geometry), ids_of(37)
    assert store.get(ids) is None and not store.contains(ids)
    assert store.put(ids, cache) and store.contains(ids)
    found = store.get(ids)
    assert_same(found, cache)
    assert torch.equal(found.order, cache.order)
    assert store.counters["missing"] == store.counters["hits"] == store.counters["puts"] == 1
    assert store.get(ids[:-1]) is None and store.get(ids[::-1]) is None


def test_a_prefix_is_kept_apart_from_a_chunk_of_the_same_ids(store, config):
    chunk, other, ids = make_cache(5), make_cache(5, seed=1), ids_of(5)
    prefix = PrefixCache(k=other.k, v=other.v)
    store.put_prefix(ids, prefix)
    assert store.get(ids) is None and store.contains_prefix(ids)
    store.put(ids, chunk)
    assert_same(store.get(ids), chunk)
    other_rule = config.open(model_key="model", anchor_key="sink", geometry=GEOMETRY)
    assert_same(other_rule.get_prefix(ids), prefix)
    assert other_rule.get(ids) is None


def test_ram_over_disk_survives_the_process_and_reads_the_disk_once(config, chunk_path):
    config = replace(config, tier="ram_disk")
    cache, ids = make_cache(8), ids_of(8)
    config.open(model_key="m", anchor_key="a", geometry=GEOMETRY).put(ids, cache)
    again = config.open(model_key="m", anchor_key="a", geometry=GEOMETRY)
    assert_same(again.get(ids), cache)
    chunk_path().unlink()
    assert_same(again.get(ids), cache)


@pytest.mark.parametrize("kept", [0, 5, 4000, 4096, 5000, -4096, -1])
def test_a_truncated_file_is_recomputed(store, chunk_path, caplog, kept):
    ids = ids_of(40)
    store.put(ids, make_cache(40))
    path = chunk_path()
    with path.open("r+b") as file:
        file.truncate(kept % path.stat().st_size)
    with caplog.at_level(logging.WARNING):
        assert store.get(ids) is None
    assert store.counters["truncated"] == 1 and store.counters["hits"] == 0
    assert len(caplog.records) == 1 and not store.contains(ids) and not path.exists()
    assert store.put(ids, make_cache(40)) and store.get(ids) is not None


def test_any_flipped_bit_is_found(store, chunk_path):
    """Bits outside the tensors and the header (pads) change nothing; every other one is a miss."""
    ids, cache = ids_of(11), make_cache(11)
    store.put(ids, cache)
    sound = chunk_path().read_bytes()
    rng = np.random.default_rng(0)
    misses = 0
    for at in rng.integers(0, len(sound), 300):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << int(rng.integers(8))
        path = config_path(store, ids)
        path.write_bytes(damaged)
        found = store.get(ids)
        misses += found is None
        if found is not None:
            assert_same(found, cache)
            assert torch.equal(found.order, cache.order)
    assert misses > 30 and store.counters["corrupt"] + store.counters["foreign"] + store.counters["truncated"] == misses


def config_path(store, ids):
    return store.config.root_path / store._path(store._identity(ids))


def test_a_flipped_byte_in_rows_is_corrupt(store, chunk_path):
    ids = ids_of(11)
    store.put(ids, make_cache(11))
    raw = bytearray(chunk_path().read_bytes())
    raw[-4096 + 5] ^= 255  # the last tensor starts on the last page
    chunk_path().write_bytes(raw)
    assert store.contains(ids) and store.get(ids) is None and store.counters["corrupt"] == 1


def test_a_file_of_another_model_is_never_used(config):
    ids = ids_of(12)
    one = config.open(model_key="one", anchor_key="a", geometry=GEOMETRY)
    two = config.open(model_key="two", anchor_key="a", geometry=GEOMETRY)
    one.put(ids, make_cache(12))
    config_path(two, ids).parent.mkdir(parents=True)
    config_path(two, ids).write_bytes(config_path(one, ids).read_bytes())
    assert two.get(ids) is None and two.counters["foreign"] == 1 and not two.contains(ids)
    assert one.get(ids) is not None


def test_random_bytes_never_become_kv(store):
    ids = ids_of(6)
    store.put(ids, make_cache(6))
    path = config_path(store, ids)
    sound = path.read_bytes()
    rng = np.random.default_rng(1)
    for size in [0, 1, 8, 9, 4096, *rng.integers(1, 30_000, 150)]:
        raw = rng.bytes(int(size))
        if size > 64 and rng.random() < 0.5:  # a plausible length word, then rubbish or half of a real header
            raw = (int(size) - 8).to_bytes(8, "little") + sound[8 : int(rng.integers(8, 4000))] + raw[8:]
        path.write_bytes(raw)
        assert store.get(ids) is None
    for text in (b"[]", b"{}", b'{"__metadata__": 3}', b'{"__metadata__": {"format": 1}}', b"[" * 100_000, b"\xff\xfe"):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        assert store.get(ids) is None
    path.write_bytes((2**63).to_bytes(8, "little") + sound[8:])
    assert store.get(ids) is None and store.counters["hits"] == 0


def test_a_full_disk_is_a_counter_and_leaves_nothing(store, monkeypatch, caplog):
    ids, calls = ids_of(30), []

    def full(fd, data):
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) // 2])

    real = os.write
    monkeypatch.setattr(file_io.os, "write", full)
    with caplog.at_level(logging.WARNING):
        assert store.put(ids, make_cache(30)) is False
    monkeypatch.undo()
    assert store.counters["put_failed"] == 1 and "No space left" in caplog.text
    assert not [path for path in store.config.root_path.rglob("*") if path.suffix in (".tmp", ".safetensors")]
    assert store.get(ids) is None and store.put(ids, make_cache(30))


def test_two_processes_write_the_same_chunk(config):
    def work(store, pipe):
        cache = make_cache(64)
        for _ in range(20):
            assert store.put(ids_of(64), cache)
            assert_same(store.get(ids_of(64)), cache)
        pipe.send(store.counters)

    writers = [fork(work, config) for _ in range(2)]
    for pipe, process in writers:
        process.join(60)
        assert process.exitcode == 0
        assert set(+pipe.recv()) == {"puts", "hits"}
    store = config.open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    assert_same(store.get(ids_of(64)), make_cache(64))
    assert not list(config.root_path.rglob("*.tmp"))


def test_kill_9_in_the_middle_of_put(config):
    def work(store, pipe):
        def half(fd, data):
            real(fd, data[:4096])
            pipe.send("half")
            signal.pause()

        real, os.write = os.write, half
        store.put(ids_of(64), make_cache(64))

    pipe, writer = fork(work, config)
    assert pipe.recv() == "half"
    (rest,) = config.root_path.rglob("*.tmp")
    live = config.open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    assert rest.exists() and live.get(ids_of(64)) is None, "a live writer's file must be left alone"
    writer.kill()
    writer.join(10)
    store = config.open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    assert not rest.exists() and store.get(ids_of(64)) is None
    assert store.put(ids_of(64), make_cache(64)) and store.get(ids_of(64)) is not None


def test_the_least_recently_used_chunk_goes_first(config):
    store = replace(config, disk_gb=80e-6).open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    for seed in (0, 1):  # 36,864 bytes each: two fit
        store.put(ids_of(8, seed), make_cache(8, seed=seed))
    store.get(ids_of(8, 0))
    store.put(ids_of(8, 2), make_cache(8, seed=2))
    assert [store.contains(ids_of(8, seed)) for seed in range(3)] == [True, False, True]
    assert store.counters["evicted"] == 1 and store.num_bytes()["disk"] <= 80_000


def test_a_pinned_chunk_is_not_evicted(config, caplog):
    store = replace(config, disk_gb=80e-6).open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    store.put(ids_of(8, 0), make_cache(8))
    with store.pin(ids_of(8, 0), ids_of(8, 3)):
        for seed in (1, 2, 3):
            store.put(ids_of(8, seed), make_cache(8, seed=seed))
        assert [store.contains(ids_of(8, seed)) for seed in range(4)] == [True, False, False, True]
    store.put(ids_of(8, 4), make_cache(8))
    assert not store.contains(ids_of(8, 0))


def test_a_pin_holds_across_processes_and_ends_with_its_process(config):
    config = replace(config, disk_gb=80e-6)
    store = config.open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    store.put(ids_of(8, 0), make_cache(8))

    def hold(store, pipe):
        with store.pin(ids_of(8, 0)):
            pipe.send("pinned")
            signal.pause()

    pipe, holder = fork(hold, config)
    assert pipe.recv() == "pinned"
    for seed in (1, 2):
        store.put(ids_of(8, seed), make_cache(8))
    assert store.contains(ids_of(8, 0)) and not store.contains(ids_of(8, 1))
    holder.kill()
    holder.join(10)
    store.put(ids_of(8, 3), make_cache(8))
    assert not store.contains(ids_of(8, 0)) and store.contains(ids_of(8, 2))


def test_the_ram_tier_evicts_but_keeps_pinned_images(config):
    store = replace(config, tier="ram", ram_gb=80e-6).open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    store.put(ids_of(8, 0), make_cache(8))
    with store.pin(ids_of(8, 0)):
        for seed in (1, 2):
            store.put(ids_of(8, seed), make_cache(8))
        assert [store.contains(ids_of(8, seed)) for seed in range(3)] == [True, False, True]
    store.put(ids_of(8, 3), make_cache(8))
    assert not store.contains(ids_of(8, 0)) and store.num_bytes()["ram"] <= 80_000


def test_a_damaged_index_is_rebuilt_and_lost_rows_are_adopted(config):
    store = config.open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    store.put(ids_of(8), make_cache(8))
    held = store.num_bytes()["disk"]
    store.close()
    for path in config.root_path.glob("index.sqlite*"):
        path.write_bytes(b"not a database, whatever its name says " * 200)
    again = config.open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    assert again.num_bytes()["disk"] == held > 0 and again.get(ids_of(8)) is not None


def test_bad_settings_and_caches_are_refused(store, config):
    with pytest.raises(ValueError, match="tape"):
        replace(config, tier="tape")
    with pytest.raises(ValueError, match="above 0"):
        replace(config, disk_gb=0)
    with pytest.raises(ValueError, match="model_key"):
        config.open(model_key="../other", anchor_key="a", geometry=GEOMETRY)
    with pytest.raises(ValueError, match="taken"):
        config.open(model_key="m", anchor_key="prefix", geometry=GEOMETRY)
    with pytest.raises(ValueError, match="rows"):
        store.put(ids_of(4), make_cache(5))


def test_threads_share_a_store(store):
    def work(seed):
        for _ in range(5):
            assert store.put(ids_of(9, seed), make_cache(9, seed=seed))
            with store.pin(ids_of(9, seed)):
                assert_same(store.get(ids_of(9, seed)), make_cache(9, seed=seed))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert store.counters["index_failed"] == 0
