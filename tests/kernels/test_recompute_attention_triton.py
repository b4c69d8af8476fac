"""Interpreter tier of `recompute_attention`: the Triton kernel on CPU against plain torch, fp32 and fp16."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.guarded import guarded
from tests.kernels.interpreter import interpreted

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6}, torch.float16: {"rtol": 1e-3, "atol": 1e-3},
}  # fmt: skip
NAN = float("nan")


def inputs(rows, keys, heads, heads_kv, dim, dtype=torch.float32, seed=0) -> tuple[torch.Tensor, ...]:
    """q, k, v and last_key: random rows in order of position, some of them at the same one."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, dim, generator=generator).to(dtype)
    k, v = (torch.randn(keys, heads_kv, dim, generator=generator).to(dtype) for _ in range(2))
    last_key = torch.randint(0, keys, (rows,), generator=generator).sort().values
    return q, k, v, last_key


def exact(q, k, v, last_key, **options):
    from kernels.recompute_attention import ref

    return ref.recompute_attention(q.float(), k.float(), v.float(), last_key, **options)


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), **TOLERANCE[actual.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "heads_kv", "dim"),
    [(1, 1, 1, 1, 64), (1, 129, 4, 1, 64), (63, 129, 3, 1, 128), (129, 200, 2, 2, 64), (50, 63, 8, 2, 80),
     (5, 129, 3, 1, 96), (129, 129, 3, 3, 16)],
)  # fmt: skip
@interpreted
def test_scattered_rows(rows, keys, heads, heads_kv, dim, dtype):
    from kernels.recompute_attention import kernel

    q, k, v, last_key = inputs(rows, keys, heads, heads_kv, dim, dtype)
    assert_exact(kernel.recompute_attention(q, k, v, last_key), exact(q, k, v, last_key))


@pytest.mark.parametrize("rows", [0, 1, 129])
@pytest.mark.parametrize("num_splits", [1, 3])
@interpreted
def test_permuted_strides_inside_nan_margins(rows, num_splits):
    from kernels.recompute_attention import kernel

    q, k, v, last_key = inputs(rows, 150, 4, 2, 24)
    guarded_q, guarded_k, guarded_v = (guarded(*x.shape, fill=x) for x in (q, k, v))
    out = guarded(*q.shape)
    returned = kernel.recompute_attention(
        guarded_q.view, guarded_k.view, guarded_v.view, last_key, out=out.view, num_splits=num_splits
    )
    assert returned is out.view
    assert_exact(out.view, exact(q, k, v, last_key))
    out.assert_margin_untouched()


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@interpreted
def test_full_selection_is_causal_attention(num_splits):
    from kernels.recompute_attention import kernel

    q, k, v, _ = inputs(129, 129, 2, 1, 64)
    actual = kernel.recompute_attention(q, k, v, torch.arange(129), num_splits=num_splits)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k.expand(-1, 2, -1), v.expand(-1, 2, -1))), is_causal=True
    )
    assert_exact(actual, expected.transpose(0, 1))


@pytest.mark.parametrize("window", [1, 17, 70, 1000])
@pytest.mark.parametrize("num_splits", [1, 3])
@interpreted
def test_window(window, num_splits):
    from kernels.recompute_attention import kernel

    q, k, v, last_key = inputs(63, 200, 3, 1, 32)
    actual = kernel.recompute_attention(q, k, v, last_key, window=window, num_splits=num_splits)
    assert_exact(actual, exact(q, k, v, last_key, window=window))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_splits", [1, 3])
@interpreted
def test_keys_that_no_row_sees_may_hold_nan(window, num_splits):
    from kernels.recompute_attention import kernel

    q, k, v, _ = inputs(20, 260, 2, 1, 32)
    last_key = torch.arange(100, 120)
    expected = exact(q, k, v, last_key, window=window)
    for x in (k, v):
        x[120:] = NAN
        x[: 0 if window is None else 61] = NAN
    assert_exact(kernel.recompute_attention(q, k, v, last_key, window=window, num_splits=num_splits), expected)


@interpreted
def test_rows_at_one_position_and_a_given_scale():
    from kernels.recompute_attention import kernel

    q, k, v, _ = inputs(20, 140, 2, 1, 32)
    last_key = torch.tensor([0] * 10 + [130] * 10)
    q[1:10], q[11:] = q[0], q[10]
    actual = kernel.recompute_attention(q, k, v, last_key, scale=0.7)
    assert_exact(actual, exact(q, k, v, last_key, scale=0.7))
    assert torch.equal(actual[0], v[0].expand(2, -1)), "a row that sees one key takes its value"
    assert_exact(actual[10:], actual[10].expand(10, -1, -1))


@interpreted
def test_large_logits_stay_finite():
    from kernels.recompute_attention import kernel

    q, k, v, last_key = inputs(10, 129, 2, 1, 32)
    # At logits near 1,000 the last bit of float32 is worth 6e-5 in the exponent.
    actual = kernel.recompute_attention(q * 300, k, v, last_key, num_splits=2)
    torch.testing.assert_close(actual, exact(q * 300, k, v, last_key), rtol=1e-3, atol=1e-3)


ROWS, KEYS = [40, 0, 1, 63], [129, 5, 1, 64]


def ragged(dtype: torch.dtype = torch.float32):
    """A batch of four requests, one of them without rows: q, k, v, last_key, cu_rows, cu_keys."""
    parts = [inputs(r, n, 6, 2, 32, dtype, seed) for seed, (r, n) in enumerate(zip(ROWS, KEYS, strict=True))]
    q, k, v, last_key = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return q, k, v, last_key, *(torch.tensor([0, *torch.tensor(x).cumsum(0)]) for x in (ROWS, KEYS))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_splits", [1, 3])
@interpreted
def test_ragged_batch(num_splits, window):
    from kernels.recompute_attention import kernel, ref

    q, k, v, last_key, cu_rows, cu_keys = ragged()
    out = guarded(*q.shape)
    kernel.recompute_attention_ragged(
        q, k, v, last_key, cu_rows.int(), cu_keys, window=window, out=out.view, num_splits=num_splits
    )
    assert_exact(out.view, ref.recompute_attention_ragged(q, k, v, last_key, cu_rows, cu_keys, window=window))
    out.assert_margin_untouched()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("page", "window", "num_splits"), [(16, None, 1), (16, None, 3), (8, 20, 1), (128, None, 2)])
@interpreted
def test_paged_keys_in_shuffled_blocks(page, window, num_splits, dtype):
    """Pages lie in any order among pages of NaN; a table's entries past the last key point nowhere."""
    from kernels.recompute_attention import kernel, ref

    q, k, v, last_key, cu_rows, cu_keys = ragged(dtype)
    num_pages = [-(-n // page) for n in KEYS]
    order = torch.randperm(sum(num_pages) + 9, generator=torch.Generator().manual_seed(1))
    table = torch.full((len(KEYS), max(num_pages) + 2), 2**30, dtype=torch.int32)
    cache = torch.full((2, len(order), page, *k.shape[1:]), NAN, dtype=dtype)
    for request, (n, used) in enumerate(zip(KEYS, num_pages, strict=True)):
        pages, order = order[:used], order[used:]
        table[request, :used] = pages.int()
        for half, x in zip(cache, (k, v), strict=True):
            start = int(cu_keys[request])
            half[pages[torch.arange(n) // page], torch.arange(n) % page] = x[start : start + n]
    actual = kernel.recompute_attention_paged(
        q, cache[0], cache[1], last_key, cu_rows.int(), table, window=window, num_splits=num_splits
    )
    expected = ref.recompute_attention_ragged(
        q.float(), k.float(), v.float(), last_key, cu_rows, cu_keys, window=window
    )
    assert_exact(actual, expected)


@interpreted
def test_splits_only_where_the_device_would_idle():
    from kernels.recompute_attention.kernel import choose_splits

    assert choose_splits(num_programs=132, num_keys=10240, num_processors=132) == 1
    assert choose_splits(num_programs=32, num_keys=10240, num_processors=132) == 8
    assert choose_splits(num_programs=1, num_keys=1200, num_processors=132) == 2, "at least 512 keys a split"
    assert choose_splits(num_programs=1, num_keys=1, num_processors=132) == 1
