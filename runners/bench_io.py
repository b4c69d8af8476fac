"""Benchmarks of reading: `io` (links against their settings), `pipeline` (settings, bytes and efficiency over a link),
`predict` (the cost model on lengths, bandwidths and ratios that it was not calibrated on)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from qcfuse.engine.base import Arm
from qcfuse.engine.cost import CostModel, Shape
from qcfuse.engine.hf import HFEngine
from qcfuse.fusion.schedule import OVERHEAD, schedule_bound_s
from qcfuse.selectors.base import Selector
from qcfuse.store.bench import LinkArm, bench_link
from qcfuse.store.config import GB, StoreConfig
from qcfuse.types import Request
from runners.calibrate import measure
from runners.cell_dir import write_atomic

LINK_ARMS = [LinkArm(tier="disk", gb_per_s=speed, transfer_bytes=1 << 20) for speed in (0.05, 0.5)] + [
    LinkArm(tier="ram", gb_per_s=speed, transfer_bytes=size << 20) for speed in (3, 5, 7, 10) for size in (1, 8)
]
"""What the link's accuracy is stated for: disk at 0.05 and 0.5 GB/s, memory at 3 to 10 GB/s."""

Match = Callable[[float], float]


def run_io_bench(config: StoreConfig, path: Path, repeats: int, common: dict[str, Any]) -> None:
    """Throughput of throttled links in GB/s; ratios are measured over set."""
    found = bench_link(config, LINK_ARMS, file_bytes=256 << 20, seconds=0.5, rounds=repeats)
    arms = {name: {**_summary(arm["raw"]), "setting": arm["setting"], "reached": arm["reached"]}
            for name, arm in found.items()}  # fmt: skip
    ratios = {f"{name}/setting": arm["median"] / arm["setting"] for name, arm in arms.items()}
    report = {"name": "io", "unit": "GB/s", "n": repeats, **common, "arms": arms, "ratios": ratios}
    write_atomic(path, json.dumps(report, indent=1) + "\n")


def run_pipeline_bench(
    engine: HFEngine, request: Request, selectors: dict[str, Selector], seed: int, path: Path, repeats: int,
    common: dict[str, Any], *, match: Match, rhos: Sequence[float], bandwidths: Sequence[float],
    settings: Sequence[dict[str, Any]],
) -> None:  # fmt: skip
    """TTFT of methods over a link under each reading setting, every setting and the memory run in turn.

    efficiency: schedule bound over TTFT, the bound from the operation times of the run in memory of the same round.
    """
    own = engine.links.config
    arms: dict[str, dict[str, list[Any]]] = {}
    for number in tqdm(range(repeats + 1), desc="pipeline", unit="round"):
        for name, selector in selectors.items():
            for rho in rhos if selector.fixed_rho is None else [selector.fixed_rho]:
                arm = Arm(selector=selector, rho=rho, seed=seed)
                memory = engine.time(request, arm, decode=False)
                _add(arms, f"{name}@{rho:g},memory", number, ttft_s=memory.ttft_s)
                for nominal in bandwidths if selector.fixed_rho != 1.0 else []:
                    for setting in settings:
                        engine.links.config = replace(own, **setting)
                        gb_per_s = match(nominal)
                        timing = engine.time(request, arm, decode=False, gb_per_s=gb_per_s)
                        bound_s = schedule_bound_s(timing.program, bytes_per_s=gb_per_s * GB,
                                                   latency_s=own.link.latency_s, stage_s=_by_layer(memory.program))
                        label = ",".join(f"{key}={value}" for key, value in setting.items())
                        _add(arms, f"{name}@{rho:g},bw={nominal:g},{label}", number, ttft_s=timing.ttft_s,
                             efficiency=bound_s / timing.ttft_s, efficiency_in_run=timing.pipeline_efficiency,
                             overhead_s=timing.stages_s["engine"], bytes=timing.bytes)
    engine.links.config = own
    report = {"name": "pipeline", "unit": "s", "n": repeats, **common,
              "links": {f"{nominal:g}": match(nominal) for nominal in bandwidths},
              "arms": {name: _pipeline_arm(values) for name, values in arms.items()}, "ratios": {}}  # fmt: skip
    write_atomic(path, json.dumps(report, indent=1) + "\n")


def run_predict_bench(
    engine: HFEngine, requests: dict[int, Request], calibrated_on: int, selector: Selector, seed: int, path: Path,
    repeats: int, common: dict[str, Any], *, match: Match, calibrated_at: float, rhos: Sequence[float],
    bandwidths: Sequence[float],
) -> None:  # fmt: skip
    """Predicted against measured TTFT; calibration: two lengths (one request and half of it) at one bandwidth.

    requests: by number of chunks, the ones to predict and the one to calibrate on.
    """
    model = CostModel.fit(measure(engine, selector, seed, requests[calibrated_on], match(calibrated_at)))
    spec, row_bytes = selector.probe_spec(engine.decoder.num_layers, engine.critical), engine.geometry.row_bytes
    points = [
        (chunks, nominal, rho)
        for chunks in requests if chunks not in (calibrated_on, calibrated_on // 2)
        for nominal in bandwidths for rho in rhos
    ]  # fmt: skip
    raw: dict[str, list[float]] = {}
    for number in tqdm(range(repeats + 1), desc="predict", unit="round"):
        for chunks, nominal, rho in points:
            arm = Arm(selector=selector, rho=rho, seed=seed)
            timing = engine.time(requests[chunks], arm, decode=False, gb_per_s=match(nominal))
            if number:
                raw.setdefault(f"chunks={chunks},bw={nominal:g},rho={rho:g}", []).append(timing.ttft_s)
    arms, errors = {}, []
    for (chunks, nominal, rho), (name, values) in zip(points, raw.items(), strict=True):
        shape = Shape.of(requests[chunks])
        predicted = model.ttft_s(shape, spec, rho, row_bytes=row_bytes, gb_per_s=match(nominal))
        errors.append(abs(predicted / median(values) - 1))
        arms[name] = {**_summary(values), "predicted": predicted, "error_frac": errors[-1]}
    report = {"name": "predict", "unit": "s", "n": repeats, **common, "model": model.to_json(), "arms": arms,
              "ratios": {}, "error_frac_median": median(errors), "error_frac_max": max(errors)}  # fmt: skip
    write_atomic(path, json.dumps(report, indent=1) + "\n")


def _by_layer(program: Sequence[tuple[str, Any, Any, int | None]]) -> dict[tuple[str, int | None], float]:
    """Seconds by (stage, layer) of a program."""
    seconds: dict[tuple[str, int | None], float] = {}
    for event, stage, value, layer in program:
        if event == "run" and stage not in OVERHEAD:
            seconds[stage, layer] = seconds.get((stage, layer), 0.0) + value
    return seconds


def _add(arms: dict[str, dict[str, list[Any]]], name: str, number: int, **values: Any) -> None:
    """Round 0 warms up and is left out."""
    if number:
        for key, value in values.items():
            arms.setdefault(name, {}).setdefault(key, []).append(value)


def _pipeline_arm(values: dict[str, list[Any]]) -> dict[str, Any]:
    report = _summary(values["ttft_s"])
    for key in ("efficiency", "efficiency_in_run", "overhead_s"):
        if key in values:
            report[key] = {"raw": values[key], "median": median(values[key])}
    if "bytes" in values:
        report["bytes"] = values["bytes"][-1]
    return report


def _summary(values: Sequence[float]) -> dict[str, Any]:
    p20, p50, p80 = np.percentile(values, [20, 50, 80]).tolist()
    return {"raw": list(values), "median": p50, "p20": p20, "p80": p80}
