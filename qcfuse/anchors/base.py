"""What an anchor rule is: scores per layer and token of a chunk that was prefilled alone, and the ranking from them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qcfuse.decoder.base import Decoder
from qcfuse.fusion.cache import KVCache


@dataclass(frozen=True, kw_only=True)
class PrefilledChunk:
    """A chunk prefilled alone from position 0.

    ids: [n] int64. cache: its rotated KV in rows 0..n-1, with `room` spare rows behind. k: [L, n, Hkv, D], un-rotated.
    """

    ids: Tensor
    cache: KVCache
    k: Tensor


@dataclass(frozen=True, kw_only=True)
class AnchorRule(ABC):
    """scope: one ranking per chunk (paper) or one per layer (the released code). num_sinks: the chunk's first tokens
    that rank before all others (4 in the released code). layer_reduce: how scope=chunk joins the layers."""

    name: ClassVar[str]
    scope: Literal["chunk", "layer"]
    num_sinks: int
    layer_reduce: Literal["mean", "max"]

    def __post_init__(self) -> None:
        if self.scope not in ("chunk", "layer"):
            raise ValueError(f"anchors.scope={self.scope!r} is unknown; choose chunk or layer")
        if self.layer_reduce not in ("mean", "max"):
            raise ValueError(f"anchors.layer_reduce={self.layer_reduce!r} is unknown; choose mean or max")
        if self.num_sinks < 0:
            raise ValueError(f"anchors.num_sinks={self.num_sinks} must not be negative")

    @property
    def key(self) -> str:
        """Names the rule and all that its ranking depends on; a directory of the chunk store."""
        settings = ",".join(f"{name}={value!r}" for name, value in sorted(asdict(self).items()))
        return f"{self.name}-{self.scope}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"

    def room(self, num_tokens: int, encode: Callable[[str], list[int]]) -> int:
        """How many rows `scores` needs behind the chunk."""
        return 0

    @abstractmethod
    def scores(self, decoder: Decoder, chunk: PrefilledChunk, encode: Callable[[str], list[int]]) -> Tensor:
        """[L, n] float32; higher is more important. encode: text to ids without special tokens."""

    def order(self, decoder: Decoder, chunk: PrefilledChunk, encode: Callable[[str], list[int]]) -> Tensor:
        """Token indices in descending rank, int64: [n], or [L, n] where scope is layer. Ties: the earlier token."""
        scores = self.scores(decoder, chunk, encode)
        if self.scope == "chunk":
            scores = scores.mean(0) if self.layer_reduce == "mean" else scores.amax(0)
        scores[..., : self.num_sinks] = torch.inf
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices
