"""Recall of gold evidence tokens by the most important tokens (Recall@10% of arXiv 2606.05875, critical layers)."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import numpy as np
from numpy.typing import ArrayLike

from qcfuse.types import budget


def recall_at(importance: ArrayLike, evidence: Sequence[int], frac: float | str | Decimal) -> float:
    """|top floor(frac * N) tokens and E| / |E|, ties to the lower index.

    importance: [N] finite scores (an array or a CPU tensor). evidence: E, context indices. Raises ValueError where
    E is empty or outside the context, or a score is not finite.
    """
    scores = np.asarray(importance, dtype=np.float64)
    gold = set(evidence)
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise ValueError(f"importance must be one row of finite scores, got shape {scores.shape} with "
                         f"{int((~np.isfinite(scores)).sum())} values that are not finite")
    if not gold or min(gold) < 0 or max(gold) >= len(scores):
        raise ValueError(f"evidence must be context indices from 0 to {len(scores) - 1}, at least one; got "
                         f"{sorted(gold)[:8]}")
    order = np.argsort(-scores, kind="stable")
    return len(gold.intersection(order[: budget(frac, len(scores))].tolist())) / len(gold)
