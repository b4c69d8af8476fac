"""Rotate rows at their request positions and write them to their slots, in one pass over the bytes."""

from __future__ import annotations

import torch

from kernels import implementation


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves paired: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).

    x: [R, H, D], any strides with a contiguous last dim. cos, sin: [R, D/2], cast to x.dtype (as the HF models do).
    Returns a new [R, H, D] of x.dtype.
    """
    return implementation("place_kv.rotate", x.device).rotate(x, cos, sin)


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
    """Writes k_out and v_out in place: source row rows[i] (i where rows is None), keys rotated, goes to slots[i].

    k_rows, v_rows: [n, Hkv, D], k un-rotated. cos, sin: [m, D/2] at the request positions of the m placed rows.
    slots: [m] int64, unique, into dim 0 of the outputs. rows: [m] int64 or None (then m = n).
    k_out, v_out: [S, Hkv, D], any strides with a contiguous last dim; other rows stay as they are.
    v_rows and v_out may both be None (keys only).
    """
    assert (v_rows is None) == (v_out is None), "values need both a source and a destination"
    implementation("place_kv", k_rows.device).place_kv(k_rows, v_rows, cos, sin, slots, k_out, v_out, rows)
