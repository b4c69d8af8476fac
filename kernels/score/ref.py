"""Plain torch truth of `score`."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def score(
    q: torch.Tensor,
    k: torch.Tensor | Sequence[torch.Tensor],
    q_last_key: torch.Tensor,
    context: tuple[int, int],
    reduce: str = "max",
    scale: float | None = None,
) -> torch.Tensor:
    """Shapes as in the public op; float32 throughout, whole attention matrix of one layer."""
    return torch.stack([_layer(q[i], k[i], q_last_key, context, reduce, scale) for i in range(len(q))])


def _layer(
    q: torch.Tensor, k: torch.Tensor, q_last_key: torch.Tensor, context: tuple[int, int], reduce: str,
    scale: float | None,
) -> torch.Tensor:
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("thd,shd->ths", q.float(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.arange(k.shape[0], device=k.device) > q_last_key[:, None]
    probs = logits.masked_fill(hidden[:, None], float("-inf")).softmax(-1)[..., slice(*context)]
    return probs.amax((0, 1)) if reduce == "max" else probs.mean((0, 1))
