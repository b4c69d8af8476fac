"""Anchors at the start of each chunk. Based on arXiv 2606.05875, section 3 (after StreamingLLM's attention sinks)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse.anchors.base import AnchorRule, PrefilledChunk
from qcfuse.decoder.base import Decoder


@dataclass(frozen=True, kw_only=True)
class Sink(AnchorRule):
    """Earlier tokens rank higher."""

    name = "sink"

    def scores(self, decoder: Decoder, chunk: PrefilledChunk, encode: Callable[[str], list[int]]) -> Tensor:
        num_tokens = chunk.ids.shape[0]
        ranks = torch.arange(num_tokens, 0, -1, dtype=torch.float32, device=chunk.ids.device)
        return ranks.repeat(decoder.num_layers, 1)
