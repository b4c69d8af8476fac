"""Opening, reading and atomically writing the images of chunk files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from qcfuse.store.chunk_file import ChunkError

TEMPORARY_SUFFIX = ".tmp"


def open_file(path: Path) -> int:
    """A read-only descriptor; the caller closes it. Raises ChunkError where there is no such file."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as err:
        raise ChunkError("missing", str(err.strerror)) from None


def read_image(fd: int) -> torch.Tensor:
    """The whole file as one uint8 tensor, unverified."""
    image = np.empty(os.fstat(fd).st_size, np.uint8)
    view, done = memoryview(image), 0
    while done < len(view):
        num_bytes = os.preadv(fd, [view[done:]], done)
        if num_bytes == 0:
            raise ChunkError("truncated", f"{done} bytes, and it shrank while it was read")
        done += num_bytes
    return torch.from_numpy(image)


def file_reader(fd: int) -> Callable[[int, int], bytes]:
    return lambda offset, size: os.pread(fd, size, offset)


def write_atomically(path: Path, image: torch.Tensor) -> None:
    """Readers see the whole file or none: temporary name, fsync, rename, fsync of the directory. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            rest = memoryview(image.numpy())
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync_directory(path.parent)


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
