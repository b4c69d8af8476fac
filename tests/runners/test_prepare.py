"""runner=prepare: a killed run leaves nothing half-written, the next one finishes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from runners.cell import Cell
from runners.dispatch import Engines, build_requests
from tests.runners.conftest import ROOT, composed, run_here


def test_kill_9_in_the_middle_of_prepare_then_the_same_command(tiny_cell, tmp_path, capsys):
    job = [*(o for o in tiny_cell if not o.startswith("runner")), "runner=prepare", "limit=20", "storage=disk"]
    process = subprocess.Popen([sys.executable, "run.py", *job], cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "store").glob("*/*/*/*.safetensors"))) < 5:
        assert process.poll() is None and time.monotonic() < deadline, "no chunk was stored"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = set((tmp_path / "store").glob("*/*/*/*.safetensors"))
    run_here(job)
    assert not list((tmp_path / "store").rglob("*.tmp"))
    assert left <= set((tmp_path / "store").glob("*/*/*/*.safetensors"))
    cell = Cell.of(*composed(job))
    engine = Engines().of(cell)
    for request in build_requests(cell, engine):
        assert engine.prepare(request) == 0
        assert all(engine.store.get(ids) is not None for ids in request.chunk_ids), "every row carries its checksum"
    capsys.readouterr()
    run_here(job)
    assert "0 caches made for 20 samples" in capsys.readouterr().out


def test_prepare_needs_a_tier_that_lasts(tiny_cell):
    job = [*(o for o in tiny_cell if not o.startswith("runner")), "runner=prepare", "storage=ram"]
    with pytest.raises(ValueError, match="storage=ram would be lost"):
        run_here(job)
