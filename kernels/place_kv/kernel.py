"""Triton `place_kv`: gather, rotate and scatter K and V in one launch, each byte read and written once.

A program moves a tile of (row, kv head) pairs: pair p is row p // HEADS, head p % HEADS, so that any number of heads
fills the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_PAIRS = 32


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    k_ptr, v_ptr, cos_ptr, sin_ptr, rows_ptr, slots_ptr, k_out_ptr, v_out_ptr, num_pairs,
    stride_kr, stride_kh, stride_vr, stride_vh, stride_cos, stride_sin,
    stride_kor, stride_koh, stride_vor, stride_voh,
    HEADS: tl.constexpr, HALF_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Grid (tiles of pairs). Without rows_ptr row i comes from row i, without slots_ptr it goes to row i."""
    pairs = tl.program_id(0).to(tl.int64) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    valid = pairs < num_pairs
    index = pairs // HEADS
    heads = pairs % HEADS
    source = index
    target = index
    if rows_ptr is not None:
        source = tl.load(rows_ptr + index, mask=valid, other=0).to(tl.int64)
    if slots_ptr is not None:
        target = tl.load(slots_ptr + index, mask=valid, other=0).to(tl.int64)

    half = tl.arange(0, BLOCK_HALF)
    inside = valid[:, None] & (half < HALF_DIM)[None, :]
    cos = tl.load(cos_ptr + (index * stride_cos)[:, None] + half[None, :], mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + (index * stride_sin)[:, None] + half[None, :], mask=inside, other=0.0).to(tl.float32)
    k_ptrs = k_ptr + (source * stride_kr + heads * stride_kh)[:, None] + half[None, :]
    x1 = tl.load(k_ptrs, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(k_ptrs + HALF_DIM, mask=inside, other=0.0).to(tl.float32)
    k_out_ptrs = k_out_ptr + (target * stride_kor + heads * stride_koh)[:, None] + half[None, :]
    # float32 inside, rounded once on the way out.
    tl.store(k_out_ptrs, (x1 * cos - x2 * sin).to(k_out_ptr.dtype.element_ty), mask=inside)
    tl.store(k_out_ptrs + HALF_DIM, (x2 * cos + x1 * sin).to(k_out_ptr.dtype.element_ty), mask=inside)

    if v_ptr is not None:
        dims = tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (dims < 2 * HALF_DIM)[None, :]
        v = tl.load(v_ptr + (source * stride_vr + heads * stride_vh)[:, None] + dims[None, :], mask=inside, other=0.0)
        v_out_ptrs = v_out_ptr + (target * stride_vor + heads * stride_voh)[:, None] + dims[None, :]
        tl.store(v_out_ptrs, v.to(v_out_ptr.dtype.element_ty), mask=inside)


def _launch(
    k: torch.Tensor, v: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None,
    slots: torch.Tensor | None, k_out: torch.Tensor, v_out: torch.Tensor | None,
) -> None:
    num_rows, (heads, dim) = cos.shape[0], k.shape[1:]
    tensors = [x for x in (k, v, cos, sin, k_out, v_out) if x is not None]
    assert all(x.stride(-1) == 1 for x in tensors), "the last dim must be contiguous"
    assert cos.shape == sin.shape == (num_rows, dim // 2), f"cos {tuple(cos.shape)} does not fit head dim {dim}"
    if num_rows == 0:
        return
    v_strides = (0, 0, 0, 0) if v is None else (v.stride(0), v.stride(1), v_out.stride(0), v_out.stride(1))
    with torch.cuda.device_of(k):
        place_kernel[(triton.cdiv(num_rows * heads, BLOCK_PAIRS),)](
            k_ptr=k, v_ptr=v, cos_ptr=cos, sin_ptr=sin, rows_ptr=None if rows is None else rows.contiguous(),
            slots_ptr=None if slots is None else slots.contiguous(), k_out_ptr=k_out, v_out_ptr=v_out,
            num_pairs=num_rows * heads, stride_kr=k.stride(0), stride_kh=k.stride(1), stride_vr=v_strides[0],
            stride_vh=v_strides[1], stride_cos=cos.stride(0), stride_sin=sin.stride(0), stride_kor=k_out.stride(0),
            stride_koh=k_out.stride(1), stride_vor=v_strides[2], stride_voh=v_strides[3],
            HEADS=heads, HALF_DIM=dim // 2, BLOCK_HALF=triton.next_power_of_2(dim // 2),
            BLOCK_D=triton.next_power_of_2(dim), BLOCK_PAIRS=BLOCK_PAIRS, num_warps=4,
        )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [R, H, D]; cos, sin: [R, D/2] of any float dtype. Returns a new [R, H, D], computed in float32."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, cos, sin, None, None, out, None)
    return out


def place_kv(
    k_rows: torch.Tensor,
    v_rows: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor | None,
    rows: torch.Tensor | None = None,
) -> None:
    """Shapes as in the public op; writes k_out and v_out in place. A paged cache is passed as [num_slots, Hkv, D]."""
    _launch(k_rows, v_rows, cos, sin, rows, slots, k_out, v_out)
