import numpy as np
import pytest
import torch

from qcfuse.store import KVGeometry, LinkConfig, StoreConfig
from qcfuse.types import ChunkCache

GEOMETRY = KVGeometry(num_layers=4, num_kv_heads=4, head_dim=6, dtype="float32", head_groups=1)


def make_cache(num_tokens, geometry=GEOMETRY, seed=0, orders=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.num_layers - 1, num_tokens, geometry.num_kv_heads, geometry.head_dim)
    k, v = (torch.randn(shape, generator=generator).to(getattr(torch, geometry.dtype)) for _ in range(2))
    permutations = [torch.randperm(num_tokens, generator=generator) for _ in range(orders)]
    return ChunkCache(k=k, v=v, order=permutations[0] if orders == 1 else torch.stack(permutations))


def assert_same(found, cache):
    assert torch.equal(found.k, cache.k) and torch.equal(found.v, cache.v)


def ids_of(num_tokens, seed=0):
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, 50_000, num_tokens))


LINK = LinkConfig(bandwidth_gb_per_s=None, latency_s=0.0, queue_depth=2, window_s=0.01, max_op_bytes=1 << 20,
                  direct="auto", verify=True, warn_below=0.97)


def make_config(root, disk_gb=1.0):
    return StoreConfig(tier="disk", root=str(root), ram_gb=1.0, disk_gb=disk_gb, rows_per_block=4, head_groups=1, gap=0,
                       speculate=False, buffer_gb=0.1, match=None, presets={}, link=LINK)


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path / "store")


@pytest.fixture
def store(config):
    opened = config.open(model_key="model", anchor_key="kvzip", geometry=GEOMETRY)
    yield opened
    opened.close()


@pytest.fixture
def chunk_path(config):
    """The one file of a store that holds one chunk."""

    def find():
        (path,) = config.root_path.glob("*/*/*/*.safetensors")
        return path

    return find
