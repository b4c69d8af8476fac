"""Where every byte of a chunk file stands: a closed formula, so that readers and planners need no look-up.

Data section: `order`, then for layers 1 and up, for each head group, the tensors k and v. Every tensor starts on a
page; the gap behind it is a named pad tensor, since the safetensors format allows no holes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PARTS = ("k", "v")
ORDER_ITEM_BYTES = 8


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """Shape of one model's KV cache. head_groups: tensor-parallel ranks whose heads are stored apart."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    head_groups: int

    def __post_init__(self) -> None:
        if self.num_layers < 2 or self.num_kv_heads < 1 or self.head_dim < 1:
            raise ValueError(f"KV geometry {self.num_layers} layers x {self.num_kv_heads} kv heads x {self.head_dim}: "
                             "at least 2 layers, 1 head and 1 dim are needed (layer 0 is never stored)")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} cannot be stored; use one of {sorted(ITEM_BYTES)}")
        if self.head_groups < 1 or self.num_kv_heads % self.head_groups:
            raise ValueError(f"head_groups={self.head_groups} does not divide {self.num_kv_heads} kv heads")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def group_heads(self) -> int:
        return self.num_kv_heads // self.head_groups

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) of one layer and one head group: what one rank reads."""
        return self.group_heads * self.head_dim * self.item_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of K and V of all L layers and all heads, layer 0 included (the unit of byte reports)."""
        return 2 * self.num_layers * self.head_groups * self.row_bytes * num_tokens

    @classmethod
    def of(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, head_groups: int
    ) -> KVGeometry:
        """From a decoder's attributes; dtype is the torch dtype of its cache."""
        return cls(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim,
                   dtype=str(dtype).removeprefix("torch."), head_groups=head_groups)


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Offsets within the data section of one chunk file. num_orders: 1, or L - 1 where each layer has its own."""

    geometry: KVGeometry
    num_tokens: int
    rows_per_block: int
    num_orders: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"a stored chunk needs at least one token, got {self.num_tokens}")
        if self.rows_per_block < 1:
            raise ValueError(f"rows_per_block={self.rows_per_block} must be 1 or more (8 and 16 are usual)")
        if self.num_orders not in (1, self.geometry.num_layers - 1):
            raise ValueError(f"{self.num_orders} row orders; a chunk has 1 or one per stored layer "
                             f"({self.geometry.num_layers - 1})")

    @property
    def order_bytes(self) -> int:
        return self.num_orders * self.num_tokens * ORDER_ITEM_BYTES

    @cached_property
    def order_stride(self) -> int:
        return round_up(self.order_bytes, PAGE_BYTES)

    @cached_property
    def tensor_bytes(self) -> int:
        return self.num_tokens * self.geometry.row_bytes

    @cached_property
    def tensor_stride(self) -> int:
        return round_up(self.tensor_bytes, PAGE_BYTES)

    @property
    def num_tensors(self) -> int:
        return 2 * (self.geometry.num_layers - 1) * self.geometry.head_groups

    @property
    def num_blocks(self) -> int:
        """Checksummed blocks of one tensor; the last may hold fewer rows."""
        return -(-self.num_tokens // self.rows_per_block)

    @property
    def block_bytes(self) -> int:
        return self.rows_per_block * self.geometry.row_bytes

    @property
    def data_bytes(self) -> int:
        return self.order_stride + self.num_tensors * self.tensor_stride

    def tensor_index(self, part: int, layer: int, group: int) -> int:
        """Rank of a tensor in the file; part 0 is k, 1 is v; layer counts from 1."""
        assert part in (0, 1) and 1 <= layer < self.geometry.num_layers and 0 <= group < self.geometry.head_groups
        return 2 * ((layer - 1) * self.geometry.head_groups + group) + part

    def offset(self, part: int, layer: int, group: int) -> int:
        """Start of a tensor in the data section; a multiple of 4,096."""
        return self.order_stride + self.tensor_index(part, layer, group) * self.tensor_stride
