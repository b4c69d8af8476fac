"""Plain torch truth of `place_kv`."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [R, H, D]; cos, sin: [R, D/2]. Returns a new [R, H, D]."""
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
    """Shapes as in the public op; writes k_out and v_out in place."""
    source = slice(None) if rows is None else rows
    k_out[slots] = rotate(k_rows[source], cos, sin)
    if v_rows is not None and v_out is not None:
        v_out[slots] = v_rows[source]
