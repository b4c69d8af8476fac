"""The clock of a link of limited speed: when each transfer of a busy link would be done."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """A storage link. bandwidth_gb_per_s: GB of 1e9 bytes per second, null for as fast as the device goes.

    latency_s: of every operation; queue_depth: operations in flight (loader threads), which overlap their latencies.
    window_s: how far the link may run behind its schedule (late wake-ups, a busy machine) and still catch up.
    max_op_bytes: longest single operation. direct: auto (bypass the page cache where the file system can, else drop
    what was read) or never (drop only). verify: check block checksums. warn_below: share of the bandwidth below
    which the link reports that the device did not reach the setting.
    """

    bandwidth_gb_per_s: float | None
    latency_s: float
    queue_depth: int
    window_s: float
    max_op_bytes: int
    direct: str
    verify: bool
    warn_below: float

    def __post_init__(self) -> None:
        if self.bandwidth_gb_per_s is not None and not self.bandwidth_gb_per_s > 0:
            raise ValueError(f"bandwidth={self.bandwidth_gb_per_s} GB/s must be above 0, or null for an "
                             "unthrottled link")
        if not 0 <= self.latency_s < 10 or not 0 < self.window_s <= 1:
            raise ValueError(f"latency_s={self.latency_s} must lie in [0, 10) and window_s={self.window_s} in (0, 1] "
                             "seconds")
        if not 1 <= self.queue_depth <= 64:
            raise ValueError(f"queue_depth={self.queue_depth}; 1 to 64 loader threads, 2 to 4 are usual")
        if self.max_op_bytes < 4096 or self.max_op_bytes % 4096:
            raise ValueError(f"max_op_bytes={self.max_op_bytes} must be a multiple of 4096")
        if self.direct not in ("auto", "never"):
            raise ValueError(f"direct={self.direct!r}; use auto or never")
        if not 0 < self.warn_below <= 1:
            raise ValueError(f"warn_below={self.warn_below} must lie in (0, 1]")


class Throttle:
    """A serial line behind parallel requests: bytes go one after another, latencies of different requests overlap.

    Operations are booked on the nominal time line, so a late wake-up shortens the next wait instead of adding up; a
    lag of more than window_s is forgotten, and an idle link saves up nothing.
    """

    def __init__(self, *, bytes_per_s: float | None, latency_s: float, window_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._window_s = window_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def book(self, num_bytes: int, *, submitted_s: float, previous_done_s: float, now_s: float) -> float:
        """When an operation that a loader starts at now_s is done. All times on one monotonic clock, in seconds.

        submitted_s: when it was asked for; previous_done_s: nominal end of the loader's previous operation.
        """
        with self._lock:
            issued_s = max(submitted_s, previous_done_s, now_s - self._window_s)
            transfer_s = num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
            self._free_at_s = max(issued_s + self._latency_s, self._free_at_s) + transfer_s
            return self._free_at_s
