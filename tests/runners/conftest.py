"""Running the product: in this process (fast) or as a user would (a subprocess)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from qcfuse.config import register
from runners.dispatch import run_configs

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "scale=embedded", "scale.chunk_tokens=100", "scale.num_chunks=6", "dataset.max_new_tokens=6", "logger=none",
    "runner.num_timed=1", "runner.time_decode=false",
)  # fmt: skip


def composed(overrides: Sequence[str]) -> Any:
    GlobalHydra.instance().clear()
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", list(overrides), return_hydra_config=True)
    return config, config.hydra


def run_here(*jobs: Sequence[str]) -> None:
    """The cells of one process, as the grouped launcher would hand them over."""
    run_configs([composed(job) for job in jobs])


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "run.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def read_records(cell: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cell / "records.jsonl").read_text().splitlines()]


@pytest.fixture
def tiny_cell(tiny_dir, tmp_path):
    """Overrides of a small cell on a random-weight Qwen3, with stores and outputs of its own."""
    return [
        "model=qwen3_8b", f"model.path={tiny_dir('qwen3')}", "model.stop_tokens=[]", "dataset=ruler_mq",
        "selector=qcfuse", "selector.layers=[1,2]", f"output_dir={tmp_path / 'out'}",
        f"storage.root={tmp_path / 'store'}", *SMALL,
    ]  # fmt: skip
