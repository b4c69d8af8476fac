"""The benchmark's reports from hand-made timings, and one small real run."""

from __future__ import annotations

import json

import pytest

from qcfuse.store.bench import LinkArm
from runners import bench_io
from runners.bench import select_report, ttft_report
from runners.cell import Cell
from tests.runners.conftest import composed, run_here

COMMON = {"threads": 2, "context_tokens": 100}


def test_ratios_are_against_the_faster_full_prefill_and_follow_from_raw():
    raw = {"full_engine": [4.0, 5.0, 6.0], "full_loop": [3.0, 4.0, 9.0], "qcfuse@0.5": [2.0, 2.0, 8.0]}
    work = {"full_engine": {"total": 80, "selection": 0}, "full_loop": {"total": 80, "selection": 0},
            "qcfuse@0.5": {"total": 32, "selection": 2}}  # fmt: skip
    report = ttft_report(raw, work, COMMON)
    assert report["full_arm"] == "full_loop" and report["n"] == 3
    assert report["ratios"] == {"full/qcfuse@0.5": 2.0}
    assert report["work_bounds"] == {"full/qcfuse@0.5": 2.5}
    assert report["share_of_work_bound"] == {"full/qcfuse@0.5": 0.8}
    assert report["arms"]["full_loop"]["raw"] == [3.0, 4.0, 9.0]


def test_selection_is_pooled_over_rho():
    raw = {"qcfuse@0.1": [1.0, 3.0], "qcfuse@0.5": [2.0, 2.0], "prophetkv@0.1": [4.0, 4.0]}
    work = {name: {"total": 9, "selection": 4 if name.startswith("p") else 2} for name in raw}
    report = select_report(raw, work, COMMON)
    assert report["ratios"] == {"qcfuse/prophetkv": 0.5}
    assert report["arms"]["qcfuse"]["gflop"] == 2e-9 and len(report["arms"]["qcfuse"]["raw"]) == 4


def test_a_small_benchmark_runs(tiny_cell, tmp_path):
    kept = [o for o in tiny_cell if not o.startswith("runner")]
    run_here([
        *kept, "runner=bench", "runner.names=[ttft_hf,select_hf]", "runner.chunk_tokens=100", "runner.num_chunks=6",
        "runner.repeats=5", "runner.selectors.qcfuse.layers=[1,2]",
    ])  # fmt: skip
    ttft, select = (json.loads((tmp_path / f"out/bench/{name}.json").read_text()) for name in ("ttft_hf", "select_hf"))
    assert set(ttft["arms"]) == {"full_engine", "full_loop"} | {
        f"{s}@{r}" for s in ("qcfuse", "prophetkv") for r in (0.1, 0.3, 0.5)
    }
    assert all(len(arm["raw"]) == 5 for arm in ttft["arms"].values())
    assert set(select["ratios"]) == {"qcfuse/prophetkv"} and ttft["threads"] >= 1


def test_reading_is_measured_per_setting_and_predicted_at_other_lengths(tiny_cell, tmp_path):
    kept = [o for o in tiny_cell if not o.startswith("runner")]
    run_here([
        *kept, "runner=bench", "runner.names=[pipeline,predict]", "runner.chunk_tokens=60", "runner.pipeline_chunks=4",
        "runner.predict_chunks=[4,3]", "runner.repeats=5", "runner.selectors.qcfuse.layers=[1,2]", "runner.rhos=[0.5]",
        "runner.bandwidths=[0.05,1]",
    ])  # fmt: skip
    pipeline, predict = (json.loads((tmp_path / f"out/bench/{n}.json").read_text()) for n in ("pipeline", "predict"))
    arms = pipeline["arms"]
    assert {"qcfuse@0.5,memory", "full_prefill@1,memory"} <= set(arms) and pipeline["links"] == {"0.05": 0.05, "1": 1}
    linked = {name: arm for name, arm in arms.items() if "bw=" in name}
    assert len(linked) == 2 * 2 * 3 and all(len(arm["raw"]) == 5 for arm in linked.values())
    for arm in linked.values():
        assert 0 < arm["efficiency"]["median"] and arm["overhead_s"]["median"] > 0
        assert arm["bytes"]["device"] >= arm["bytes"]["requested"] >= arm["bytes"]["before_recompute"] > 0
    assert linked["qcfuse@0.5,bw=1,gap=0,speculate=True"]["bytes"]["wasted"] > 0
    assert linked["qcfuse@0.5,bw=1,gap=0,speculate=False"]["bytes"]["wasted"] == 0
    assert set(predict["arms"]) == {f"chunks=3,bw={bw},rho=0.5" for bw in ("0.05", "1")}
    errors = [abs(arm["predicted"] / arm["median"] - 1) for arm in predict["arms"].values()]
    assert predict["error_frac_max"] == pytest.approx(max(errors))


def test_links_are_measured_against_their_settings(tiny_cell, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_io, "LINK_ARMS", [LinkArm(tier="ram", gb_per_s=0.2, transfer_bytes=1 << 20)])
    config = Cell.of(*composed(tiny_cell)).storage
    bench_io.run_io_bench(config, tmp_path / "io.json", 1, {"threads": 1})
    found = json.loads((tmp_path / "io.json").read_text())
    (arm,) = found["arms"].values()
    assert arm["setting"] == 0.2 and list(found["ratios"].values()) == [arm["median"] / 0.2]


@pytest.mark.parametrize(
    "override,message", [("runner.names=[ttft]", "ttft is unknown"), ("runner.repeats=3", "at least 5")]
)
def test_wrong_settings(tiny_cell, override, message):
    kept = [o for o in tiny_cell if not o.startswith("runner")]
    with pytest.raises(ValueError, match=message):
        run_here([*kept, "runner=bench", override])
