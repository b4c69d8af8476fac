"""CPU `place_kv`: rows go straight into a contiguous run of slots, and through one gathered buffer otherwise."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [R, H, D]; cos, sin: [R, D/2]. Returns a new contiguous [R, H, D]."""
    return _rotate_into(torch.empty(x.shape, dtype=x.dtype), x, cos, sin)


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
    if slots.numel() == 0:
        return
    keys = k_rows if rows is None else k_rows.index_select(0, rows)
    run = _as_run(slots)
    if run is None:
        k_out.index_copy_(0, slots, rotate(keys, cos, sin))
    else:
        _rotate_into(k_out[run], keys, cos, sin)
    if v_rows is None or v_out is None:
        return
    values = v_rows if rows is None else v_rows.index_select(0, rows)
    if run is None:
        v_out.index_copy_(0, slots, values)
    else:
        v_out[run].copy_(values)


def _as_run(slots: torch.Tensor) -> slice | None:
    """The slice that `slots` spells out, None where it is not a run of step 1."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first != len(slots) - 1 or not torch.equal(slots, torch.arange(first, last + 1)):
        return None
    return slice(first, last + 1)


def _rotate_into(dst: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    low, high = dst.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=high).addcmul_(first, sin)
    return dst
