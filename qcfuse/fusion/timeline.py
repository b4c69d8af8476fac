"""One monotonic clock for everything a request waits for: spans, stages that add up to TTFT, a Chrome trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from qcfuse.types import STAGES


@dataclass(frozen=True)
class Span:
    """kind: a stage of the compute thread, or what a link reads. Times in seconds on one monotonic clock."""

    kind: str
    start_s: float
    end_s: float
    layer: int | None = None
    num_bytes: int = 0
    thread: str = "compute"


class Timeline:
    """The compute thread is in one stage at a time: `to` ends the stage before it, so stages partition the time.

    sync: called before each clock reading, to make a device's queued work count where it was issued.
    program: what the request did, in order, for a replay on another clock: ("run", stage, seconds, layer),
    ("submit", transfer, bytes), ("need", transfer).
    """

    def __init__(self, sync: Callable[[], None] | None = None) -> None:
        self._sync = sync
        self._stage: tuple[str, int | None] | None = None
        self.spans: list[Span] = []
        self.program: list[tuple[str, Any, Any, int | None]] = []
        self.start_s = self._since = self._logged_upto = self._now()
        self.end_s: float | None = None

    def to(self, stage: str, layer: int | None = None) -> None:
        assert stage in STAGES, stage
        self._close(self._now())
        self._stage = (stage, layer)

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """A stage inside another one, which goes on afterwards."""
        before = self._stage
        self.to(stage)
        yield
        if before is not None:
            self.to(*before)

    def submitted(self, transfer: int, num_bytes: int) -> None:
        """A read was handed to the link."""
        self._log_run(self._now())
        self.program.append(("submit", transfer, num_bytes, None))

    def withdrawn(self, transfer: int) -> None:
        """A read that was handed over has been dropped: the link never ran it."""
        self.program.remove(next(e for e in self.program if e[:2] == ("submit", transfer)))

    def needed(self, transfer: int) -> None:
        """What follows uses the rows of a read."""
        self._log_run(self._now())
        self.program.append(("need", transfer, None, None))

    def finish(self) -> float:
        """Ends the last stage; returns the seconds since the request arrived (TTFT)."""
        self.end_s = self._now()
        self._close(self.end_s)
        return self.end_s - self.start_s

    def stages_s(self) -> dict[str, float]:
        """Seconds of the compute thread by stage; every stage is named, unused ones are 0."""
        stages = dict.fromkeys(STAGES, 0.0)
        for span in self.spans:
            if span.thread == "compute":
                stages[span.kind] += span.end_s - span.start_s
        return stages

    def chrome_trace(self, **metadata: object) -> dict[str, object]:
        """Chrome trace format (microseconds from arrival), for chrome://tracing or Perfetto."""
        threads = {name: i for i, name in enumerate(dict.fromkeys(span.thread for span in self.spans))}
        names = [
            {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": t}} for t, i in threads.items()
        ]
        events = [
            {
                "ph": "X", "pid": 0, "tid": threads[span.thread], "cat": span.thread,
                "name": span.kind if span.layer is None else f"{span.kind} {span.layer}",
                "ts": round((span.start_s - self.start_s) * 1e6, 1), "dur": round((span.end_s - span.start_s) * 1e6, 1),
                "args": {"kind": span.kind, "layer": span.layer, "bytes": span.num_bytes},
            }
            for span in self.spans
        ]  # fmt: skip
        return {"traceEvents": names + events, "displayTimeUnit": "ms", "metadata": metadata}

    def _now(self) -> float:
        if self._sync is not None:
            self._sync()
        return time.monotonic()

    def _close(self, now: float) -> None:
        if self._stage is not None:
            stage, layer = self._stage
            self._log_run(now)
            self.spans.append(Span(stage, self._since, now, layer))
        self._since = self._logged_upto = now
        self._stage = None

    def _log_run(self, now: float) -> None:
        """The part of the stage that has passed since the program's last entry."""
        if self._stage is not None:
            stage, layer = self._stage
            self.program.append(("run", stage, now - self._logged_upto, layer))
            self._logged_upto = now
