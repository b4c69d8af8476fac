import json
import re
from dataclasses import replace

import pytest
import safetensors
import torch

from qcfuse.store import chunk_file
from qcfuse.store.chunk_file import ChunkError, ChunkIdentity
from qcfuse.store.geometry import ChunkLayout, KVGeometry
from tests.store.conftest import GEOMETRY, make_cache

IDENTITY = ChunkIdentity(kind="chunk", model_key="model", anchor_key="kvzip", content="ab" * 32)


def encode(cache, geometry=GEOMETRY, rows_per_block=4):
    return chunk_file.encode(cache.k, cache.v, cache.order, geometry, rows_per_block, IDENTITY)


def reader(raw):
    return lambda offset, size: bytes(raw[offset : offset + size])


def parse(raw, num_tokens, geometry=GEOMETRY, rows_per_block=4, identity=IDENTITY):
    return chunk_file.parse_header(reader(raw), num_tokens, geometry, rows_per_block, identity)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 4, 63, 129])
def test_safetensors_reads_what_was_encoded(tmp_path, dtype, groups, num_tokens):
    geometry = replace(GEOMETRY, dtype=dtype, head_groups=groups)
    cache = make_cache(num_tokens, geometry)
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(encode(cache, geometry).image.numpy().tobytes())
    heads = geometry.group_heads
    with safetensors.safe_open(path, "pt") as file:
        names = {name for name in file.keys() if not name.startswith("pad.")}
        assert names == {"order"} | {f"{p}.{layer}.{g}" for p in "kv" for layer in (1, 2, 3) for g in range(groups)}
        assert torch.equal(file.get_tensor("order"), cache.order)
        for layer in (1, 2, 3):
            for g in range(groups):
                own = slice(g * heads, (g + 1) * heads)
                assert torch.equal(file.get_tensor(f"k.{layer}.{g}"), cache.k[layer - 1][:, own])
                assert torch.equal(file.get_tensor(f"v.{layer}.{g}"), cache.v[layer - 1][:, own])


def test_every_tensor_starts_on_a_page_and_offsets_agree_with_the_header():
    geometry = replace(GEOMETRY, head_groups=2)
    stored = encode(make_cache(67, geometry), geometry)
    raw = stored.image.numpy().tobytes()
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:header_bytes])
    assert header_bytes % 4096 == 0 and stored.header.data_start == header_bytes
    for name, entry in entries.items():
        if found := re.fullmatch(r"([kv])\.(\d+)\.(\d+)", name):
            part, layer, group = found.groups()
            offset = stored.header.offset("kv".index(part), int(layer), int(group))
            assert offset == header_bytes + entry["data_offsets"][0] and offset % 4096 == 0


@pytest.mark.parametrize("orders", [1, 3])
def test_decode_gives_back_rows_and_orders(orders):
    cache = make_cache(10, orders=orders)
    stored = encode(cache)
    header = parse(stored.image.numpy(), 10)
    k, v, order = chunk_file.decode(chunk_file.Stored(stored.image, header))
    assert torch.equal(k, cache.k) and torch.equal(v, cache.v) and torch.equal(order, cache.order)


def test_one_block_is_verified_without_the_others():
    cache = make_cache(10)
    image, header = encode(cache)
    start = header.offset(1, 2, 0)
    block = header.layout.block_bytes
    raw = memoryview(image.numpy())
    raw[start + block] ^= 1
    assert header.verify(raw[start : start + block], 1, 2, 0, 0)
    assert not header.verify(raw[start : start + 2 * block], 1, 2, 0, 0)
    assert not header.verify(raw[start + block : start + 2 * block], 1, 2, 0, 1)
    tail = raw[start + 2 * block : start + header.layout.tensor_bytes]
    assert len(tail) == block // 2 and header.verify(tail, 1, 2, 0, 2)
    assert not header.verify(tail, 1, 2, 0, 1) and not header.verify(raw[start : start + 4 * block], 1, 2, 0, 0)


@pytest.mark.parametrize("field, value", [
    ("model_key", "other"), ("anchor_key", "sink"), ("content", "cd" * 32), ("kind", "prefix"),
])  # fmt: skip
def test_a_file_of_something_else_is_foreign(field, value):
    raw = encode(make_cache(9)).image.numpy()
    with pytest.raises(ChunkError) as caught:
        parse(raw, 9, identity=replace(IDENTITY, **{field: value}))
    assert caught.value.reason == "foreign"


@pytest.mark.parametrize("change", [{"num_layers": 5}, {"num_kv_heads": 2}, {"head_dim": 8}, {"dtype": "bfloat16"},
                                    {"head_groups": 2}])  # fmt: skip
def test_a_file_of_another_geometry_is_foreign(change):
    raw = encode(make_cache(9)).image.numpy()
    with pytest.raises(ChunkError) as caught:
        parse(raw, 9, geometry=replace(GEOMETRY, **change))
    assert caught.value.reason == "foreign"


def test_wrong_caches_are_refused():
    cache = make_cache(9)
    with pytest.raises(ValueError, match="permutation"):
        chunk_file.encode(cache.k, cache.v, torch.zeros(9, dtype=torch.int64), GEOMETRY, 4, IDENTITY)
    with pytest.raises(ValueError, match="bfloat16"):
        chunk_file.encode(cache.k.bfloat16(), cache.v, cache.order, GEOMETRY, 4, IDENTITY)
    with pytest.raises(ValueError, match="at least one token"):
        ChunkLayout(geometry=GEOMETRY, num_tokens=0, rows_per_block=4, num_orders=1)
    with pytest.raises(ValueError, match="does not divide"):
        KVGeometry(num_layers=4, num_kv_heads=4, head_dim=6, dtype="float32", head_groups=3)
