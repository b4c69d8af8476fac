"""Compile tier: every kernel as its launcher starts it, to sm_80 and sm_90 cubins, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "outputs/bench/compiled_kernels.json"
SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""What a block may ask for (CUDA programming guide, compute capabilities)."""

REGISTERS_PER_BLOCK = 65536
MATRIX_KERNELS = ("attend_kernel", "lse_kernel", "importance_kernel")
PIPELINED = ("attend_kernel", "lse_kernel")


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Resources of every kernel; compiled in a process without TRITON_INTERPRET, and recorded in outputs/bench."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(Path(__file__).with_name("compile_worker.py"))]
    finished = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(finished.stdout)
    return json.loads(finished.stdout)["results"]


def label(entry: dict[str, Any]) -> str:
    return f"{entry['model']} {entry['case']} {entry['kernel']} sm_{entry['capability']}"


def test_every_kernel_has_a_cubin_for_both_targets(compiled):
    kernels = {(entry["kernel"], entry["capability"]) for entry in compiled if entry["cubin_bytes"] > 0}
    names = (*MATRIX_KERNELS, "merge_kernel", "place_kernel")
    assert kernels == {(name, capability) for name in names for capability in SHARED_LIMIT_BYTES}
    assert {entry["model"] for entry in compiled} == {"qwen3_8b", "smollm2"}


def test_shared_memory_fits_the_device(compiled):
    too_much = {
        label(entry): entry["shared_bytes"] for entry in compiled
        if entry["shared_bytes"] > SHARED_LIMIT_BYTES[entry["capability"]]
    }
    assert not too_much


def test_registers_fit_and_nothing_spills(compiled):
    spilled = {label(entry): entry["stack_bytes"] for entry in compiled if entry["stack_bytes"]}
    assert not spilled
    too_many = {
        label(entry): entry["registers"] for entry in compiled
        if not 0 < entry["registers"] * entry["num_warps"] * 32 <= REGISTERS_PER_BLOCK
    }
    assert not too_many


def test_products_run_on_the_matrix_unit(compiled):
    """wgmma on sm_90 wherever a tile has the 64 rows it needs; a handful of rows take mma."""
    expected = {
        label(entry): "mma" if entry["capability"] < 90 or entry["case"] == "few_rows" else "wgmma"
        for entry in compiled if entry["kernel"] in MATRIX_KERNELS
    }
    assert {label(e): e["matrix_unit"] for e in compiled if e["kernel"] in MATRIX_KERNELS} == expected


def test_memory_moves_sixteen_bytes_at_a_time(compiled):
    """An offset of unknown alignment (a head stride, an address out of a table) would break loads into pieces."""
    narrow = {
        label(entry): (entry["load_bits"], entry["async_copy_bytes"]) for entry in compiled
        if entry["load_bits"] < 128 or (entry["kernel"] in PIPELINED and entry["async_copy_bytes"] < 16)
    }
    assert not narrow
