"""Cost models of a cell's method on this machine: measured once on a few short runs, then kept."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qcfuse.engine.base import Arm, Timing
from qcfuse.engine.cost import CostModel, Measured, Shape
from qcfuse.engine.hf import HFEngine
from qcfuse.selectors.base import Selector
from qcfuse.types import Request
from runners.cell_dir import write_atomic

RHOS = (0.1, 0.3, 0.6)
REPEATS = 3


def cost_model(
    engine: HFEngine, selector: Selector, seed: int, request: Request, gb_per_s: float | None, directory: Path
) -> CostModel:
    """The cost model of a selector, from runs on all and on half of the request's chunks at one bandwidth.

    Kept in `directory`, one file a model, thread count and selector; what is there is not measured again.
    """
    described = f"{type(selector).__name__} {selector} {engine.store.config}"
    key = hashlib.sha256(described.encode()).hexdigest()[:12]
    threads = torch.get_num_threads()
    path = directory / f"{engine.name}-{engine.reference_key}-{threads}threads-{selector.name}-{key}.json"
    if path.exists():
        return CostModel.from_json(json.loads(path.read_text(encoding="utf-8"))["model"])
    runs = measure(engine, selector, seed, request, gb_per_s)
    model = CostModel.fit(runs)
    directory.mkdir(parents=True, exist_ok=True)
    note: dict[str, Any] = {
        "selector": str(selector), "gb_per_s": gb_per_s, "threads": threads, "rhos": RHOS, "repeats": REPEATS,
        "context_tokens": sorted({run.shape.num_context for run in runs}), "model": model.to_json(),
    }  # fmt: skip
    write_atomic(path, json.dumps(note, indent=1) + "\n")
    return model


def measure(
    engine: HFEngine, selector: Selector, seed: int, request: Request, gb_per_s: float | None
) -> list[Measured]:
    """Medians of a few runs at two lengths and a few recompute ratios, in turn; a warm-up is discarded."""
    requests = [request, half_of(request)]
    arms = [Arm(selector=selector, rho=rho, seed=seed) for rho in RHOS]
    timed: dict[tuple[int, int], list[Timing]] = {}
    for round_number in range(REPEATS + 1):
        for i, one in enumerate(requests):
            for j, arm in enumerate(arms):
                timing = engine.time(one, arm, decode=False, gb_per_s=gb_per_s)
                if round_number:
                    timed.setdefault((i, j), []).append(timing)
    spec = selector.probe_spec(engine.decoder.num_layers, engine.critical)
    runs = []
    for (i, j), timings in timed.items():
        stages_s = {name: median(t.stages_s[name] for t in timings) for name in timings[0].stages_s}
        runs.append(
            Measured(shape=Shape.of(requests[i]), spec=spec, rho=arms[j].rho, num_layers=engine.decoder.num_layers,
                     stages_s=stages_s, rest_frac=_rest_frac(timings[0], engine.decoder.num_layers))
        )  # fmt: skip
    return runs


def _rest_frac(timing: Timing, num_layers: int) -> float:
    """Bytes read after the selection over those that were unread then; as planned where no link was used."""
    read = timing.bytes
    unread = read["total_kv"] * (num_layers - 1) / num_layers - read["before_recompute"]
    links = [event["args"] for event in timing.trace["traceEvents"] if event.get("cat") == "link"]
    rest = sum(span["bytes"] for span in links if span["kind"] == "rest")
    if not links:
        rest = read["requested"] - read["before_recompute"]
    return min(1.0, max(0.0, rest / unread)) if unread > 0 else 0.0


def half_of(request: Request) -> Request:
    """The request with the first half of its chunks, or half of its only one."""
    count = len(request.chunk_ids) // 2
    chunks = request.chunk_ids[:count] or (request.chunk_ids[0][: max(1, len(request.chunk_ids[0]) // 2)],)
    return replace(request, chunk_ids=chunks, evidence=(), sample_id=f"{request.sample_id}/half")
