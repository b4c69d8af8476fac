"""Where a link reads from: a chunk file (page cache bypassed or dropped) or a chunk image in memory."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from qcfuse.store import file_io
from qcfuse.store.chunk_file import ChunkError, ChunkHeader, Stored
from qcfuse.store.geometry import PAGE_BYTES


class Source(ABC):
    """One chunk, open for reading. Offsets count from the start of the file."""

    header: ChunkHeader
    page_bytes: int
    """Reads must start and end on multiples of this."""
    is_verified: bool
    """Whether every row has been checked already (an image is, when it enters memory)."""

    @abstractmethod
    def read(self, offset: int, target: memoryview) -> None:
        """Fills target; without the GIL for long reads. Raises ChunkError where the bytes are not there."""

    @abstractmethod
    def close(self) -> None: ...


class MemorySource(Source):
    page_bytes = 1
    is_verified = True

    def __init__(self, stored: Stored) -> None:
        self.header = stored.header
        self._image = stored.image
        self._start = stored.image.data_ptr()

    def read(self, offset: int, target: memoryview) -> None:
        assert offset + len(target) <= self._image.numel()
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), self._start + offset, len(target))

    def close(self) -> None:
        self._image = torch.empty(0, dtype=torch.uint8)


class FileSource(Source):
    """Keeps its descriptor: a file that is evicted meanwhile stays readable until close."""

    is_verified = False

    def __init__(self, path: Path, header: ChunkHeader, *, direct: bool) -> None:
        self.header = header
        self._fd, self.is_direct = _open(path, direct)
        self.page_bytes = PAGE_BYTES if self.is_direct else 1
        if not self.is_direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            try:
                num_bytes = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as err:
                raise ChunkError("corrupt", f"read of {len(target)} bytes at {offset}: {err.strerror}") from None
            if num_bytes == 0:
                raise ChunkError("truncated", f"{offset + done} bytes, {len(target) - done} more were due")
            done += num_bytes
        if not self.is_direct:
            os.posix_fadvise(self._fd, offset, len(target), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
        except OSError:  # no O_DIRECT on this file system, or no such file: the plain open tells which
            pass
    return file_io.open_file(path), False
