"""dump=true: what was selected and why, one safetensors file a sample."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from qcfuse.engine.base import Quality
from qcfuse.types import Request


def write_dump(directory: Path, request: Request, quality: Quality) -> None:
    """input_ids, segment_lengths, question_span (within the suffix), anchors, layers, importance, selected (context
    indices), first_logits; what a selector does not have is an empty tensor."""
    selection = quality.selection
    tensors = {
        "input_ids": torch.tensor(request.input_ids),
        "segment_lengths": torch.tensor(request.segment_lengths),
        "question_span": torch.tensor(request.question_span),
        "anchors": _or_empty(selection.anchors, torch.int64),
        "layers": torch.tensor(selection.layers, dtype=torch.int64),
        "importance": _or_empty(selection.importance, torch.float64),
        "selected": selection.selected,
        "first_logits": quality.first_logits.float(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    name = request.sample_id.replace("/", "_")
    save_file(
        {key: value.cpu().contiguous().clone() for key, value in tensors.items()}, directory / f"{name}.safetensors"
    )


def _or_empty(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype) if tensor is None else tensor
