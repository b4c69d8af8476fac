"""Importance of context keys: exact attention probabilities, reduced over rows and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from kernels import implementation

Reduce = Literal["max", "mean"]


def score(
    q: torch.Tensor,
    k: torch.Tensor | Sequence[torch.Tensor],
    q_last_key: torch.Tensor,
    context: tuple[int, int],
    reduce: Reduce = "max",
    scale: float | None = None,
) -> torch.Tensor:
    """Attention each context key receives from the query rows, per layer (QCFuse, token importance).

    q: [Lc, T, Hq, D], rotated. k: [Lc, S, Hkv, D], rotated, or Lc tensors [S, Hkv, D]; query head h reads kv head
    h // (Hq / Hkv). q_last_key: [T] int64, row t sees keys 0..q_last_key[t]. context: columns [start, stop) to keep;
    the softmax (float32) runs over all visible keys. scale: 1 / sqrt(D) where None.
    Returns [Lc, stop - start] float32, reduced over rows and query heads; the attention matrix never exists whole.
    Raises ValueError for another `reduce`.
    """
    if reduce not in ("max", "mean"):
        raise ValueError(f"reduce={reduce!r}; give 'max' or 'mean'")
    return implementation("score", q.device).score(q, k, q_last_key, context, reduce, scale)
