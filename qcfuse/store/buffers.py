"""Reusable page-aligned memory for rows on their way from a link to the fused cache."""

from __future__ import annotations

import threading

import torch

from qcfuse.store.context import ContextRows
from qcfuse.store.geometry import PAGE_BYTES, round_up


class BufferPool:
    """Buffers are kept and handed out again; all together never exceed limit_bytes. pinned: for copies to CUDA."""

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self._limit_bytes = limit_bytes
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._held_bytes = 0
        self._changed = threading.Condition()

    def acquire(self, num_bytes: int, *, wait: bool = True) -> torch.Tensor | None:
        """uint8 [>= num_bytes], page-aligned, contents undefined; while other buffers fill the limit it waits, or
        returns None.

        Raises ValueError where num_bytes alone is above the limit.
        """
        size = round_up(num_bytes, PAGE_BYTES)
        if size > self._limit_bytes:
            raise ValueError(f"a buffer of {size / 1e9:.3f} GB is above the limit of {self._limit_bytes / 1e9:.3f} GB; "
                             "raise storage.buffer_gb")
        with self._changed:
            while True:
                fits = [i for i, buffer in enumerate(self._free) if buffer.numel() >= size]
                if fits:
                    return self._free.pop(min(fits, key=lambda i: self._free[i].numel()))
                while self._free and self._held_bytes + size > self._limit_bytes:
                    self._held_bytes -= self._free.pop().numel()
                if self._held_bytes + size <= self._limit_bytes:
                    self._held_bytes += size
                    break
                if not wait:
                    return None
                self._changed.wait()
        # Outside the lock: the first touch of fresh pages takes time.
        raw = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
        start = -raw.data_ptr() % PAGE_BYTES
        return raw[start : start + size]

    def release(self, buffer: torch.Tensor) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    @property
    def held_bytes(self) -> int:
        """Bytes in use and kept for reuse."""
        with self._changed:
            return self._held_bytes


class LayerBuffer:
    """K and V rows of one layer, as ContextRows numbers them. Rows that were not read are undefined."""

    def __init__(self, pool: BufferPool, rows: ContextRows, memory: torch.Tensor | None = None) -> None:
        """memory: of at least `size(rows)` bytes, from the pool; None waits for it."""
        self._pool = pool
        self._part_bytes = rows.num_rows * rows.geometry.row_bytes
        self.memory = pool.acquire(self.size(rows)) if memory is None else memory
        shape = (rows.num_rows, rows.geometry.group_heads, rows.geometry.head_dim)
        dtype = getattr(torch, rows.geometry.dtype)
        self.k, self.v = (self.memory[i * self._part_bytes : (i + 1) * self._part_bytes].view(dtype).view(shape)
                          for i in (0, 1))

    @classmethod
    def when_free(cls, pool: BufferPool, rows: ContextRows) -> LayerBuffer | None:
        """One that fits the limit right now, or None."""
        memory = pool.acquire(cls.size(rows), wait=False)
        return None if memory is None else cls(pool, rows, memory)

    @staticmethod
    def size(rows: ContextRows) -> int:
        """Bytes of K and V of one layer."""
        return 2 * rows.num_rows * rows.geometry.row_bytes

    def part_start(self, part: int) -> int:
        return part * self._part_bytes

    def release(self) -> None:
        self._pool.release(self.memory)
