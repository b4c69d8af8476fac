"""Synthetic cells in the layout that runs write, for tests and for looking at figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

RHOS = (0.1, 0.2, 0.3, 0.4, 0.5)
QUALITY_AT = {"random": (0.05, 0.45), "epic": (0.1, 0.5), "fusionrag": (0.35, 0.85), "prophetkv": (0.75, 1.0),
              "qcfuse": (0.7, 1.0), "cacheblend": (0.25, 0.7), "oracle": (0.6, 0.95)}  # fmt: skip
PROBE_S = {"prophetkv": 0.9, "qcfuse": 0.25, "fusionrag": 0.1}
FULL_TTFT_S = 7.5


def write_cell(
    outputs: Path, selector: str, rho: float | str, records: list[dict], *, experiment: str = "fig10",
    dataset: str = "ruler_single", model: str = "smollm2_135m", engine: str = "hf", bandwidth: str = "none",
    variant: str = "", done: bool = True, metric: str = "string_match_all", link: str | None = None,
    trace: dict | None = None,
) -> Path:  # fmt: skip
    leaf = f"rho={rho},bw={bandwidth}" + (f",{variant}" if variant else "")
    path = outputs / experiment / engine / model / dataset / selector / leaf
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"rho: {rho}\n")
    (path / "env.json").write_text("{}")
    (path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    metrics = {"n": len(records), "metric": metric, "link": {"description": link}}
    (path / "metrics.json").write_text(json.dumps(metrics))
    if trace is not None:
        (path / "trace.json").write_text(json.dumps(trace))
    if done:
        (path / "DONE").write_text("0" * 64)
    return path


def record(sample: int, score: float, ttft_s: float | None = 1.0, **values: object) -> dict:
    """One line of records.jsonl; what is not given is null."""
    line = {"sample_id": f"s{sample:03d}", "prompt_sha256": f"{sample:064d}", "prediction": "", "answers": ["1"],
            "score": score, "first_token_kl": None, "top1_agrees": None, "answer_kl": None,
            "answer_agreement_frac": None, "num_context_tokens": 1024, "num_selected": None,
            "effective_recompute_frac": None, "ttft_s": ttft_s, "decode_s": 0.5, "stages_s": {}, "bytes": {},
            "error": None}  # fmt: skip
    return line | values


def stages(**seconds: float) -> dict:
    """stages_s of a record: every stage of which nothing is said takes 0."""
    names = ("queue", "engine", "wait_prefix", "probe", "wait_select", "score", "select", "wait_layer", "recompute",
             "place", "suffix", "first_token")  # fmt: skip
    return dict.fromkeys(names, 0.0) | seconds


def matched(nominal: str) -> str:
    """A link's description as runs write it."""
    return (f"{nominal} GB/s compute-matched to Qwen3-8B on H20 ({0.027 * float(nominal):.4g} GB/s here, reading error "
            "6%)")  # fmt: skip


def chrome_trace(spans: list[tuple]) -> dict:
    """spans: (lane, kind, layer, start ms, end ms, bytes), as qcfuse.fusion.timeline writes them."""
    lanes = list(dict.fromkeys(span[0] for span in spans))
    names = [{"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": lane}}
             for i, lane in enumerate(lanes)]  # fmt: skip
    events = [{"ph": "X", "pid": 0, "tid": lanes.index(lane), "cat": lane, "name": f"{kind} {layer}", "ts": start * 1e3,
               "dur": (end - start) * 1e3, "args": {"kind": kind, "layer": layer, "bytes": num_bytes}}
              for lane, kind, layer, start, end, num_bytes in spans]  # fmt: skip
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "metadata": {"ttft_s": 1.0}}


def plausible(outputs: Path, *, num_samples: int = 30, num_timed: int = 10, experiment: str = "fig10",
              datasets: tuple[str, ...] = ("ruler_single", "ruler_mq", "ruler_mv", "ruler_vt"),
              methods: tuple[str, ...] = ("random", "epic", "fusionrag", "prophetkv", "qcfuse"),
              rhos: tuple[float, ...] = RHOS, model: str = "smollm2_135m", scale_s: float = 1.0) -> None:  # fmt: skip
    """A whole experiment whose numbers look like a run's: paired samples, noise, and methods in their usual order."""
    rng = np.random.default_rng(7)
    points = [("full_prefill", 1.0), ("direct_reuse", 0.0), *((method, rho) for method in methods for rho in rhos)]
    for number, dataset in enumerate(datasets):
        ceiling = (1.0, 0.55, 0.5, 0.3, 0.4, 0.5)[number]
        luck = rng.random((num_samples, 4))
        for selector, rho in points:
            low, high = QUALITY_AT.get(selector, (0.0, 0.0))
            quality = {"full_prefill": 1.0, "direct_reuse": 0.05}.get(selector, low + (high - low) * (rho - 0.1) / 0.4)
            ttft_s = scale_s * (FULL_TTFT_S * (1.0 if rho == 1 else 0.06 + 0.9 * rho) + PROBE_S.get(selector, 0.0))
            hits = (luck + 0.15 * rng.normal(size=luck.shape) < ceiling * quality).mean(axis=1)
            answer_kl = 2.5 * (1.02 - quality) ** 1.6 * rng.lognormal(0, 0.5, num_samples)
            lines = [
                record(i, float(hits[i]), float(ttft_s * rng.lognormal(0, 0.03)) if i < num_timed else None,
                       first_token_kl=float(answer_kl[i] / 3), top1_agrees=bool(rng.random() < 0.5 + quality / 2),
                       answer_kl=float(answer_kl[i]), num_selected=int(1024 * rho),
                       answer_agreement_frac=float(min(1.0, rng.binomial(16, 0.45 + 0.54 * quality) / 16)),
                       effective_recompute_frac=rho)
                for i in range(num_samples)
            ]  # fmt: skip
            write_cell(outputs, selector, f"{rho:g}", lines, experiment=experiment, dataset=dataset, model=model)
