"""Images of chunk files in memory, for one process: the RAM tier."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence

from qcfuse.store.chunk_file import Stored


class RamTier:
    """Least recently used images go first; pinned ones stay, even above the capacity."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._images: OrderedDict[str, Stored] = OrderedDict()
        self._pins: Counter[str] = Counter()
        self._lock = threading.Lock()

    def get(self, path: str) -> Stored | None:
        with self._lock:
            if path in self._images:
                self._images.move_to_end(path)
            return self._images.get(path)

    def put(self, path: str, stored: Stored) -> int:
        """Returns how many images had to go, this one included where it does not fit."""
        with self._lock:
            self._images[path] = stored
            self._images.move_to_end(path)
            return self._evict()

    def drop(self, path: str) -> None:
        with self._lock:
            self._images.pop(path, None)

    def pin(self, paths: Sequence[str]) -> None:
        with self._lock:
            self._pins.update(paths)

    def unpin(self, paths: Sequence[str]) -> None:
        with self._lock:
            self._pins.subtract(paths)
            self._pins = +self._pins

    def num_bytes(self) -> int:
        with self._lock:
            return sum(stored.image.numel() for stored in self._images.values())

    def _evict(self) -> int:
        excess = sum(stored.image.numel() for stored in self._images.values()) - self._capacity_bytes
        victims = []
        for path, stored in self._images.items():
            if excess <= 0:
                break
            if path not in self._pins:
                victims.append(path)
                excess -= stored.image.numel()
        for path in victims:
            del self._images[path]
        return len(victims)
