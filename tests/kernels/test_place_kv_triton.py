"""Interpreter tier of `place_kv` and `rotate`: the Triton kernel on CPU against plain torch, fp32 and fp16."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.guarded import guarded
from tests.kernels.interpreter import interpreted

TOLERANCE = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-6}, torch.float16: {"rtol": 1e-3, "atol": 1e-3},
}  # fmt: skip
NAN = float("nan")


def inputs(num_source: int, num_placed: int, heads: int, dim: int, dtype: torch.dtype = torch.float32):
    """k, v, cos, sin (float32), and rows out of order, with repetitions where more are placed than there are."""
    generator = torch.Generator().manual_seed(num_source + num_placed)
    k, v = (torch.randn(num_source, heads, dim, generator=generator).to(dtype) for _ in range(2))
    angles = torch.rand(num_placed, dim // 2, generator=generator) * 100
    order = torch.randperm(max(num_source, num_placed), generator=generator)[:num_placed]
    return k, v, angles.cos(), angles.sin(), order % max(num_source, 1)


def expected_keys(k, cos, sin, rows):
    from kernels.place_kv import ref

    return ref.rotate(k.float()[rows], cos, sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_source", "num_placed", "heads", "dim"),
    [(1, 1, 1, 64), (63, 63, 3, 64), (129, 40, 8, 128), (63, 129, 2, 80), (20, 0, 2, 64), (129, 129, 1, 16)],
)  # fmt: skip
@interpreted
def test_rows_out_of_order_to_scattered_slots(num_source, num_placed, heads, dim, dtype):
    from kernels.place_kv import kernel

    k, v, cos, sin, rows = inputs(num_source, num_placed, heads, dim, dtype)
    slots = torch.randperm(num_placed + 30, generator=torch.Generator().manual_seed(2))[:num_placed]
    k_out, v_out = (guarded(num_placed + 30, heads, dim, dtype=dtype) for _ in range(2))
    source_k, source_v = guarded(*k.shape, dtype=dtype, fill=k), guarded(*v.shape, dtype=dtype, fill=v)
    kernel.place_kv(source_k.view, source_v.view, cos, sin, slots, k_out.view, v_out.view, rows)
    torch.testing.assert_close(k_out.view[slots].float(), expected_keys(k, cos, sin, rows), **TOLERANCE[dtype])
    assert torch.equal(v_out.view[slots], v[rows])
    free = torch.ones(num_placed + 30, dtype=torch.bool)
    free[slots] = False
    for out in (k_out, v_out):
        assert out.view[free].isnan().all(), "rows of other slots stay as they are"
        out.assert_margin_untouched()


@interpreted
def test_recomputed_rows_overwrite_and_the_rest_stays():
    from kernels.place_kv import kernel

    k, v, cos, sin, _ = inputs(50, 50, 2, 32)
    everything = torch.arange(50)
    k_out, v_out = torch.full_like(k, NAN), torch.full_like(v, NAN)
    kernel.place_kv(k, v, cos, sin, everything, k_out, v_out)
    selected = torch.tensor([0, 7, 8, 49])
    fresh_k, fresh_v = torch.randn(4, 2, 32), torch.randn(4, 2, 32)
    kernel.place_kv(fresh_k, fresh_v, cos[selected], sin[selected], selected, k_out, v_out)
    kept = torch.ones(50, dtype=torch.bool)
    kept[selected] = False
    torch.testing.assert_close(k_out[kept], expected_keys(k, cos, sin, everything)[kept])
    torch.testing.assert_close(k_out[selected], expected_keys(fresh_k, cos[selected], sin[selected], slice(None)))
    assert torch.equal(v_out[kept], v[kept]) and torch.equal(v_out[selected], fresh_v)


@pytest.mark.parametrize("interleaved", [False, True])
@interpreted
def test_paged_slots(interleaved):
    """A paged cache seen as [num_slots, Hkv, D]; interleaved: K and V of a page side by side, as some engines do."""
    from kernels.place_kv import kernel

    k, v, cos, sin, rows = inputs(63, 63, 3, 64)
    page, blocks = 16, torch.tensor([5, 2, 7, 0])
    slots = blocks[torch.arange(63) // page] * page + torch.arange(63) % page
    if interleaved:
        cache = torch.full((9 * page, 2, 3, 64), NAN)
        k_out, v_out = cache[:, 0], cache[:, 1]
    else:
        k_out, v_out = torch.full((2, 9, page, 3, 64), NAN).flatten(1, 2)
    kernel.place_kv(k, v, cos, sin, slots, k_out, v_out, rows)
    torch.testing.assert_close(k_out[slots], expected_keys(k, cos, sin, rows))
    assert torch.equal(v_out[slots], v[rows])
    assert int(k_out.isnan().all(-1).all(-1).sum()) == int(v_out.isnan().all(-1).all(-1).sum()) == 9 * page - 63


@interpreted
def test_keys_only_with_tables_of_the_models_dtype():
    from kernels.place_kv import kernel

    k, _, cos, sin, rows = inputs(63, 63, 2, 32, torch.float16)
    cos, sin = cos.half(), sin.half()
    k_out = torch.full_like(k, NAN)
    kernel.place_kv(k, None, cos, sin, torch.arange(63), k_out, None, rows)
    expected = expected_keys(k, cos.float(), sin.float(), rows)
    torch.testing.assert_close(k_out.float(), expected, **TOLERANCE[torch.float16])


@pytest.mark.parametrize("rows", [0, 1, 129])
@interpreted
def test_rotate_returns_a_new_tensor(rows):
    from kernels.place_kv import kernel, ref

    x, _, cos, sin, _ = inputs(rows, rows, 3, 80)
    source = guarded(*x.shape, fill=x)
    actual = kernel.rotate(source.view, cos, sin)
    torch.testing.assert_close(actual, ref.rotate(x, cos, sin))
    assert torch.equal(source.view, x)


@interpreted
def test_rotate_by_a_then_b_is_a_plus_b():
    from kernels.place_kv import kernel

    x = inputs(63, 63, 2, 64)[0]
    a, b = torch.rand(63, 32), torch.rand(63, 32)
    twice = kernel.rotate(kernel.rotate(x, a.cos(), a.sin()), b.cos(), b.sin())
    torch.testing.assert_close(twice, kernel.rotate(x, (a + b).cos(), (a + b).sin()), rtol=1e-5, atol=1e-5)
