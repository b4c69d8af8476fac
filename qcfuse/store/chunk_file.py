"""One chunk's KV as a safetensors file: page-aligned tensors, checksummed blocks of rows, atomic writes.

An *image* is the whole file as one uint8 tensor, header included; the RAM tier keeps images, so that one layout and
one reader serve memory and disk. Any safetensors reader opens the file as well (the tensors `pad.<i>` are zeros).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from qcfuse.store.geometry import PAGE_BYTES, PARTS, ChunkLayout, KVGeometry, round_up

FORMAT_VERSION = "1"
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


class ChunkError(Exception):
    """A file that must not be used. reason: missing, truncated, corrupt or foreign."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class ChunkIdentity:
    """What a file is the cache of. kind: chunk or prefix; content: sha256 of the token ids."""

    kind: str
    model_key: str
    anchor_key: str
    content: str


@dataclass(frozen=True, kw_only=True)
class ChunkHeader:
    """What a reader knows after the header and `order`, before any KV is read.

    data_start: file offset of the data section. checksums: [num_tensors, num_blocks] uint64 (xxh3, 64 bit).
    order: [n] int64, or [L - 1, n] where each layer has its own.
    """

    layout: ChunkLayout
    data_start: int
    checksums: np.ndarray
    order: np.ndarray

    @property
    def first_tensor(self) -> int:
        """File offset of the first tensor; the next stand layout.tensor_stride apart."""
        return self.data_start + self.layout.order_stride

    def offset(self, part: int, layer: int, group: int) -> int:
        """File offset of a tensor."""
        return self.data_start + self.layout.offset(part, layer, group)

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.layout.data_bytes

    def verify(self, rows: memoryview, part: int, layer: int, group: int, first_block: int) -> bool:
        """Whether rows, whole blocks from first_block on (the last may be short), carry the stored checksums."""
        expected = self.checksums[self.layout.tensor_index(part, layer, group), first_block:]
        found = _block_checksums(rows, self.layout.block_bytes)
        return len(found) <= len(expected) and np.array_equal(found, expected[: len(found)])


class Stored(NamedTuple):
    """A file's image in memory and its parsed header."""

    image: torch.Tensor
    header: ChunkHeader


def _block_checksums(rows: memoryview, block_bytes: int) -> np.ndarray:
    digest = xxhash.xxh3_64_intdigest
    starts = range(0, len(rows), block_bytes)
    return np.fromiter((digest(rows[i : i + block_bytes]) for i in starts), np.uint64, len(starts))


def _entries(layout: ChunkLayout) -> dict[str, dict[str, object]]:
    """The tensor entries of the header in file order, pads included."""
    geometry, entries, at = layout.geometry, {}, 0

    def add(name: str, dtype: str, shape: list[int], num_bytes: int, stride: int) -> None:
        nonlocal at
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + num_bytes]}
        if stride > num_bytes:
            entries[f"pad.{len(entries)}"] = {"dtype": "U8", "shape": [stride - num_bytes],
                                              "data_offsets": [at + num_bytes, at + stride]}
        at += stride

    rows = [layout.num_tokens]
    add("order", "I64", rows if layout.num_orders == 1 else [layout.num_orders, *rows], layout.order_bytes,
        layout.order_stride)
    for layer in range(1, geometry.num_layers):
        for group in range(geometry.head_groups):
            for part in PARTS:
                add(f"{part}.{layer}.{group}", SAFETENSORS_DTYPES[geometry.dtype],
                    [*rows, geometry.group_heads, geometry.head_dim], layout.tensor_bytes, layout.tensor_stride)
    return entries


def _build_header(layout: ChunkLayout, identity: ChunkIdentity, checksums: np.ndarray, order_checksum: int) -> bytes:
    """Length word and JSON, padded with spaces (which the format allows) so that the data starts on a page."""
    metadata = {
        "format": "qcfuse-chunk", "version": FORMAT_VERSION, "kind": identity.kind, "model_key": identity.model_key,
        "anchor_key": identity.anchor_key, "content": identity.content, "num_orders": str(layout.num_orders),
        "rows_per_block": str(layout.rows_per_block), "checksum": "xxh3_64", "order_checksum": f"{order_checksum:016x}",
        "checksums": base64.b64encode(checksums.astype("<u8").tobytes()).decode(),
    }  # fmt: skip
    text = json.dumps({"__metadata__": metadata, **_entries(layout)}, separators=(",", ":")).encode()
    padded = round_up(8 + len(text), PAGE_BYTES) - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def tensors_of(image: torch.Tensor, header: ChunkHeader) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v: [L - 1, G, n, Hkv / G, D] as views of the image, rows in stored order."""
    layout, geometry = header.layout, header.layout.geometry
    typed = image[header.data_start :].view(getattr(torch, geometry.dtype))
    stride = layout.tensor_stride // geometry.item_bytes
    shape = (geometry.num_layers - 1, geometry.head_groups, layout.num_tokens, geometry.group_heads, geometry.head_dim)
    strides = (2 * geometry.head_groups * stride, 2 * stride, geometry.group_heads * geometry.head_dim,
               geometry.head_dim, 1)
    start = typed.storage_offset() + layout.order_stride // geometry.item_bytes
    return typed.as_strided(shape, strides, start), typed.as_strided(shape, strides, start + stride)


def decode(stored: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k, v [L - 1, n, Hkv, D] and order [n]. With one head group k and v are views of the image: read only."""
    image, header = stored
    geometry = header.layout.geometry
    shape = (geometry.num_layers - 1, header.layout.num_tokens, geometry.num_kv_heads, geometry.head_dim)
    k, v = (part.transpose(1, 2).reshape(shape) for part in tensors_of(image, header))
    return k, v, torch.from_numpy(header.order)


def encode(
    k: torch.Tensor, v: torch.Tensor, order: torch.Tensor, geometry: KVGeometry, rows_per_block: int,
    identity: ChunkIdentity,
) -> Stored:  # fmt: skip
    """A chunk in stored form: k, v [L - 1, n, Hkv, D], rows as order [n] (or [L - 1, n]) names them.

    Raises ValueError where shapes or dtype are not those of the geometry, or order is no permutation.
    """
    layout = ChunkLayout(geometry=geometry, num_tokens=order.shape[-1], rows_per_block=rows_per_block,
                         num_orders=1 if order.ndim == 1 else order.shape[0])
    expected = (geometry.num_layers - 1, layout.num_tokens, geometry.num_kv_heads, geometry.head_dim)
    for name, part in (("k", k), ("v", v)):
        if tuple(part.shape) != expected or str(part.dtype) != f"torch.{geometry.dtype}":
            raise ValueError(f"{name} is {tuple(part.shape)} {part.dtype}; this store holds "
                             f"{expected} {geometry.dtype}")
    ranks = order.detach().cpu().to(torch.int64).contiguous().numpy()
    if not (np.sort(ranks, axis=-1) == np.arange(layout.num_tokens)).all():
        raise ValueError(f"order is not a permutation of 0..{layout.num_tokens - 1}")
    blank = np.zeros((layout.num_tensors, layout.num_blocks), np.uint64)
    data_start = len(_build_header(layout, identity, blank, 0))
    image = torch.zeros(data_start + layout.data_bytes, dtype=torch.uint8)
    ranks = ranks[0] if layout.num_orders == 1 and ranks.ndim == 2 else ranks
    header = ChunkHeader(layout=layout, data_start=data_start, checksums=blank, order=ranks)
    for target, source in zip(tensors_of(image, header), (k, v), strict=True):
        grouped = source.unflatten(2, (geometry.head_groups, geometry.group_heads))
        target.copy_(grouped.transpose(1, 2))
    raw = image.numpy()
    raw[data_start : data_start + layout.order_bytes] = np.frombuffer(ranks.astype("<i8").tobytes(), np.uint8)
    checksums = np.stack([_block_checksums(rows, layout.block_bytes) for rows in _all_rows(image, header)])
    order_checksum = xxhash.xxh3_64_intdigest(raw[data_start : data_start + layout.order_bytes])
    raw[:data_start] = np.frombuffer(_build_header(layout, identity, checksums, order_checksum), np.uint8)
    return Stored(image, ChunkHeader(layout=layout, data_start=data_start, checksums=checksums, order=ranks))


def _all_rows(image: torch.Tensor, header: ChunkHeader) -> list[memoryview]:
    """The bytes of every tensor in file order, pads left out."""
    raw, layout = memoryview(image.numpy()), header.layout
    first = header.first_tensor
    starts = range(first, first + layout.num_tensors * layout.tensor_stride, layout.tensor_stride)
    return [raw[i : i + layout.tensor_bytes] for i in starts]


def verify_all(stored: Stored) -> None:
    """Raises ChunkError where any block of rows is not what was written."""
    image, header = stored
    for idx, rows in enumerate(_all_rows(image, header)):
        if not np.array_equal(_block_checksums(rows, header.layout.block_bytes), header.checksums[idx]):
            raise ChunkError("corrupt", f"a block of tensor {idx} does not match its checksum")


def parse_header(
    read: Callable[[int, int], bytes], num_tokens: int, geometry: KVGeometry, rows_per_block: int,
    identity: ChunkIdentity,
) -> ChunkHeader:  # fmt: skip
    """The header of a file whose bytes read(offset, size) gives, fewer at its end.

    Nothing in the file is trusted: its header must equal, byte by byte, the one this program would write.
    Raises ChunkError (truncated, corrupt, foreign).
    """
    data_start = 8 + int.from_bytes(read(0, 8), "little")
    if data_start > MAX_HEADER_BYTES:
        raise ChunkError("corrupt", f"the header claims {data_start} bytes")
    head = read(0, data_start)
    if len(head) < data_start or data_start == 8:
        raise ChunkError("truncated", f"{len(head)} bytes, the header alone claims {data_start}")
    metadata = _metadata(head[8:])
    expected = {"format": "qcfuse-chunk", "version": FORMAT_VERSION, "kind": identity.kind, "content": identity.content,
                "model_key": identity.model_key, "anchor_key": identity.anchor_key,
                "rows_per_block": str(rows_per_block)}
    for name, value in expected.items():
        if metadata.get(name) != value:
            raise ChunkError("foreign", f"{name} is {str(metadata.get(name))[:80]!r}, not {value!r}")
    layout = ChunkLayout(geometry=geometry, num_tokens=num_tokens, rows_per_block=rows_per_block,
                         num_orders=1 if metadata.get("num_orders") == "1" else geometry.num_layers - 1)
    checksums, order_checksum = _checksums(metadata, layout)
    if head != _build_header(layout, identity, checksums, order_checksum):
        raise ChunkError("foreign", "the tensors are laid out for another model or number of head groups")
    if len(read(data_start + layout.data_bytes - 1, 2)) != 1:
        raise ChunkError("truncated", f"the file does not end at {data_start + layout.data_bytes} bytes")
    raw_order = read(data_start, layout.order_bytes)
    if xxhash.xxh3_64_intdigest(raw_order) != order_checksum:
        raise ChunkError("corrupt", "the row order does not match its checksum")
    order = np.frombuffer(raw_order, "<i8").astype(np.int64)
    order = order if layout.num_orders == 1 else order.reshape(layout.num_orders, num_tokens)
    return ChunkHeader(layout=layout, data_start=data_start, checksums=checksums, order=order)


def _metadata(text: bytes) -> dict[str, str]:
    try:
        metadata = json.loads(text)["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ChunkError("corrupt", "the header is not that of a safetensors file") from None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ChunkError("corrupt", "the metadata is not a table of strings")
    return metadata


def _checksums(metadata: dict[str, str], layout: ChunkLayout) -> tuple[np.ndarray, int]:
    try:
        raw = base64.b64decode(metadata.get("checksums", ""), validate=True)
        checksums = np.frombuffer(raw, "<u8").astype(np.uint64).reshape(layout.num_tensors, layout.num_blocks)
        return checksums, int(metadata.get("order_checksum", ""), 16) & 0xFFFFFFFFFFFFFFFF
    except ValueError:  # binascii.Error is one
        raise ChunkError("foreign", f"the checksums are not those of a chunk of {layout.num_tokens} tokens") from None
