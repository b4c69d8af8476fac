"""CPU `recompute_attention`: rows in blocks, each over the keys it can see, through torch's blocked flash kernel.

A block whose first row sees keys 0..p and whose last row sees 0..q takes keys 0..p - 1 without a mask, and p..q under a
mask of the block's own size; the two parts merge by their log-sum-exp. Blocks merge together at the end, since every
pass over a large tensor is a barrier between threads, which costs more than its arithmetic on a busy machine.
"""

from __future__ import annotations

import torch

from kernels.recompute_attention.ref import recompute_attention_paged, recompute_attention_ragged_by

__all__ = ["recompute_attention", "recompute_attention_paged", "recompute_attention_ragged"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# The flash kernel takes rows in tiles of 64 from 192 rows on, and of 32 below (higher throughput against more masked
# squares): few rows lie far apart, so that a block's masked part is wide, and want small blocks.
_LARGE_BLOCK, _SMALL_BLOCK, _FEW_ROWS = 192, 96, 600


def recompute_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last_key: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shapes as in the public op. K and V are read in place, never repeated per query head."""
    num_rows = q.shape[0]
    if num_rows == 0:
        return torch.empty_like(q) if out is None else out
    queries, keys, values = _group(q, k.shape[1]), _expand(k, q.shape[1]), _expand(v, q.shape[1])
    if window is None and _is_causal(last_key, num_rows):
        keys, values = keys[:, :, :num_rows], values[:, :, :num_rows]
        result = _rows_first(_flash(queries, keys, values, 0.0, True, scale=scale)[0]).flatten(1, 2)
        return result if out is None else out.copy_(result)
    masked, masked_lse, shared, shared_lse = [], [], [], []
    for rows, start, stop in _blocks(last_key, window):
        mask = _mask(last_key[rows], start, stop, window).to(q.dtype)
        near = slice(start, stop)
        part = _flash(queries[:, :, rows], keys[:, :, near], values[:, :, near], attn_mask=mask, scale=scale)
        masked.append(_rows_first(part[0]))
        masked_lse.append(_rows_first(part[1].unsqueeze(-1)))
        if window is None and start:
            part = _flash(queries[:, :, rows], keys[:, :, :start], values[:, :, :start], scale=scale)
        # A block without unmasked keys merges with itself.
        shared.append(_rows_first(part[0]))
        shared_lse.append(_rows_first(part[1].unsqueeze(-1)))
    weight = torch.sigmoid(torch.cat(masked_lse) - torch.cat(shared_lse)).to(q.dtype)
    result = torch.lerp(torch.cat(shared), torch.cat(masked), weight).flatten(1, 2)
    return result if out is None else out.copy_(result)


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
) -> torch.Tensor:
    """Shapes as in the public op; one request after the other."""
    return recompute_attention_ragged_by(
        recompute_attention, q, k, v, last_key, cu_rows, cu_keys, scale, window, out
    )


def _blocks(last_key: torch.Tensor, window: int | None) -> list[tuple[slice, int, int]]:
    """(rows, start, stop) of each block: keys start..stop - 1 need a mask, the ones before start do not."""
    ends = last_key.tolist()
    size = _SMALL_BLOCK if len(ends) < _FEW_ROWS else _LARGE_BLOCK
    blocks = []
    for first in range(0, len(ends), size):
        last = min(first + size, len(ends)) - 1
        start = ends[first] if window is None else max(0, ends[first] - window + 1)
        blocks.append((slice(first, last + 1), start, ends[last] + 1))
    return blocks


def _is_causal(last_key: torch.Tensor, num_rows: int) -> bool:
    """Whether row i sees exactly keys 0..i, as in full prefill: one causal call then does it."""
    return int(last_key[-1]) == num_rows - 1 and torch.equal(last_key, torch.arange(num_rows))


def _mask(last_key: torch.Tensor, start: int, stop: int, window: int | None) -> torch.Tensor:
    """Additive mask [1, 1, rows, stop - start]: 0 where a row sees the key, -inf elsewhere."""
    last, keys = last_key.to(torch.int32)[:, None], torch.arange(start, stop, dtype=torch.int32)
    visible = keys <= last if window is None else (keys <= last) & (keys > last - window)
    return torch.where(visible, 0.0, float("-inf"))[None, None]


def _group(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[R, Hq, D] -> [Hkv, Hq / Hkv, R, D], a view."""
    return q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """[Hkv, Hq / Hkv, R, D] -> [R, Hkv, Hq / Hkv, D], a view."""
    return x.permute(2, 0, 1, 3)


def _expand(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[S, Hkv, D] -> [Hkv, Hq / Hkv, S, D], a view that repeats each kv head for its query heads."""
    return x.transpose(0, 1)[:, None].expand(-1, num_heads // x.shape[1], -1, -1)
