"""Anchors by the attention received while the model repeats the chunk. Based on KVzip (arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.score import score
from qcfuse.anchors.base import AnchorRule, PrefilledChunk
from qcfuse.decoder.base import Decoder
from qcfuse.fusion.prefill import prefill


@dataclass(frozen=True, kw_only=True)
class KVzip(AnchorRule):
    """Repeat queries attend to the chunk; per layer their softmax (over chunk and repeat tokens, causal, float32) is
    reduced over queries and heads, then over layers.

    variant: `full_repeat` feeds instruction ++ chunk as queries (KVzip); `instruction_only` just the instruction (the
    QCFuse code). instruction: its text, with the chat turn that it needs, if any.
    """

    name = "kvzip"
    variant: Literal["full_repeat", "instruction_only"]
    reduce: Literal["max", "mean"]
    instruction: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("full_repeat", "instruction_only"):
            raise ValueError(f"anchors.variant={self.variant!r} is unknown; choose full_repeat or instruction_only")
        if self.reduce not in ("max", "mean"):
            raise ValueError(f"anchors.reduce={self.reduce!r} is unknown; choose max or mean")

    def room(self, num_tokens: int, encode: Callable[[str], list[int]]) -> int:
        return len(encode(self.instruction)) + (num_tokens if self.variant == "full_repeat" else 0)

    def scores(self, decoder: Decoder, chunk: PrefilledChunk, encode: Callable[[str], list[int]]) -> Tensor:
        num_tokens = chunk.ids.shape[0]
        repeat = torch.tensor(encode(self.instruction), dtype=torch.int64, device=chunk.ids.device)
        if self.variant == "full_repeat":
            repeat = torch.cat([repeat, chunk.ids])
        end = num_tokens + repeat.shape[0]
        rows = torch.arange(num_tokens, end, device=chunk.ids.device)
        scores = []

        def observe(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
            scores.append(score(q[None], [chunk.cache.k[layer][:end]], rows, (0, num_tokens), self.reduce)[0])

        prefill(decoder, repeat, chunk.cache, start=num_tokens, observe=observe)
        return torch.stack(scores)
