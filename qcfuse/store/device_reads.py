"""From blocks of a plan to the operations of a link: whole pages, neighbours joined, long ones cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qcfuse.store.chunk_file import ChunkHeader
from qcfuse.store.context import ContextRows
from qcfuse.store.planner import Step


def device_reads(
    step: Step, rows: ContextRows, headers: Sequence[ChunkHeader], *, group: int, page_bytes: int, max_op_bytes: int
) -> np.ndarray:
    """[R, 4] int64, one row an operation: distinct chunk, file offset, bytes, target offset in the layer's buffer.

    page_bytes: 4,096 for direct reads, 1 where any byte may be asked for. The runs of a step ascend, so do these.
    Chunks start on whole pages of both the file's tensors and the buffer, so source and target share their alignment.
    """
    if not len(step.runs):
        return np.empty((0, 4), np.int64)
    part, first, end = step.runs.T
    chunk = rows.block_chunk[first]
    row_bytes, per_block = rows.geometry.row_bytes, rows.rows_per_block
    base = rows.row_base[chunk]
    start = (first * per_block - base) * row_bytes
    stop = np.minimum(end * per_block - base, np.asarray(rows.num_tokens)[chunk]) * row_bytes
    start, stop = start // page_bytes * page_bytes, -(-stop // page_bytes) * page_bytes
    strides = np.array([header.layout.tensor_stride for header in headers])
    tensor_start = np.array([header.first_tensor for header in headers])[chunk]
    tensor_start += (part + headers[0].layout.tensor_index(0, step.layer, group)) * strides[chunk]
    target_start = (part * rows.num_rows + base) * row_bytes
    joins = np.zeros(len(start), bool)
    joins[1:] = (chunk[1:] == chunk[:-1]) & (part[1:] == part[:-1]) & (start[1:] <= stop[:-1])
    firsts = np.nonzero(~joins)[0]
    lasts = np.append(firsts[1:], len(start)) - 1
    ops = np.column_stack([chunk[firsts], tensor_start[firsts] + start[firsts], stop[lasts] - start[firsts],
                           target_start[firsts] + start[firsts]])
    return _cut(ops, max_op_bytes)


def of_another_layer(ops: np.ndarray, headers: Sequence[ChunkHeader], num_layers: int) -> np.ndarray:
    """The operations of the same runs num_layers layers deeper (or higher, where it is negative)."""
    per_layer = [2 * header.layout.geometry.head_groups * header.layout.tensor_stride for header in headers]
    moved = ops.copy()
    moved[:, 1] += num_layers * np.array(per_layer)[ops[:, 0]]
    return moved


def _cut(ops: np.ndarray, max_op_bytes: int) -> np.ndarray:
    pieces = -(-ops[:, 2] // max_op_bytes)
    cut = np.repeat(ops, pieces, axis=0)
    nth = np.arange(len(cut)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut[:, 1] += nth * max_op_bytes
    cut[:, 3] += nth * max_op_bytes
    cut[:, 2] = np.minimum(cut[:, 2] - nth * max_op_bytes, max_op_bytes)
    return cut
