"""A storage link: loader threads that execute planned reads in order, at the set bandwidth, off the compute thread."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qcfuse.store.buffers import LayerBuffer
from qcfuse.store.chunk_file import ChunkError
from qcfuse.store.config import GB
from qcfuse.store.context import ContextRows
from qcfuse.store.device_reads import device_reads, of_another_layer
from qcfuse.store.planner import Step
from qcfuse.store.sources import Source
from qcfuse.store.throttle import LinkConfig, Throttle

log = logging.getLogger(__name__)

PR_SET_TIMERSLACK = 29
SHORTEST_SLEEP_S = 2e-4
"""An operation may be done this much ahead of the line: shorter sleeps overshoot by about as much, and the time line
(see Throttle) keeps the average."""


class Transfer:
    """The reads of one step (ops: see device_reads).

    After `wait`: start_s, end_s on time.monotonic's clock, device_bytes, failed chunks.
    """

    def __init__(self, step: Step, buffer: LayerBuffer, sources: Sequence[Source], ops: np.ndarray,
                 verify: Callable[[], dict[int, ChunkError]]) -> None:  # fmt: skip
        self.step = step
        self.requested_bytes = step.requested_bytes
        self.device_bytes = int(ops[:, 2].sum())
        self.submitted_s = 0.0
        self.start_s: float | None = None
        self.end_s = 0.0
        self.failed: dict[int, ChunkError] = {}
        self.is_cancelled = False
        self._memory = memoryview(buffer.memory.numpy())
        self._sources = sources
        self.ops = ops
        self._ops = ops.tolist()
        self._pending = len(ops)
        self._verify = verify
        self._done = threading.Event()
        if not self._ops:
            self._done.set()

    @property
    def num_ops(self) -> int:
        return len(self._ops)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> dict[int, ChunkError]:
        """Blocks until all rows are in the buffer; the distinct chunks that must be recomputed, and why."""
        self._done.wait()
        return self.failed

    def _read(self, idx: int) -> None:
        chunk, offset, num_bytes, target = self._ops[idx]
        try:
            self._sources[chunk].read(offset, self._memory[target : target + num_bytes])
        except ChunkError as err:
            self.failed[chunk] = err

    def _finish_one(self, done_s: float) -> bool:
        self.end_s = max(self.end_s, done_s)
        self._pending -= 1
        return self._pending == 0


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """busy_s counts from the first operation of a busy spell to the end of its last. reached: within warn_below of the
    setting, None where the link is unthrottled or has moved nothing. setting: GB/s as set, None for unthrottled."""

    num_bytes: int
    busy_s: float
    gb_per_s: float | None
    setting_gb_per_s: float | None
    reached: bool | None


class Link:
    """Threads start with the first transfer and end with `close`. Decided steps go in order of submission; speculative
    ones run only while no decided operation waits."""

    def __init__(self, config: LinkConfig) -> None:
        self.config = config
        bytes_per_s = config.bandwidth_gb_per_s * GB if config.bandwidth_gb_per_s else None
        self._throttle = Throttle(bytes_per_s=bytes_per_s, latency_s=config.latency_s, window_s=config.window_s)
        self._decided: deque[tuple[Transfer, int]] = deque()
        self._speculative: deque[tuple[Transfer, int]] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self._in_flight = 0
        self._busy_since_s = 0.0
        self._busy_until_s = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0
    def prepare(
        self, step: Step, rows: ContextRows, sources: Sequence[Source], buffer: LayerBuffer, *, group: int = 0,
        like: Transfer | None = None,
    ) -> Transfer:  # fmt: skip
        """Lays out a step's reads into its layer's buffer. sources: one per distinct chunk, open until it is done.

        like: an earlier transfer of the same rows, sources and group; where its runs are the same ones, its layout is
        moved instead of made anew.
        """
        headers = [source.header for source in sources]
        if like is not None and like.step.runs is step.runs:
            ops = of_another_layer(like.ops, headers, step.layer - like.step.layer)
        else:
            page_bytes = max(source.page_bytes for source in sources)
            ops = device_reads(step, rows, headers, group=group, page_bytes=page_bytes,
                               max_op_bytes=self.config.max_op_bytes)
        verify = lambda: _verify(step, rows, sources, buffer, group) if self.config.verify else {}  # noqa: E731
        return Transfer(step, buffer, sources, ops, verify)

    def submit(
        self, step: Step, rows: ContextRows, sources: Sequence[Source], buffer: LayerBuffer, *, group: int = 0,
        like: Transfer | None = None,
    ) -> Transfer:  # fmt: skip
        """Prepares and starts a step's reads."""
        return self.start(self.prepare(step, rows, sources, buffer, group=group, like=like))

    def start(self, transfer: Transfer) -> Transfer:
        """Queues a prepared transfer."""
        queue = self._speculative if transfer.step.phase == "speculate" else self._decided
        with self._changed:
            assert not self._is_closing, "the link is closed"
            transfer.submitted_s = transfer.end_s = time.monotonic()
            if not self._threads:
                self._start_threads()
            queue.extend((transfer, idx) for idx in range(transfer.num_ops))
            self._changed.notify(transfer.num_ops)
        return transfer

    def drop_speculation(self) -> list[Step]:
        """Cancels speculative steps of which nothing has been read yet and returns them; the others will complete,
        ahead of what is decided later."""
        with self._changed:
            waiting = list(self._speculative)
            self._speculative.clear()
            begun = [item for item in waiting if item[0].start_s is not None]
            self._decided.extendleft(reversed(begun))
            dropped = {id(transfer): transfer for transfer, _ in waiting if transfer.start_s is None}
            for transfer in dropped.values():
                transfer.is_cancelled = True
                transfer._done.set()
        return [transfer.step for transfer in dropped.values()]

    def report(self) -> LinkReport:
        """What the link has moved since it was made; says whether the device reached the setting."""
        with self._changed:
            open_s = max(0.0, self._busy_until_s - self._busy_since_s) if self._in_flight else 0.0
            busy_s, num_bytes = self._busy_s + open_s, self._num_bytes
        speed = num_bytes / busy_s / GB if busy_s > 0 else None
        setting = self.config.bandwidth_gb_per_s
        reached = None if setting is None or speed is None else speed >= self.config.warn_below * setting
        if reached is False:
            log.warning("the link reached %.3f of %.3f GB/s: the device, or this machine's load, is the limit", speed,
                        setting)
        return LinkReport(num_bytes=num_bytes, busy_s=busy_s, gb_per_s=speed, setting_gb_per_s=setting, reached=reached)

    def close(self) -> None:
        """Finishes what is queued, then ends the loader threads."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_threads(self) -> None:
        for idx in range(self.config.queue_depth):
            thread = threading.Thread(target=self._load, name=f"link-{idx}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _load(self) -> None:
        _allow_short_sleeps()
        previous_done_s = 0.0
        while (item := self._next(previous_done_s)) is not None:
            transfer, idx, due_s = item
            transfer._read(idx)
            wait_s = due_s - time.monotonic()
            if wait_s > SHORTEST_SLEEP_S:
                time.sleep(wait_s)
            previous_done_s = due_s if self.config.bandwidth_gb_per_s or self.config.latency_s else time.monotonic()
            self._finish(transfer, idx, time.monotonic())

    def _next(self, previous_done_s: float) -> tuple[Transfer, int, float] | None:
        with self._changed:
            while not self._decided and not self._speculative:
                if self._is_closing:
                    return None
                self._changed.wait()
            transfer, idx = (self._decided or self._speculative).popleft()
            now_s = time.monotonic()
            num_bytes = transfer._ops[idx][2]
            if self._in_flight == 0:
                self._busy_since_s = max(transfer.submitted_s, self._busy_until_s)
            self._in_flight += 1
            if transfer.start_s is None:
                transfer.start_s = now_s
            due_s = self._throttle.book(num_bytes, submitted_s=transfer.submitted_s, previous_done_s=previous_done_s,
                                        now_s=now_s)
            return transfer, idx, due_s

    def _finish(self, transfer: Transfer, idx: int, done_s: float) -> None:
        with self._changed:
            is_last = transfer._finish_one(done_s)
            self._num_bytes += transfer._ops[idx][2]
            self._in_flight -= 1
            self._busy_until_s = done_s
            if self._in_flight == 0:
                self._busy_s += done_s - self._busy_since_s
        if is_last:
            transfer.failed.update(transfer._verify())
            transfer._done.set()


def _verify(step: Step, rows: ContextRows, sources: Sequence[Source], buffer: LayerBuffer, group: int
            ) -> dict[int, ChunkError]:  # fmt: skip
    """Checks every block that was read from storage: the chunks with a block that is not what was written."""
    memory, row_bytes, failed = memoryview(buffer.memory.numpy()), rows.geometry.row_bytes, {}
    for part, first, end in step.runs.tolist():
        chunk = int(rows.block_chunk[first])
        if sources[chunk].is_verified:
            continue
        base = int(rows.row_base[chunk])
        last_row = min(end * rows.rows_per_block, base + rows.num_tokens[chunk])
        start = buffer.part_start(part) + first * rows.rows_per_block * row_bytes
        found = memory[start : buffer.part_start(part) + last_row * row_bytes]
        if not sources[chunk].header.verify(found, part, step.layer, group, first - base // rows.rows_per_block):
            failed[chunk] = ChunkError("corrupt", f"layer {step.layer}: a block of rows does not match its checksum")
    return failed


def _allow_short_sleeps() -> None:
    """Linux rounds a thread's sleeps up by 50 microseconds unless told otherwise: 5% of 1 MB at 1 GB/s."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (AttributeError, OSError):  # not Linux: later wake-ups, still repaid
        pass
