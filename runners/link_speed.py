"""How fast a cell's storage link is set: as given, or compute-matched to a published set-up on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qcfuse.engine.base import Arm, Engine
from qcfuse.selectors.endpoints import FullPrefill
from qcfuse.store.match import matched_bandwidth
from qcfuse.types import Request
from runners.cell import Cell
from runners.cell_dir import write_atomic

REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """nominal: `bandwidth` as configured; gb_per_s: what the link is throttled to (None: as fast as the device goes);
    description: for outputs and axes, None where there is no link to describe."""

    nominal_gb_per_s: float | None
    gb_per_s: float | None
    description: str | None

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def link_speed(cell: Cell, engine: Engine, request: Request) -> LinkSpeed:
    """request: the one whose full prefill is measured on this machine where the bandwidth is compute-matched."""
    return scaled_speed(cell, engine, request, cell.bandwidth)


def scaled_speed(cell: Cell, engine: Engine, request: Request, nominal: float | None) -> LinkSpeed:
    """The same for a bandwidth other than the cell's, in GB/s."""
    storage = cell.storage
    if nominal is None:
        return LinkSpeed(nominal_gb_per_s=None, gb_per_s=None, description=None)
    if storage.match is None:
        return LinkSpeed(nominal_gb_per_s=nominal, gb_per_s=nominal, description=f"{nominal:g} GB/s")
    matched = matched_bandwidth(
        storage.presets[storage.match],
        nominal,
        kv_bytes=engine.kv_bytes(request.num_context_tokens),
        prefill_s=measured_prefill_s(engine, request, Path(cell.output_dir, "match")),
    )
    return LinkSpeed(nominal_gb_per_s=nominal, gb_per_s=matched.gb_per_s, description=matched.describe())


def measured_prefill_s(engine: Engine, request: Request, directory: Path) -> float:
    """Median seconds of the faster full-prefill arm, measured once per model, thread count and length, then kept: cells
    of one figure must stand for one ratio of load to compute."""
    num_tokens, threads = request.num_context_tokens, torch.get_num_threads()
    path = directory / f"{engine.name}-{engine.reference_key}-{threads}threads-{num_tokens}tokens.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["prefill_s"]
    arm = Arm(selector=FullPrefill(), rho=1.0, seed=0)
    timings = [engine.time(request, arm, decode=False) for _ in range(REPEATS + 1)][1:]
    raw = {name: [timing.arms[name]["ttft_s"] for timing in timings] for name in timings[0].arms}
    prefill_s = min(median(values) for values in raw.values())
    directory.mkdir(parents=True, exist_ok=True)
    found = {"prefill_s": prefill_s, "num_context_tokens": num_tokens, "threads": threads, "raw": raw}
    write_atomic(path, json.dumps(found, indent=1) + "\n")
    return prefill_s
