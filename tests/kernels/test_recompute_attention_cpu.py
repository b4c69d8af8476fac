"""CPU recompute_attention: exact mask, against SDPA with a boolean mask in float64."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.recompute_attention import (
    cpu,
    recompute_attention,
    recompute_attention_paged,
    recompute_attention_ragged,
    ref,
)
from tests.kernels.guarded import guarded


def truth(q, k, v, last_key, window=None, scale=None):
    """[R, Hq, D] in float64, or in q.dtype where q is not float64."""
    distance = last_key[:, None] - torch.arange(k.shape[0])
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def case(num_rows, num_keys, heads=(9, 3), head_dim=64, dtype=torch.float32, seed=0):
    """Random q, k, v and sorted positions with duplicates."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_rows, heads[0], head_dim, generator=generator).to(dtype)
    k, v = torch.randn(2, num_keys, heads[1], head_dim, generator=generator).to(dtype)
    last_key = torch.randint(num_keys, (num_rows,), generator=generator).sort().values
    return q, k, v, last_key


def assert_exact(actual, q, k, v, last_key, **options):
    expected = truth(q.double(), k.double(), v.double(), last_key, **options)
    torch.testing.assert_close(actual.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("implementation", [cpu, ref])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (4, 1)])
@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 1), (1, 129), (63, 63), (129, 700), (600, 1200), (193, 129)])
def test_scattered_rows(implementation, heads, num_rows, num_keys):
    q, k, v, last_key = case(num_rows, num_keys, heads)
    assert_exact(implementation.recompute_attention(q, k, v, last_key), q, k, v, last_key)


@pytest.mark.parametrize("num_rows", [1, 63, 129, 700])
@pytest.mark.parametrize("offset", [0, 5])
def test_every_row_in_order(num_rows, offset):
    q, k, v, _ = case(num_rows, num_rows + offset + 9)
    last_key = torch.arange(num_rows) + offset
    assert_exact(cpu.recompute_attention(q, k, v, last_key), q, k, v, last_key)


def test_rows_that_only_look_causal():
    q, k, v, _ = case(64, 64)
    last_key = torch.arange(64)
    last_key[30] = 31
    assert_exact(cpu.recompute_attention(q, k, v, last_key), q, k, v, last_key)


@pytest.mark.parametrize("implementation", [cpu, ref])
@pytest.mark.parametrize("window", [1, 63, 129, 5000])
@pytest.mark.parametrize("num_rows", [63, 600])
def test_window(implementation, window, num_rows):
    q, k, v, last_key = case(num_rows, 1500)
    assert_exact(implementation.recompute_attention(q, k, v, last_key, window=window), q, k, v, last_key, window=window)


def test_window_on_rows_in_order():
    q, k, v, _ = case(200, 200)
    last_key = torch.arange(200)
    assert_exact(cpu.recompute_attention(q, k, v, last_key, window=7), q, k, v, last_key, window=7)


def test_scale_and_odd_head_dim():
    q, k, v, last_key = case(129, 300, head_dim=80)
    assert_exact(cpu.recompute_attention(q, k, v, last_key, scale=0.05), q, k, v, last_key, scale=0.05)


def test_no_rows():
    q, k, v, last_key = case(0, 20)
    assert recompute_attention(q, k, v, last_key).shape == (0, 9, 64)
    out = torch.empty_like(q)
    assert recompute_attention(q, k, v, last_key, out=out) is out


@pytest.mark.parametrize("rows_in_order", [False, True])
def test_permuted_strides_and_nan_margins(rows_in_order):
    q, k, v, last_key = case(129, 300)
    last_key = torch.arange(129) if rows_in_order else last_key
    held = [guarded(*x.shape, fill=x) for x in (q, k, v)]
    out = guarded(*q.shape)
    result = recompute_attention(*(x.view for x in held), last_key, out=out.view)
    assert result is out.view
    assert_exact(result, q, k, v, last_key)
    out.assert_margin_untouched()


def test_keys_past_the_last_visible_one_are_not_read():
    q, k, v, last_key = case(63, 200)
    expected = cpu.recompute_attention(q, k, v, last_key)
    k[int(last_key[-1]) + 1 :] = v[int(last_key[-1]) + 1 :] = float("nan")
    assert int(last_key[-1]) < 199
    assert torch.equal(cpu.recompute_attention(q, k, v, last_key), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_rows", [63, 600])
def test_half_precision_is_no_worse_than_twice_plain_torch(dtype, window, num_rows):
    q, k, v, last_key = case(num_rows, 1200, dtype=dtype)
    exact = truth(q.double(), k.double(), v.double(), last_key, window)
    plain = (truth(q, k, v, last_key, window).double() - exact).abs().max()
    ours = (cpu.recompute_attention(q, k, v, last_key, window=window).double() - exact).abs().max()
    assert ours <= 2 * plain + torch.finfo(dtype).eps


@pytest.mark.parametrize("implementation", [cpu, ref])
@pytest.mark.parametrize("window", [None, 17])
def test_ragged_equals_one_by_one(implementation, window):
    sizes = [(63, 129), (0, 5), (1, 1), (129, 300)]
    cases = [case(*size, seed=i) for i, size in enumerate(sizes)]
    q, k, v, last_key = (torch.cat(parts) for parts in zip(*cases, strict=True))
    cu_rows, cu_keys = (torch.tensor([0, *sizes_of]).cumsum(0) for sizes_of in zip(*sizes, strict=True))
    actual = implementation.recompute_attention_ragged(q, k, v, last_key, cu_rows, cu_keys, window=window)
    expected = [truth(*one, window) for one in cases if len(one[0])]
    torch.testing.assert_close(actual, torch.cat(expected), atol=2e-6, rtol=1e-5)


def test_paged_equals_contiguous():
    q, k, v, _ = case(70, 100)
    last_key = torch.cat((torch.arange(0, 100, 2), torch.arange(17, 37)))
    pages = torch.tensor([[6, 2, 9, 0, 11, 3, 7], [4, 8, 1, -1, -1, -1, -1]])
    k_cache, v_cache = torch.full((2, 12, 16, 3, 64), float("nan"))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        for table, num_keys in ((pages[0], 100), (pages[1], 37)):
            # key p of a request lies at [table[p // 16], p % 16]
            idx = torch.arange(num_keys)
            cache[table[idx // 16], idx % 16] = rows[:num_keys]
        cache.nan_to_num_(0.0)
    cu_rows = torch.tensor([0, 50, 70])
    actual = recompute_attention_paged(q, k_cache, v_cache, last_key, cu_rows, pages, window=30)
    for rows in (slice(0, 50), slice(50, 70)):
        assert_exact(actual[rows], q[rows], k, v, last_key[rows], window=30)


def test_calls_are_counted_and_a_wrong_tier_is_named(monkeypatch):
    q, k, v, last_key = case(3, 5)
    kernels.calls.clear()
    recompute_attention(q, k, v, last_key)
    recompute_attention_ragged(q, k, v, last_key, torch.tensor([0, 3]), torch.tensor([0, 5]))
    assert kernels.calls == {"recompute_attention": 1, "recompute_attention.ragged": 1}
    monkeypatch.setenv("QCFUSE_KERNELS", "fast")
    with pytest.raises(ValueError, match="'fast'.*ref"):
        recompute_attention(q, k, v, last_key)


def test_the_reference_can_be_forced(monkeypatch):
    q, k, v, last_key = case(3, 5)
    monkeypatch.setenv("QCFUSE_KERNELS", "ref")
    assert torch.equal(recompute_attention(q, k, v, last_key), ref.recompute_attention(q, k, v, last_key))
