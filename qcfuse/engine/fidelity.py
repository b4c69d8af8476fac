"""From logits along full prefill's own answer to the quality of an arm; the same for every engine."""

from __future__ import annotations

from torch import Tensor

from qcfuse.engine.base import Quality, Reference
from qcfuse.fusion.layout import Layout
from qcfuse.metrics.fidelity import agreement, kl_divergence
from qcfuse.types import Selection


def quality_of(
    selection: Selection, output_ids: list[int], logits: Tensor, reference: Reference, layout: Layout
) -> Quality:
    """An arm's outcome. logits: [A, vocab], along the reference answer of A tokens."""
    frac = selection.recomputed_frac
    full = reference.logits.to(logits.device)
    kl, agrees = kl_divergence(full, logits), agreement(full, logits)
    return Quality(
        output_ids=output_ids,
        first_logits=logits[0],
        first_token_kl=float(kl[0]),
        top1_agrees=bool(agrees[0]),
        answer_kl=float(kl.mean()),
        answer_agreement_frac=float(agrees.float().mean()),
        selection=selection,
        effective_recompute_frac=selection.selected.shape[0] / layout.num_context if frac is None else frac,
    )
