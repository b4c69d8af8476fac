"""metrics.json of a cell, from its records."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from analysis.stats import bootstrap_mean

PERCENTILES = {"median": 50, "p20": 20, "p80": 80, "p95": 95}


def summarise(records: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Failed samples count into n and score (as 0), not into fidelity and time. Times are of the timed samples."""
    sound = [record for record in records if record["error"] is None]
    timed = [record for record in sound if record["ttft_s"] is not None]
    score = bootstrap_mean([record["score"] for record in records])
    return {
        "n": len(records),
        "n_failed": len(records) - len(sound),
        "metric": metric,
        "score_mean": score.value,
        "score_ci95": [score.low, score.high],
        "first_token_kl_mean": _mean(sound, "first_token_kl"),
        "top1_agreement": _mean(sound, "top1_agrees"),
        "answer_kl_mean": _mean(sound, "answer_kl"),
        "answer_agreement": _mean(sound, "answer_agreement_frac"),
        "effective_recompute_frac_mean": _mean(sound, "effective_recompute_frac"),
        "num_evidence_cut_by_seam": sum(bool(record["evidence_cut_by_seam"]) for record in records),
        "n_timed": len(timed),
        "ttft_s": _percentiles(timed, "ttft_s"),
        "decode_s": _percentiles(timed, "decode_s"),
        "stages_s": _by_key(timed, "stages_s", median),
        "bytes": _by_key(timed, "bytes", mean),
        "pipeline_efficiency_median": _median(timed, "pipeline_efficiency"),
    }


def with_faster_arm(timings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Full prefill counts with the arm (engine or loop) of the lower median over the cell, not with the luckier one
    of each sample; timings without arms stay as they are."""
    arms = [timing["arms"] for timing in timings.values() if timing["arms"]]
    if not arms:
        return timings
    best = min(arms[0], key=lambda name: median(timed[name]["ttft_s"] for timed in arms))
    return {sample_id: _of_arm(timing, best) for sample_id, timing in timings.items()}


def _of_arm(timing: dict[str, Any], best: str) -> dict[str, Any]:
    arms, decode_s = timing["arms"], timing["decode_s"]
    ttft_s = arms[best]["ttft_s"]
    return {
        **timing,
        **arms[best],
        "e2e_s": None if decode_s is None else ttft_s + decode_s,
        "arms_ttft_s": {name: arm["ttft_s"] for name, arm in arms.items()},
    }


def _mean(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [float(record[key]) for record in records if record[key] is not None]
    return mean(values) if values else None


def _median(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return median(values) if values else None


def _percentiles(records: Sequence[dict[str, Any]], key: str) -> dict[str, float | None]:
    values = [record[key] for record in records if record[key] is not None]
    return {name: float(np.percentile(values, q)) if values else None for name, q in PERCENTILES.items()}


def _by_key(records: Sequence[dict[str, Any]], key: str, reduce: Any) -> dict[str, float | None]:
    names = dict.fromkeys(name for record in records for name in record[key])
    values = {name: [r[key][name] for r in records if r[key].get(name) is not None] for name in names}
    return {name: reduce(found) if found else None for name, found in values.items()}
