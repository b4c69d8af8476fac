"""Triton `recompute_attention`: flash attention for scattered rows, over contiguous, ragged or paged keys.

One program serves a tile of (row, query head) pairs of one kv head, so K and V are read once for the whole group (GQA
packing); pair m of a request is row m // GROUP, head m % GROUP, which wastes nothing where GROUP is not a power of two.
Rows stand in order of position: a tile walks the keys that all of its rows see without a mask, then the few blocks up
to its own last visible key with one, and never touches what lies beyond. Online softmax as in FlashAttention-2
(arXiv 2307.08691); where tiles are too few to fill the device the keys are split and merged by log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def _find_request(cu_rows_ptr, num_requests, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The request of a tile: request b starts at tile cu_rows[b] * GROUP // BLOCK_M + b, so no table is needed."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(cu_rows_ptr + middle).to(tl.int32) * GROUP // BLOCK_M + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _scan_keys(
    q, acc, row_max, row_sum, k_ptr, v_ptr, table_ptr, begin, end, first, last, tile_first, tile_last, scale_log2,
    stride_kb, stride_ks, stride_vb, stride_vs,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):
    """Online softmax of one tile over keys [begin, end); MASKED blocks may hold keys that some rows do not see."""
    dims = tl.arange(0, BLOCK_D)
    in_head = (dims < HEAD_DIM)[None, :]
    block = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        keys = start + block
        # A fused cache may hold anything where no row of the tile looks, and 0 * NaN is NaN: do not load it.
        in_tile = (keys <= tile_last) & (keys >= tile_first)
        if PAGE_SIZE > 0:
            if MASKED:
                page = tl.load(table_ptr + keys // PAGE_SIZE, mask=in_tile, other=0).to(tl.int64)
            else:
                page = tl.load(table_ptr + keys // PAGE_SIZE).to(tl.int64)
            slot = (keys % PAGE_SIZE).to(tl.int64)
            k_ptrs = k_ptr + (page * stride_kb + slot * stride_ks)[:, None] + dims[None, :]
            v_ptrs = v_ptr + (page * stride_vb + slot * stride_vs)[:, None] + dims[None, :]
        else:
            # The block's start is scalar, so only one addition per pointer is left in the loop.
            offset = tl.cast(start, tl.int64)
            k_ptrs = k_ptr + offset * stride_ks + (block.to(tl.int64) * stride_ks)[:, None] + dims[None, :]
            v_ptrs = v_ptr + offset * stride_vs + (block.to(tl.int64) * stride_vs)[:, None] + dims[None, :]
        if MASKED:
            k = tl.load(k_ptrs, mask=in_tile[:, None] & in_head, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            k = tl.load(k_ptrs, mask=in_head, other=0.0)
        else:
            k = tl.load(k_ptrs)

        logits = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if MASKED:
            visible = keys[None, :] <= last[:, None]
            if WINDOWED:
                visible = visible & (keys[None, :] >= first[:, None])
            logits = tl.where(visible, logits, float("-inf"))
        # The scale goes in here and in the exponent, where it fuses with the subtraction, not over the whole tile.
        new_max = tl.maximum(row_max, tl.max(logits, 1) * scale_log2)
        shift = new_max
        if MASKED:
            # A row that has seen nothing yet: -inf - -inf would be NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(logits * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max

        if MASKED:
            v = tl.load(v_ptrs, mask=in_tile[:, None] & in_head, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            v = tl.load(v_ptrs, mask=in_head, other=0.0)
        else:
            v = tl.load(v_ptrs)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision="tf32x3")
    return acc, row_max, row_sum


# Lengths are not specialised: every request has its own, and a recompilation costs seconds.
@triton.jit(do_not_specialize=["num_rows", "num_keys", "num_requests", "num_tiles", "window", "split_keys"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, last_key_ptr, cu_rows_ptr, cu_keys_ptr, table_ptr,
    num_rows, num_keys, num_requests, num_tiles, window, split_keys, scale_log2,
    stride_qr, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_os, stride_or, stride_oh, stride_table,
    HEADS_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RAGGED: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr,
):
    """Grid (num_tiles * HEADS_KV, num_splits). With SPLIT out is [splits, R, Hq, D] float32 and lse [splits, R, Hq]."""
    # Longest tiles first, so that the short ones fill the tail of the launch.
    tile = num_tiles - 1 - tl.program_id(0) // HEADS_KV
    kv_head = tl.program_id(0) % HEADS_KV
    split = tl.program_id(1)
    row_start = 0
    rows_here = num_rows
    keys_here = num_keys
    if RAGGED:
        request = _find_request(cu_rows_ptr, num_requests, tile, GROUP, BLOCK_M)
        row_start = tl.load(cu_rows_ptr + request).to(tl.int32)
        rows_here = tl.load(cu_rows_ptr + request + 1).to(tl.int32) - row_start
        tile -= row_start * GROUP // BLOCK_M + request
        if PAGE_SIZE > 0:
            table_ptr += request.to(tl.int64) * stride_table
        else:
            key_start = tl.load(cu_keys_ptr + request).to(tl.int64)
            keys_here = (tl.load(cu_keys_ptr + request + 1) - key_start).to(tl.int32)
            k_ptr += key_start * stride_ks
            v_ptr += key_start * stride_vs

    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = pairs < rows_here * GROUP
    rows = (row_start + pairs // GROUP).to(tl.int64)
    heads = (kv_head * GROUP + pairs % GROUP).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]

    last = tl.minimum(tl.load(last_key_ptr + rows, mask=valid, other=0).to(tl.int32), keys_here - 1)
    tile_last = tl.max(tl.where(valid, last, -1), 0)
    tile_shortest = tl.min(tl.where(valid, last, tile_last), 0)
    first = last - window + 1
    tile_first = tile_last * 0
    begin = tile_last * 0
    unmasked_end = (tile_shortest + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        tile_first = tl.maximum(tile_shortest - window + 1, 0)
        begin = tile_first // BLOCK_N * BLOCK_N
        unmasked_end = begin
    end = tile_last + 1
    if SPLIT:
        begin = tl.maximum(begin, split * split_keys)
        end = tl.minimum(end, (split + 1) * split_keys)
    unmasked_end = tl.maximum(tl.minimum(unmasked_end, end), begin)

    q_ptrs = q_ptr + (rows * stride_qr + heads * stride_qh)[:, None] + dims[None, :]
    q = tl.load(q_ptrs, mask=inside, other=0.0)
    k_ptr += tl.cast(kv_head, tl.int64) * stride_kh
    v_ptr += tl.cast(kv_head, tl.int64) * stride_vh
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if not WINDOWED:
        acc, row_max, row_sum = _scan_keys(
            q, acc, row_max, row_sum, k_ptr, v_ptr, table_ptr, begin, unmasked_end, first, last, tile_first, tile_last,
            scale_log2, stride_kb, stride_ks, stride_vb, stride_vs, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, False, False,
        )
    acc, row_max, row_sum = _scan_keys(
        q, acc, row_max, row_sum, k_ptr, v_ptr, table_ptr, unmasked_end, end, first, last, tile_first, tile_last,
        scale_log2, stride_kb, stride_ks, stride_vb, stride_vs, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, True, WINDOWED,
    )

    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    out_offsets = rows * stride_or + heads * stride_oh
    if SPLIT:
        out_offsets += tl.cast(split, tl.int64) * stride_os
        lse_offsets = (tl.cast(split, tl.int64) * num_rows + rows) * (HEADS_KV * GROUP) + heads
        tl.store(lse_ptr + lse_offsets, row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0)), mask=valid)
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "num_splits"])
def merge_kernel(
    partial_ptr, lse_ptr, out_ptr, num_pairs, num_splits, stride_or, stride_oh,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """out = the splits' outputs weighted by exp2(lse - max lse); a split that a row does not see has lse -inf."""
    pairs = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = pairs < num_pairs
    dims = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for split in range(num_splits):
        offsets = tl.cast(split, tl.int64) * num_pairs + pairs
        top = tl.maximum(top, tl.load(lse_ptr + offsets, mask=valid, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for split in range(num_splits):
        offsets = tl.cast(split, tl.int64) * num_pairs + pairs
        weight = tl.exp2(tl.load(lse_ptr + offsets, mask=valid, other=float("-inf")) - top)
        part = tl.load(partial_ptr + offsets[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        total += weight
        acc += part * weight[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_offsets = pairs // HEADS * stride_or + pairs % HEADS * stride_oh
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tile sizes and launch options: block_m pairs by block_n keys, block_d >= D a power of two."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def tiling(num_pairs: int, head_dim: int, element_bytes: int, capability: int) -> Tiling:
    """Tiles that keep q, K and V within the shared memory of the device and everything else in registers.

    float32 products are three tf32 ones (tf32x3), which keep float32's accuracy on the matrix unit.
    Few values of block_m exist, so that a first request of a new length rarely compiles anything.
    capability: 90 for sm_90. Data-center parts from there on have 227 KiB of shared memory and feed the matrix unit
    from it; elsewhere (163 KiB on sm_80, 99 on sm_86 and sm_120) operands sit in registers, hence narrower blocks.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    roomy = 90 <= capability < 120
    wide = element_bytes > 2 or block_d > 128
    narrow = wide or (not roomy and block_d > 64)
    # Three tf32 products hold three sets of operands, hence the small tiles of float32.
    largest = 32 if element_bytes > 2 else (64 if wide else 128)
    block_m = 16 if num_pairs <= 16 else min(64 if num_pairs <= 64 else 128, largest)
    return Tiling(
        block_m=block_m, block_n=32 if narrow else 64, block_d=block_d,
        num_warps=8 if block_m == largest and element_bytes <= 2 else 4,
        num_stages=1 if element_bytes * block_d > 512 else (2 if narrow else 3),
    )


MIN_SPLIT_KEYS = 512


def choose_splits(num_programs: int, num_keys: int, num_processors: int) -> int:
    """How often to split the keys: once unless the tiles leave processors idle, then two waves, 512 keys at least."""
    if num_programs >= num_processors:
        return 1
    return max(1, min(2 * num_processors // num_programs, num_keys // MIN_SPLIT_KEYS))


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """(processors, capability, 90 for sm_90); CPU tensors reach this only in the interpreter."""
    if device.type != "cuda":
        return 1, 90
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major * 10 + properties.minor


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last_key: torch.Tensor, scale: float | None,
    window: int | None, out: torch.Tensor | None, num_splits: int | None, max_keys: int, page_size: int = 0,
    cu_rows: torch.Tensor | None = None, cu_keys: torch.Tensor | None = None, table: torch.Tensor | None = None,
) -> torch.Tensor:
    """k, v: [S, Hkv, D], or [blocks, page_size, Hkv, D] where page_size > 0; max_keys bounds a request's keys."""
    num_rows, num_heads, head_dim = q.shape
    heads_kv = k.shape[-2]
    out = torch.empty_like(q) if out is None else out
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1, "the head dim must be contiguous"
    assert num_heads % heads_kv == 0, f"{num_heads} query heads do not divide over {heads_kv} kv heads"
    if num_rows == 0:
        return out
    group = num_heads // heads_kv
    num_requests = 1 if cu_rows is None else cu_rows.shape[0] - 1
    processors, capability = device_limits(q.device)
    tiles = tiling(num_rows * group, head_dim, q.element_size(), capability)
    num_tiles = (
        triton.cdiv(num_rows * group, tiles.block_m) if cu_rows is None
        else num_rows * group // tiles.block_m + num_requests
    )
    if num_splits is None:
        num_splits = choose_splits(num_tiles * heads_kv, max_keys, processors)
    # Aligned to the key block, so that a split never starts inside one.
    split_keys = triton.cdiv(triton.cdiv(max_keys, num_splits), tiles.block_n) * tiles.block_n
    split = num_splits > 1
    partial, lse = out, None
    if split:
        partial = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_splits, num_rows, num_heads, dtype=torch.float32, device=q.device)
    scale = head_dim**-0.5 if scale is None else scale
    with torch.cuda.device_of(q):
        attend_kernel[(num_tiles * heads_kv, num_splits)](
            q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=partial, lse_ptr=lse, last_key_ptr=last_key.contiguous(),
            cu_rows_ptr=cu_rows, cu_keys_ptr=cu_keys, table_ptr=table,
            num_rows=num_rows, num_keys=max_keys, num_requests=num_requests, num_tiles=num_tiles, window=window or 0,
            split_keys=split_keys, scale_log2=scale * math.log2(math.e),
            stride_qr=q.stride(0), stride_qh=q.stride(1),
            stride_kb=k.stride(0), stride_ks=k.stride(-3), stride_kh=k.stride(-2),
            stride_vb=v.stride(0), stride_vs=v.stride(-3), stride_vh=v.stride(-2),
            stride_os=partial.stride(0), stride_or=partial.stride(-3), stride_oh=partial.stride(-2),
            stride_table=0 if table is None else table.stride(0),
            HEADS_KV=heads_kv, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=tiles.block_d, BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n, PAGE_SIZE=page_size, RAGGED=cu_rows is not None, WINDOWED=window is not None,
            SPLIT=split, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )
        if split:
            merge_kernel[(triton.cdiv(num_rows * num_heads, 16),)](
                partial_ptr=partial, lse_ptr=lse, out_ptr=out, num_pairs=num_rows * num_heads, num_splits=num_splits,
                stride_or=out.stride(0), stride_oh=out.stride(1),
                HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_D=tiles.block_d, BLOCK_M=16, num_warps=4,
            )
    return out


def recompute_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last_key: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Shapes as in the public op. num_splits: parts the keys are cut into; chosen from the device's size where None."""
    return _launch(q, k, v, last_key, scale, window, out, num_splits, max_keys=k.shape[0])


def recompute_attention_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last_key: torch.Tensor,
    cu_rows: torch.Tensor,
    cu_keys: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Shapes as in the public op; cu_rows and cu_keys stay on the device, nothing waits for them."""
    return _launch(
        q, k, v, last_key, scale, window, out, num_splits, max_keys=k.shape[0],
        cu_rows=cu_rows.contiguous(), cu_keys=cu_keys.contiguous(),
    )


def recompute_attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    last_key: torch.Tensor,
    cu_rows: torch.Tensor,
    block_table: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Shapes as in the public op; only pages up to the last visible key are read."""
    page_size = k_cache.shape[1]
    assert block_table.stride(-1) == 1, "a request's block table must be contiguous"
    return _launch(
        q, k_cache, v_cache, last_key, scale, window, out, num_splits, max_keys=block_table.shape[1] * page_size,
        page_size=page_size, cu_rows=cu_rows.contiguous(), table=block_table,
    )
