"""Tensors inside a margin of NaN: a read outside poisons the result, a write outside shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Guarded:
    """view: the tensor, with strides that are not those of its shape. buffer: the memory around it."""

    view: torch.Tensor
    buffer: torch.Tensor

    def assert_margin_untouched(self) -> None:
        before = self.view.clone()
        self.view.fill_(float("nan"))
        touched = int((~self.buffer.isnan()).sum())
        self.view.copy_(before)
        assert touched == 0, f"{touched} elements outside the tensor were written"


def guarded(*shape: int, dtype: torch.dtype = torch.float32, fill: torch.Tensor | None = None) -> Guarded:
    """[..., rows, heads, dim] laid out as [..., heads, rows, dim], NaN around it and, without `fill`, in it."""
    *lead, rows, heads, dim = shape
    buffer = torch.full((*lead, heads + 2, rows + 3, dim + 16), float("nan"), dtype=dtype)
    view = buffer[..., 1:-1, 1:-2, 8:-8].transpose(-3, -2)
    if fill is not None:
        view.copy_(fill)
    return Guarded(view, buffer)
