"""CPU place_kv and rotate: complex rotation is the truth; places nothing but the named slots."""

from __future__ import annotations

import pytest
import torch

from kernels.place_kv import cpu, place_kv, ref, rotate
from tests.kernels.guarded import guarded


def angles(num_rows, head_dim=64, start=0):
    """cos, sin [num_rows, D/2] at positions start, start + 3, start + 6, ..."""
    positions = start + 3 * torch.arange(num_rows)
    angle = positions[:, None] * 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return angle.cos(), angle.sin()


def truth(x, cos, sin):
    """The rotation as a product of complex numbers, in float64."""
    first, second = x.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def rows_of(num_rows, num_kv_heads=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_rows, num_kv_heads, 64, generator=generator)


@pytest.mark.parametrize("implementation", [cpu, ref])
@pytest.mark.parametrize("num_rows", [0, 1, 63, 129])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_rotate(implementation, num_rows, heads):
    x = rows_of(num_rows, heads)[0]
    cos, sin = angles(num_rows)
    before = x.clone()
    torch.testing.assert_close(implementation.rotate(x, cos, sin).double(), truth(x, cos, sin), atol=1e-6, rtol=1e-5)
    assert torch.equal(x, before)


def test_two_rotations_add_up():
    x = rows_of(63)[0]
    twice = rotate(rotate(x, *angles(63)), *angles(63, start=100))
    positions = 100 + 6 * torch.arange(63)
    angle = positions[:, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(twice, rotate(x, angle.cos(), angle.sin()), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotate_in_half_precision_rounds_no_worse_than_twice_plain_torch(dtype):
    x = rows_of(129)[0].to(dtype)
    cos, sin = angles(129)
    exact = truth(x, cos.to(dtype), sin.to(dtype))
    plain = (ref.rotate(x, cos, sin).double() - exact).abs().max()
    actual = rotate(x, cos, sin)
    assert actual.dtype is dtype
    assert (actual.double() - exact).abs().max() <= 2 * plain + torch.finfo(dtype).eps


SLOTS = {
    "run": lambda m: torch.arange(5, 5 + m),
    "scattered": lambda m: torch.randperm(200, generator=torch.Generator().manual_seed(1))[:m],
    "backwards": lambda m: torch.arange(5 + m, 5, -1),
}


@pytest.mark.parametrize("implementation", [cpu, ref])
@pytest.mark.parametrize("slots_are", sorted(SLOTS))
@pytest.mark.parametrize("out_of_rank_order", [False, True])
@pytest.mark.parametrize("num_rows", [1, 63, 129])
def test_only_the_slots_are_written(implementation, slots_are, out_of_rank_order, num_rows):
    k, v = rows_of(num_rows)
    num_placed = (num_rows + 1) // 2 if out_of_rank_order else num_rows
    shuffled = torch.randperm(num_rows, generator=torch.Generator().manual_seed(2))
    rows = shuffled[:num_placed] if out_of_rank_order else None
    slots = SLOTS[slots_are](num_placed)
    cos, sin = angles(num_placed)
    outs = [guarded(200, 3, 64) for _ in range(2)]
    sources = [guarded(*x.shape, fill=x).view for x in (k, v)]
    implementation.place_kv(*sources, cos, sin, slots, *(out.view for out in outs), rows)
    source = slice(None) if rows is None else rows
    torch.testing.assert_close(outs[0].view[slots].double(), truth(k[source], cos, sin), atol=1e-6, rtol=1e-5)
    assert torch.equal(outs[1].view[slots], v[source])
    for out in outs:
        untouched = torch.ones(200, dtype=torch.bool).index_fill_(0, slots, False)
        assert out.view[untouched].isnan().all()
        out.assert_margin_untouched()


def test_keys_alone():
    k, _ = rows_of(9)
    cos, sin = angles(9)
    out = torch.full((12, 3, 64), float("nan"))
    place_kv(k, None, cos, sin, torch.arange(2, 11), out, None)
    torch.testing.assert_close(out[2:11].double(), truth(k, cos, sin), atol=1e-6, rtol=1e-5)
    assert out[:2].isnan().all() and out[11:].isnan().all()


def test_nothing_to_place():
    k, v = rows_of(0)
    outs = torch.full((2, 4, 3, 64), float("nan"))
    place_kv(k, v, *angles(0), torch.empty(0, dtype=torch.int64), *outs)
    assert outs.isnan().all()
