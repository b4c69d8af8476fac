"""Stages partition the time; the trace is Chrome's format."""

from __future__ import annotations

import json

import pytest

from qcfuse.fusion import timeline as module
from qcfuse.fusion.timeline import Timeline
from qcfuse.types import STAGES


@pytest.fixture
def ticking(monkeypatch) -> Timeline:
    """A timeline on a clock that moves 1 s a reading."""
    ticks = iter(range(1000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(ticks)))
    return Timeline()


def test_stages_add_up_to_ttft(ticking):
    ticking.to("probe", 0)
    ticking.to("score", 0)
    ticking.to("probe", 1)
    ticking.to("recompute")
    ttft = ticking.finish()
    stages = ticking.stages_s()
    assert set(stages) == set(STAGES)
    assert (stages["probe"], stages["score"], stages["recompute"]) == (2.0, 1.0, 1.0)
    assert sum(stages.values()) == ttft - 1.0, "only the time before the first stage has no name"


def test_an_unknown_stage_is_a_bug(ticking):
    with pytest.raises(AssertionError):
        ticking.to("waiting")


def test_trace_is_chrome_json(ticking):
    ticking.to("probe", 3)
    ticking.finish()
    trace = json.loads(json.dumps(ticking.chrome_trace(ttft_s=1.0)))
    names, span = trace["traceEvents"]
    assert names["ph"] == "M" and names["args"]["name"] == "compute"
    assert (span["ph"], span["name"], span["ts"], span["dur"], span["args"]["layer"]) == ("X", "probe 3", 1e6, 1e6, 3)


def test_a_device_is_synchronised_before_every_reading():
    calls = []
    timeline = Timeline(sync=lambda: calls.append(1))
    timeline.to("probe")
    timeline.finish()
    assert len(calls) == 3
