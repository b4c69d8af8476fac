"""`python -m kernels.gpu_check`: are the Triton ops right on this CUDA device, and how fast are they.

First the numeric checks of kernels/gpu_cases.py; then, for the ops whose checks all passed, medians against torch doing
the same work (kernels/gpu_speed.py). Writes one JSON (outputs/bench/gpu_ops.json) and prints one table. Needs torch and
triton, no network, no weights.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

OUTPUT = Path("outputs/bench/gpu_ops.json")


def run_checks() -> dict[str, dict[str, str | None]]:
    """{op: {case: None, or the error}}: every case runs, whatever the others do."""
    from kernels.gpu_cases import attention_cases, place_cases, score_cases

    results: dict[str, dict[str, str | None]] = {}
    ops = {"recompute_attention": attention_cases(), "score": score_cases(), "place_kv": place_cases()}
    for op, cases in ops.items():
        results[op] = {}
        for name, check in cases.items():
            try:
                check()
                torch.cuda.synchronize()
                results[op][name] = None
            except Exception as error:
                results[op][name] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            torch.cuda.empty_cache()
    return results


def table(results: dict[str, Any], path: str = "") -> list[str]:
    """One line per timed arm."""
    lines = []
    for name, entry in results.items():
        if not isinstance(entry, dict):
            continue
        label = f"{path}/{name}".removeprefix("/").replace("/arms", "")
        if "median_ms" in entry:
            rate, unit, share = next(
                (entry[rate], unit, entry[share]) for rate, unit, share in (
                    ("tflop_per_s", "TFLOP/s", "share_of_matmul_frac"), ("gb_per_s", "GB/s", "share_of_copy_frac"),
                ) if rate in entry
            )  # fmt: skip
            lines.append(f"{label:58} {entry['median_ms']:9.3f} ms {rate:9.1f} {unit:7} {share:6.1%} of the ceiling")
        elif "error" in entry:
            lines.append(f"{label:58} {entry['error']}")
        else:
            lines += table(entry, f"{path}/{name}")
    return lines


def check_and_measure() -> dict[str, Any]:
    """Checks, then speeds; no speed of an op with a failed check."""
    import triton

    from kernels.gpu_speed import measure_attention, measure_ceilings, measure_place, measure_score

    start = time.monotonic()
    report: dict[str, Any] = {
        "name": "gpu_ops", "device": torch.cuda.get_device_name(0), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "checks": run_checks(),
    }  # fmt: skip
    report["checks_s"] = time.monotonic() - start
    report["ceilings"] = ceilings = measure_ceilings()
    measures = {"recompute_attention": measure_attention, "score": measure_score, "place_kv": measure_place}
    report["speed"] = {
        op: {"error": "not measured: its checks failed"} if any(report["checks"][op].values()) else measure(ceilings)
        for op, measure in measures.items()
    }
    report["wall_s"] = time.monotonic() - start
    return report


def main(output: Path = OUTPUT) -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu_check needs a CUDA device and this machine has none: nothing was checked or measured.")
    report = check_and_measure()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
    failed = [name for cases in report["checks"].values() for name, error in cases.items() if error]
    print("\n".join(table(report["speed"])))
    print(f"{report['device']}: {len(failed)} checks failed {failed}; {report['wall_s']:.0f} s; wrote {output}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
