"""The layer-level view of a model: all that fusion, probes, anchors and deviations know of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Decoder(ABC):
    """A pre-norm decoder-only transformer taken apart at its attention.

    Shapes: hidden [R, hidden_size]; q [R, Hq, D]; k, v [R, Hkv, D]; R is any number of rows, of any requests.
    q and k leave `project` after QK-norm and before RoPE; `rotate` applies the model's own rotary embedding once.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [R] int64 -> hidden [R, hidden_size]."""

    @abstractmethod
    def project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden -> q, k, v of `layer`, after QK-norm and before RoPE."""

    @abstractmethod
    def project_kv(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The k, v of `project` without the cost of q: for rows that only have to be seen."""

    @abstractmethod
    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [R] int64 -> cos, sin [R, D/2] of the model's own rotary module, any rope scaling included."""

    @abstractmethod
    def finish(self, layer: int, hidden: torch.Tensor, attn_out: torch.Tensor) -> torch.Tensor:
        """Output projection, residuals and MLP: hidden [R, H], attn_out [R, Hq, D] -> hidden after the layer."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: hidden [R, hidden_size] -> [R, vocab] float32."""

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [R, H, D] un-rotated -> rotated at positions [R]; a new tensor, x stays as it is."""
        from kernels.place_kv import rotate

        return rotate(x, *self.rotary(positions))
