"""Triton `score`: two passes over the keys, and the attention matrix never leaves registers.

1. `lse_kernel`: the log-sum-exp of each (row, query head) over one span of keys; the spans are then combined.
2. `importance_kernel`: probabilities exp(logit - lse) of the context columns, reduced over the rows and query heads of
   one kv head within the program; the kv heads are reduced last, over [Lc, Hkv, N] float32.
The logits are computed twice, which costs less than writing and reading T * Hq * S probabilities. Rows and the query
heads of a kv head are packed in one tile: pair m is row m // GROUP, head m % GROUP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

SPLIT_KEYS = 512
"""Keys per span of the first pass: enough programs at one layer and a short question, few enough partial results."""


@triton.jit
def _layer_keys(k_ptr, k_table_ptr, layer, stride_kl):
    """Start of a layer's keys: an address out of the table where there is one, else a slice of the stacked tensor."""
    if k_table_ptr is not None:
        layer_ptr = tl.load(k_table_ptr + layer).to(tl.pointer_type(k_ptr.dtype.element_ty))
        # The launcher checks this; without it every element would be loaded alone.
        layer_ptr = tl.multiple_of(layer_ptr, 16)
    else:
        layer_ptr = k_ptr + tl.cast(layer, tl.int64) * stride_kl
    return layer_ptr


@triton.jit
def _load_q(q_ptr, pairs, num_pairs, stride_qt, stride_qh, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
            BLOCK_D: tl.constexpr):
    """Queries of packed pairs, [pairs, BLOCK_D]; q_ptr stands at the first query head of the kv head."""
    dims = tl.arange(0, BLOCK_D)
    offsets = (pairs // GROUP).to(tl.int64) * stride_qt + (pairs % GROUP).to(tl.int64) * stride_qh
    inside = (pairs < num_pairs)[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(q_ptr + offsets[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_pairs", "num_keys", "num_tiles", "num_splits"])
def lse_kernel(
    q_ptr, k_ptr, k_table_ptr, last_key_ptr, lse_ptr, num_pairs, num_keys, num_tiles, num_splits, scale_log2,
    stride_ql, stride_qt, stride_qh, stride_kl, stride_ks, stride_kh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """Grid (num_tiles * num_splits, Hkv, Lc). lse: [Lc, Hkv, num_splits, num_pairs], base 2, -inf where unseen."""
    tile = tl.program_id(0) % num_tiles
    split = tl.program_id(0) // num_tiles
    kv_head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = pairs < num_pairs
    last = tl.load(last_key_ptr + pairs // GROUP, mask=valid, other=-1).to(tl.int32)
    last = tl.minimum(last, num_keys - 1)
    begin = split * SPLIT_KEYS
    end = tl.minimum(begin + SPLIT_KEYS, tl.max(last, 0) + 1)

    q = _load_q(q_ptr + layer * stride_ql + kv_head * GROUP * stride_qh, pairs, num_pairs, stride_qt, stride_qh, GROUP,
                HEAD_DIM, BLOCK_D)
    k_ptr = _layer_keys(k_ptr, k_table_ptr, layer, stride_kl) + kv_head * stride_kh
    dims = tl.arange(0, BLOCK_D)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + keys.to(tl.int64)[:, None] * stride_ks + dims[None, :], mask=inside, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        logits = tl.where(keys[None, :] <= last[:, None], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1) * scale_log2)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(logits * scale_log2 - shift[:, None]), 1)
        row_max = new_max
    base = ((layer * tl.num_programs(1) + kv_head) * num_splits + split) * num_pairs
    tl.store(lse_ptr + base + pairs, row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0)), mask=valid)


@triton.jit(do_not_specialize=["num_pairs", "context_start", "context_stop"])
def importance_kernel(
    q_ptr, k_ptr, k_table_ptr, last_key_ptr, lse_ptr, out_ptr, num_pairs, context_start, context_stop, scale_log2,
    stride_ql, stride_qt, stride_qh, stride_kl, stride_ks, stride_kh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAKE_MAX: tl.constexpr,
):
    """Grid (context blocks, Hkv, Lc). lse: [Lc, Hkv, num_pairs]. out: [Lc, Hkv, N], max or sum over the pairs."""
    kv_head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    plane = layer * tl.num_programs(1) + kv_head
    columns = context_start + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = columns < context_stop
    dims = tl.arange(0, BLOCK_D)
    inside = kept[:, None] & (dims < HEAD_DIM)[None, :]
    k_ptr = _layer_keys(k_ptr, k_table_ptr, layer, stride_kl) + kv_head * stride_kh
    k = tl.load(k_ptr + columns.to(tl.int64)[:, None] * stride_ks + dims[None, :], mask=inside, other=0.0)
    q_ptr += layer * stride_ql + kv_head * GROUP * stride_qh

    reduced = tl.zeros([BLOCK_N], dtype=tl.float32)
    if TAKE_MAX:
        reduced += float("-inf")
    for start in range(0, num_pairs, BLOCK_M):
        pairs = start + tl.arange(0, BLOCK_M)
        valid = pairs < num_pairs
        last = tl.load(last_key_ptr + pairs // GROUP, mask=valid, other=-1).to(tl.int32)
        lse = tl.load(lse_ptr + plane * num_pairs + pairs, mask=valid, other=0.0)
        q = _load_q(q_ptr, pairs, num_pairs, stride_qt, stride_qh, GROUP, HEAD_DIM, BLOCK_D)
        log_probs = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale_log2 - lse[:, None]
        log_probs = tl.where(columns[None, :] <= last[:, None], log_probs, float("-inf"))
        if TAKE_MAX:
            # exp2 is monotone: one per column at the end instead of one per pair and column.
            reduced = tl.maximum(reduced, tl.max(log_probs, 0))
        else:
            reduced += tl.sum(tl.exp2(log_probs), 0)
    if TAKE_MAX:
        reduced = tl.exp2(reduced)
    tl.store(out_ptr + plane * (context_stop - context_start) + columns - context_start, reduced, mask=kept)


def _key_table(k: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(keys, addresses of the layers) for a list of layers; stacked, without addresses, where the layouts differ."""
    if any(x.stride() != k[0].stride() or x.data_ptr() % 16 for x in k):
        return torch.stack(tuple(k)), None
    table = torch.tensor([x.data_ptr() for x in k], dtype=torch.int64)
    if k[0].is_cuda:
        # Pinned, so that the copy does not make the host wait for the device.
        table = table.pin_memory().to(k[0].device, non_blocking=True)
    return k[0], table


def score(
    q: torch.Tensor,
    k: torch.Tensor | Sequence[torch.Tensor],
    q_last_key: torch.Tensor,
    context: tuple[int, int],
    reduce: str = "max",
    scale: float | None = None,
) -> torch.Tensor:
    """Shapes as in the public op. Scratch: Lc * Hq * T * S / 512 and Lc * Hkv * N floats."""
    num_layers, num_rows, num_heads, head_dim = q.shape
    keys, table = (k, None) if isinstance(k, torch.Tensor) else _key_table(k)
    num_keys, heads_kv = keys.shape[-3:-1]
    start, stop = context
    assert 0 <= start <= stop <= num_keys, f"context {context} is outside the {num_keys} keys"
    assert q.stride(-1) == keys.stride(-1) == 1, "the head dim must be contiguous"
    assert num_heads % heads_kv == 0, f"{num_heads} query heads do not divide over {heads_kv} kv heads"
    if start == stop:
        return torch.empty(num_layers, 0, dtype=torch.float32, device=q.device)
    group = num_heads // heads_kv
    num_pairs = num_rows * group
    num_splits = triton.cdiv(num_keys, SPLIT_KEYS)
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Three tf32 products hold three sets of operands, hence the small tiles of float32.
    block_m, block_n = (64, 64) if q.element_size() <= 2 else (32, 32)
    block_m = 16 if num_pairs <= 16 else block_m
    num_tiles = triton.cdiv(num_pairs, block_m)
    row_bytes = block_d * q.element_size()
    lse = torch.empty(num_layers, heads_kv, num_splits, num_pairs, dtype=torch.float32, device=q.device)
    out = torch.empty(num_layers, heads_kv, stop - start, dtype=torch.float32, device=q.device)
    shared = dict(
        q_ptr=q, k_ptr=keys, k_table_ptr=table, last_key_ptr=q_last_key.contiguous(), num_pairs=num_pairs,
        scale_log2=(head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
        stride_ql=q.stride(0), stride_qt=q.stride(1), stride_qh=q.stride(2),
        stride_kl=keys.stride(0), stride_ks=keys.stride(-3), stride_kh=keys.stride(-2),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=block_m,
        BLOCK_N=block_n, num_warps=4, num_stages=1 if row_bytes > 512 else (2 if row_bytes > 256 else 3),
    )
    with torch.cuda.device_of(q):
        lse_kernel[(num_tiles * num_splits, heads_kv, num_layers)](
            lse_ptr=lse, num_keys=num_keys, num_tiles=num_tiles, num_splits=num_splits, SPLIT_KEYS=SPLIT_KEYS, **shared
        )
        # Base 2 inside the kernels; logsumexp is base e.
        lse = torch.logsumexp(lse * math.log(2), dim=2) * math.log2(math.e)
        importance_kernel[(triton.cdiv(stop - start, block_n), heads_kv, num_layers)](
            lse_ptr=lse, out_ptr=out, context_start=start, context_stop=stop, TAKE_MAX=reduce == "max", **shared
        )
    return out.amax(1) if reduce == "max" else out.sum(1) / (num_rows * num_heads)
