"""Fidelity to full prefill: KL(full || method) in nats and greedy agreement, over vocabulary distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def kl_divergence(full_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(full || method) per row, float64, in nats. Both [..., vocab]."""
    full = full_logits.double().log_softmax(-1)
    return (full.exp() * (full - logits.double().log_softmax(-1))).sum(-1)


def agreement(full_logits: Tensor, logits: Tensor) -> Tensor:
    """Whether the greedy tokens agree, per row, bool."""
    return full_logits.argmax(-1) == logits.argmax(-1)
