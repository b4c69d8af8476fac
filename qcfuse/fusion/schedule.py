"""The schedule bound: a request's own program replayed on a clock without overhead (design: pipeline)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

OVERHEAD = frozenset({"queue", "engine", "wait_prefix", "wait_select", "wait_layer"})
"""Stages that a perfect pipeline spends no time in: waits follow from the replayed link, planning costs nothing."""


def schedule_bound_s(
    program: Iterable[tuple[str, Any, Any, int | None]],
    *,
    bytes_per_s: float | None,
    latency_s: float = 0.0,
    stage_s: Mapping[tuple[str, int | None], float] | None = None,
) -> float:
    """Seconds to the first token if the link ran at its setting and nothing but reads and operations took time.

    program: of a Timeline. bytes_per_s: None for a link that takes no time. stage_s: durations of (stage, layer) that
    stand for the program's own, for instance those of a run without a link; they apply once each.
    """
    now_s = free_s = 0.0
    done_s: dict[int, float] = {}
    left = dict(stage_s) if stage_s is not None else None
    for event, what, value, layer in program:
        if event == "submit":
            start_s = max(free_s, now_s + latency_s)
            free_s = done_s[what] = start_s + (value / bytes_per_s if bytes_per_s else 0.0)
        elif event == "need":
            now_s = max(now_s, done_s[what])
        elif what not in OVERHEAD:
            now_s += value if left is None else left.pop((what, layer), 0.0)
    return now_s
