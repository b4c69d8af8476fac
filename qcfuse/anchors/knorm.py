"""Anchors by key norm. Based on Devoto et al. (arXiv 2406.11430): tokens whose keys have a low norm are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qcfuse.anchors.base import AnchorRule, PrefilledChunk
from qcfuse.decoder.base import Decoder


@dataclass(frozen=True, kw_only=True)
class Knorm(AnchorRule):
    """Score = minus the L2 norm of the un-rotated key (RoPE keeps norms), mean over kv heads."""

    name = "knorm"

    def scores(self, decoder: Decoder, chunk: PrefilledChunk, encode: Callable[[str], list[int]]) -> Tensor:
        return -chunk.k.float().norm(dim=-1).mean(-1)
