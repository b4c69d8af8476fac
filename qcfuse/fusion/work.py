"""What a method has to compute, in FLOPs: the work bound of section 6 of the design, and what benchmarks divide by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse.decoder.base import Decoder
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.probe import ProbeSpec
from qcfuse.fusion.source import anchor_count


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs (a multiply and an add count 2) of matrix products and attention; norms, RoPE and copies are left out."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, decoder: Decoder) -> Work:
        return cls(**{name: getattr(decoder, name) for name in cls.__dataclass_fields__})

    @property
    def _kv(self) -> int:
        return 4 * self.hidden_size * self.num_kv_heads * self.head_dim

    @property
    def _q(self) -> int:
        return 2 * self.hidden_size * self.num_heads * self.head_dim

    @property
    def _layer(self) -> int:
        """One row through the matrix products of one layer: q, k, v, output, gate, up, down."""
        return self._kv + 2 * self._q + 6 * self.hidden_size * self.intermediate_size

    def rows(self, num_rows: int, num_visible: int, last_visible: int) -> int:
        """A recompute pass: num_visible = sum over rows of the keys that each sees; last_visible: the last row's.

        At the last layer only the last row is more than its K and V. One row of logits.
        """
        attention = 4 * self.num_heads * self.head_dim
        full_layers = (self.num_layers - 1) * (num_rows * self._layer + attention * num_visible)
        last_layer = (num_rows - 1) * self._kv + self._layer + attention * last_visible
        return full_layers + last_layer + 2 * self.hidden_size * self.vocab_size

    def full_prefill(self, layout: Layout) -> int:
        num = layout.num_tokens
        return self.rows(num, num * (num + 1) // 2, num)

    def fusion(self, layout: Layout, selected: Tensor) -> int:
        """Recompute of P and the suffix, and layer 0's K and V of every other token."""
        rows = torch.cat([selected + layout.num_prefix, layout.suffix_positions])
        others = layout.num_tokens - rows.shape[0]
        return self.rows(rows.shape[0], int((rows + 1).sum()), layout.num_tokens) + others * self._kv

    def selection(self, layout: Layout, spec: ProbeSpec | None) -> int:
        """The probe to its deepest layer (there q, k, v only) and the scores of question rows over all visible keys."""
        if spec is None:
            return 0
        start, end = layout.question
        num_rows = end - layout.context_end
        seen = layout.num_prefix + sum(anchor_count(spec.anchor_ratio, n) for n in layout.chunk_lengths)
        deepest = max(spec.layers)
        attention = 4 * self.num_heads * self.head_dim * (num_rows * seen + num_rows * (num_rows + 1) // 2)
        probe = deepest * (num_rows * self._layer + attention) + num_rows * (self._kv + self._q)
        keys = sum(range(start + 1, end + 1))
        scores = len(spec.layers) * 2 * self.num_heads * self.head_dim * keys
        layer_0 = (layout.context_end if 0 in spec.layers or spec.anchor_ratio == 1 else seen) * self._kv
        return probe + scores + layer_0
