"""Attention of scattered query rows over a fused KV cache, each row limited to keys up to its own position."""

from __future__ import annotations

import torch

from kernels import implementation


def recompute_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last_key: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row i attends to keys 0..last_key[i] and only those; with a window w, to last_key[i] - w + 1..last_key[i].

    q: [R, Hq, D], rotated. k (rotated), v: [S, Hkv, D], any strides with a contiguous last dim; query head h reads kv
    head h // (Hq / Hkv). last_key: [R] int64, non-decreasing, in 0..S - 1. scale: 1 / sqrt(D) where None.
    out: [R, Hq, D] of q.dtype, written in place; a new tensor where None. Returns it.
    """
    return implementation("recompute_attention", q.device).recompute_attention(q, k, v, last_key, scale, window, out)


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
    """A batch of B requests back to back: request b owns rows cu_rows[b]..cu_rows[b + 1] and keys cu_keys[b]..[b + 1].

    q: [sum R, Hq, D]; k, v: [sum S, Hkv, D]; cu_rows, cu_keys: [B + 1] int. last_key: [sum R], counted within the
    request, non-decreasing within it. The rest as in `recompute_attention`.
    """
    ops = implementation("recompute_attention.ragged", q.device)
    return ops.recompute_attention_ragged(q, k, v, last_key, cu_rows, cu_keys, scale, window, out)


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
) -> torch.Tensor:
    """As `recompute_attention_ragged`, keys of request b in pages: key p lies in block block_table[b, p // block].

    k_cache, v_cache: [num_blocks, block, Hkv, D]. block_table: [B, max_blocks] int; entries past a request's last
    key are not read. cu_rows: [B + 1] int.
    """
    ops = implementation("recompute_attention.paged", q.device)
    return ops.recompute_attention_paged(q, k_cache, v_cache, last_key, cu_rows, block_table, scale, window, out)
