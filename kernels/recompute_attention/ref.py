"""Plain torch truth of `recompute_attention`: float32, whole mask."""

from __future__ import annotations

from collections.abc import Callable

import torch


def recompute_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last_key: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shapes as in the public op."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("rhd,shd->hrs", q.float(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = last_key[:, None] - torch.arange(k.shape[0], device=k.device)
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    probs = logits.masked_fill(~visible, float("-inf")).softmax(-1)
    result = torch.einsum("hrs,shd->rhd", probs, values).to(q.dtype)
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


def recompute_attention_ragged_by(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    last_key: torch.Tensor,
    cu_rows: torch.Tensor,
    cu_keys: torch.Tensor,
    scale: float | None,
    window: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The ragged op out of a one-request op `attend`."""
    out = torch.empty_like(q) if out is None else out
    rows, keys = cu_rows.tolist(), cu_keys.tolist()
    for i in range(len(rows) - 1):
        row, key = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
        attend(q[row], k[key], v[key], last_key[row], scale, window, out[row])
    return out


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
    """Shapes as in the public op; gathers each request's pages, then attends."""
    out = torch.empty_like(q) if out is None else out
    rows, block = cu_rows.tolist(), k_cache.shape[1]
    for i in range(len(rows) - 1):
        row = slice(rows[i], rows[i + 1])
        if rows[i] == rows[i + 1]:
            continue
        pages = block_table[i, : int(last_key[row].max()) // block + 1].long()
        keys, values = (cache[pages].flatten(0, 1) for cache in (k_cache, v_cache))
        recompute_attention(q[row], keys, values, last_key[row], scale, window, out[row])
    return out
