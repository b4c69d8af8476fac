"""Throughput of throttled links against their settings, arms interleaved in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from qcfuse.store.buffers import BufferPool, LayerBuffer
from qcfuse.store.config import GB, StoreConfig
from qcfuse.store.context import ContextRows
from qcfuse.store.geometry import KVGeometry
from qcfuse.store.link import Link
from qcfuse.store.planner import Step
from qcfuse.store.sources import Source
from qcfuse.types import ChunkCache

ROW_BYTES = 2048
TENSOR_BYTES = 8 << 20
"""K or V of a layer: the buffer of a layer is written again and again, as the pipeline's buffers are."""


@dataclass(frozen=True, kw_only=True)
class LinkArm:
    """One link to measure: a tier, its setting in GB/s (None: unthrottled) and the size of each transfer."""

    tier: str
    gb_per_s: float | None
    transfer_bytes: int

    @property
    def name(self) -> str:
        return f"{self.tier}@{self.gb_per_s or 'max'},{self.transfer_bytes >> 20}MiB"


def bench_link(config: StoreConfig, arms: Sequence[LinkArm], *, file_bytes: int, seconds: float, rounds: int) -> dict:
    """Streams transfers of each arm for about `seconds` (of its setting), all arms in turn, `rounds` times.

    Returns arm -> {"raw": GB/s per round, "median", "setting", "error_frac", "reached"}; a throughput counts from the
    submission of the first transfer to the end of the last. Files go to a temporary directory under config's root.
    """
    raw: dict[LinkArm, list[float]] = {arm: [] for arm in arms}
    config.root_path.mkdir(parents=True, exist_ok=True)
    with (tempfile.TemporaryDirectory(dir=config.root_path) as root,
          _sources(config, root, file_bytes) as sources):  # fmt: skip
        for arm in arms:  # one round to warm up: threads, buffers, the file system
            _stream(config, arm, sources[arm.tier], seconds / 4)
        for _ in range(rounds):
            for arm in arms:
                raw[arm].append(_stream(config, arm, sources[arm.tier], seconds))
    return {arm.name: _summary(arm, found, config.link.warn_below) for arm, found in raw.items()}


def _summary(arm: LinkArm, found: list[float], warn_below: float) -> dict:
    median = float(np.median(found))
    error = None if arm.gb_per_s is None else median / arm.gb_per_s - 1
    return {"raw": found, "median": median, "setting": arm.gb_per_s, "error_frac": error,
            "reached": None if error is None else median >= warn_below * arm.gb_per_s}


@contextmanager
def _sources(config: StoreConfig, root: str, file_bytes: int) -> Iterator[dict[str, tuple[Source, ContextRows]]]:
    """The same chunk of file_bytes, once in a file and once in memory."""
    num_tokens = min(TENSOR_BYTES, file_bytes // 2) // ROW_BYTES
    num_stored = file_bytes // 2 // (num_tokens * ROW_BYTES)
    geometry = KVGeometry(num_layers=1 + num_stored, num_kv_heads=1, head_dim=ROW_BYTES // 2, dtype="bfloat16",
                          head_groups=1)  # fmt: skip
    ids = tuple(range(num_tokens))
    shape = (num_stored, num_tokens, 1, ROW_BYTES // 2)
    kv = torch.randint(0, 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
    opened = {}
    for tier in ("disk", "ram"):
        store = replace(config, tier=tier, root=root, disk_gb=4.0, ram_gb=4.0, match=None).open(
            model_key="bench", anchor_key="none", geometry=geometry)
        store.put(ids, ChunkCache(k=kv, v=kv, order=torch.arange(num_tokens)))
        source = store.open(ids)
        assert source is not None, "the chunk that was just written cannot be opened"
        opened[tier] = (source, ContextRows.of(geometry, [ids], [source.header.order], config.rows_per_block))
        store.close()
    try:
        yield opened
    finally:
        for source, _ in opened.values():
            source.close()


def _stream(config: StoreConfig, arm: LinkArm, opened: tuple[Source, ContextRows], seconds: float) -> float:
    source, rows = opened
    pool = BufferPool(4 * GB, pinned=False)
    buffers = [LayerBuffer(pool, rows) for _ in range(2)]  # while one is verified, the other one is written
    for buffer in buffers:
        buffer.memory.zero_()  # fresh pages cost time once, and a reused buffer has none
    link = Link(replace(config.link, bandwidth_gb_per_s=arm.gb_per_s))
    per_transfer = arm.transfer_bytes // ROW_BYTES // rows.rows_per_block
    per_tensor = rows.num_blocks // per_transfer
    count = max(8, int(seconds * (arm.gb_per_s or 1.0) * GB / arm.transfer_bytes))
    steps = []
    for i in range(count):
        tensor, first = i // per_tensor, i % per_tensor * per_transfer
        layer, part = 1 + tensor // 2 % (rows.geometry.num_layers - 1), tensor % 2
        runs = np.array([[part, first, first + per_transfer]])
        steps.append(Step(phase="rest", layer=layer, runs=runs, requested_bytes=arm.transfer_bytes, fill_bytes=0))
    transfers = [link.prepare(step, rows, [source], buffers[step.layer % 2]) for step in steps]
    for transfer in transfers:
        link.start(transfer)
    for transfer in reversed(transfers):  # the last one first: waking up for each would take the loaders' time
        assert not transfer.wait(), transfer.failed
    link.close()
    elapsed_s = max(t.end_s for t in transfers) - transfers[0].submitted_s
    return sum(t.device_bytes for t in transfers) / elapsed_s / GB
