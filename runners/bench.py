"""runner=bench: TTFT and selection time of the engine, arms in turn in one process, raw timings kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from tqdm import tqdm

from qcfuse.engine.base import Arm
from qcfuse.engine.hf import HFEngine
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.work import Work
from qcfuse.types import Request
from runners import env
from runners.bench_io import run_io_bench, run_pipeline_bench, run_predict_bench
from runners.bench_ops import run_ops_bench
from runners.cell import Cell
from runners.cell_dir import write_atomic
from runners.dispatch import Engines
from runners.link_speed import scaled_speed

NAMES = ("ttft_hf", "select_hf", "ops", "io", "pipeline", "predict")
SELECTION = ("probe", "wait_select", "score", "select")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """names: which benchmarks to run. Sizes in tokens; repeats: timed rounds after the warm-up.

    selectors: what is compared with full prefill, as configured in conf/selector. ttft_hf and select_hf have the caches
    in memory, no link. pipeline and predict read over links at `bandwidths` (GB/s, compute-matched where storage.match
    says so); settings: reading settings that pipeline compares; predict_chunks: lengths to predict, in chunks, the
    first one and its half are calibrated on.
    """

    names: Sequence[str]
    chunk_tokens: int
    num_chunks: int
    suffix_tokens: int
    question_tokens: int
    rhos: Sequence[float]
    repeats: int
    selectors: dict[str, Any]
    bandwidths: Sequence[float]
    settings: Sequence[dict[str, Any]]
    pipeline_chunks: int
    predict_chunks: Sequence[int]

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in NAMES]
        if unknown:
            raise ValueError(
                f"runner.names={list(self.names)}: {unknown[0]} is unknown; choose from {', '.join(NAMES)}"
            )
        if self.repeats < 5:
            raise ValueError(f"runner.repeats={self.repeats}: a median needs at least 5")

    def run(self, cells: Sequence[Cell]) -> None:
        cell = cells[0]
        directory = Path(cell.output_dir, "bench")
        directory.mkdir(parents=True, exist_ok=True)
        engine = Engines().of(cell)
        if "ttft_hf" in self.names or "select_hf" in self.names:
            self._run_engine(engine, self._request(engine, cell), cell.seed, directory)
        if "ops" in self.names:
            run_ops_bench(directory / "ops.json", self.repeats)
        common = {"threads": torch.get_num_threads(), "env": env.describe()}
        if "io" in self.names:
            run_io_bench(cell.storage, directory / "io.json", self.repeats, common)
        if "pipeline" in self.names or "predict" in self.names:
            self._run_links(engine, cell, directory, common)

    def _run_links(self, engine: HFEngine, cell: Cell, directory: Path, common: dict[str, Any]) -> None:
        counts = dict.fromkeys([self.pipeline_chunks, *self.predict_chunks])
        requests = {n: self._request(engine, cell, num_chunks=n) for n in counts}
        request = requests[self.pipeline_chunks]
        match = lambda nominal: scaled_speed(cell, engine, request, nominal).gb_per_s  # noqa: E731
        selectors = {name: instantiate(config) for name, config in self.selectors.items()}
        common = {**common, "match": cell.storage.match}
        if "pipeline" in self.names:
            run_pipeline_bench(
                engine, request, selectors, cell.seed, directory / "pipeline.json", self.repeats,
                {**common, "context_tokens": request.num_context_tokens}, match=match, rhos=self.rhos,
                bandwidths=self.bandwidths, settings=[dict(setting) for setting in self.settings],
            )  # fmt: skip
        if "predict" in self.names:
            run_predict_bench(
                engine, {n: requests[n] for n in self.predict_chunks}, self.predict_chunks[0], selectors["qcfuse"],
                cell.seed, directory / "predict.json", self.repeats,
                {**common, "context_tokens": [requests[n].num_context_tokens for n in self.predict_chunks]},
                match=match, calibrated_at=max(self.bandwidths), rhos=self.rhos, bandwidths=self.bandwidths,
            )  # fmt: skip

    def _request(self, engine: HFEngine, cell: Cell, num_chunks: int | None = None) -> Request:
        """A sample of the dataset at the benchmark's size, its suffix cut or repeated to the benchmark's length."""
        num_chunks = num_chunks or self.num_chunks
        dataset = replace(cell.dataset, chunk_tokens=self.chunk_tokens, num_chunks=num_chunks)
        request = dataset.request(0, engine.tokenizer, cell.model.template)
        repeats = -(-self.suffix_tokens // request.num_suffix_tokens)
        suffix = (request.suffix_ids * repeats)[: self.suffix_tokens]
        start = (self.suffix_tokens - self.question_tokens) // 4
        request = replace(request, suffix_ids=suffix, question_span=(start, start + self.question_tokens))
        engine.check(request)
        return request

    def _run_engine(self, engine: HFEngine, request: Request, seed: int, directory: Path) -> None:
        selectors = {name: instantiate(config) for name, config in self.selectors.items()}
        arms = {
            f"{name}@{rho:g}": Arm(selector=selector, rho=rho if selector.fixed_rho is None else 1.0, seed=seed)
            for name, selector in selectors.items()
            for rho in (self.rhos if selector.fixed_rho is None else [1.0])
        }
        ttft: dict[str, list[float]] = {}
        selection: dict[str, list[float]] = {}
        for number in tqdm(range(self.repeats + 1), desc="bench", unit="round"):
            names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
            for name in names:
                timing = engine.time(request, arms[name], decode=False)
                if number == 0:
                    continue
                for key, arm in timing.arms.items():
                    ttft.setdefault(f"full_{key}", []).append(arm["ttft_s"])
                if not timing.arms:
                    ttft.setdefault(name, []).append(timing.ttft_s)
                    selection.setdefault(name, []).append(sum(timing.stages_s[stage] for stage in SELECTION))
        work = self._work(engine, request, arms)
        common = {
            "threads": torch.get_num_threads(),
            "context_tokens": request.num_context_tokens,
            "env": env.describe(),
        }
        if "ttft_hf" in self.names:
            write_atomic(directory / "ttft_hf.json", json.dumps(ttft_report(ttft, work, common), indent=1))
        if "select_hf" in self.names:
            write_atomic(directory / "select_hf.json", json.dumps(select_report(selection, work, common), indent=1))
        print(f"wrote {directory}")

    def _work(self, engine: HFEngine, request: Request, arms: dict[str, Arm]) -> dict[str, dict[str, int]]:
        """FLOPs per arm: total, selection."""
        work, layout = Work.of(engine.decoder), Layout(request, engine.decoder.device)
        flops = {}
        for name, arm in arms.items():
            if arm.selector.fixed_rho == 1.0:
                total = {"total": work.full_prefill(layout), "selection": 0}
                flops |= {"full_engine": total, "full_loop": total}
                continue
            spec = arm.selector.probe_spec(engine.decoder.num_layers, engine.critical)
            chosen = engine.select(request, arm).selected
            selection = work.selection(layout, spec)
            flops[name] = {"total": selection + work.fusion(layout, chosen), "selection": selection}
        return flops


def ttft_report(raw: dict[str, list[float]], work: dict[str, dict[str, int]], common: dict[str, Any]) -> dict[str, Any]:
    """Ratios against the full-prefill arm of the lower median; the work bound and its share reached beside each."""
    best = min(("full_engine", "full_loop"), key=lambda name: median(raw[name]))
    fused = [name for name in raw if name not in ("full_engine", "full_loop")]
    ratios = {f"full/{name}": median(raw[best]) / median(raw[name]) for name in fused}
    bounds = {f"full/{name}": work[best]["total"] / work[name]["total"] for name in fused}
    return {
        "name": "ttft_hf", "unit": "s", "n": len(raw[best]), **common, "full_arm": best,
        "arms": {name: arm_report(values, work[name]["total"]) for name, values in raw.items()},
        "ratios": ratios, "work_bounds": bounds,
        "share_of_work_bound": {name: ratios[name] / bounds[name] for name in ratios},
    }  # fmt: skip


def select_report(
    raw: dict[str, list[float]], work: dict[str, dict[str, int]], common: dict[str, Any]
) -> dict[str, Any]:
    """Selection (probe, score, select) pooled over rho, which it does not depend on; ratio qcfuse/prophetkv."""
    pooled: dict[str, list[float]] = {}
    for name, values in raw.items():
        pooled.setdefault(name.partition("@")[0], []).extend(values)
    flops = {name.partition("@")[0]: counts["selection"] for name, counts in work.items()}
    ratios = {
        f"{name}/prophetkv": median(values) / median(pooled["prophetkv"])
        for name, values in pooled.items()
        if "prophetkv" in pooled and name != "prophetkv"
    }
    return {
        "name": "select_hf", "unit": "s", "n": min(map(len, pooled.values())), **common,
        "arms": {name: arm_report(values, flops[name]) for name, values in pooled.items()}, "ratios": ratios,
    }  # fmt: skip


def arm_report(values: Sequence[float], flops: int) -> dict[str, Any]:
    p20, p50, p80 = np.percentile(values, [20, 50, 80]).tolist()
    return {"raw": list(values), "median": p50, "p20": p20, "p80": p80, "gflop": flops / 1e9,
            "gflop_per_s": flops / 1e9 / p50}  # fmt: skip
