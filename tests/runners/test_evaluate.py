"""Cells: what is written, skipped, resumed, redone; one model load for a sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from qcfuse.engine.hf import HFEngine, HFEngineConfig
from qcfuse.types import STAGES, Record
from tests.runners.conftest import ROOT, SMALL, composed, read_records, run_cli, run_here

TIMES = ("ttft_s", "decode_s", "e2e_s", "stages_s", "bytes", "pipeline_efficiency", "arms_ttft_s")


def cells_of(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "out").rglob("DONE"))


def untimed(records: list[dict]) -> list[dict]:
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


@pytest.mark.parametrize(
    "model,family", [("qwen3_8b", "qwen3"), ("llama31_8b", "llama"), ("mistral_v03_7b", "mistral")]
)
def test_the_sweep_of_the_readme_gives_five_finished_cells(tiny_dir, tmp_path, model, family):
    done = run_cli(
        f"model={model}", "selector=qcfuse", "rho=0.1,0.2,0.3,0.4,0.5", "-m", f"model.path={tiny_dir(family)}",
        "model.stop_tokens=[]", "selector.layers=[1,2]", "limit=2", f"output_dir={tmp_path / 'out'}",
        f"storage.root={tmp_path / 'store'}", *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    cells = cells_of(tmp_path)
    assert len(cells) == 5
    assert {cell.name.split(",")[0] for cell in cells} == {f"rho=0.{i}" for i in range(1, 6)}
    for cell in cells:
        names = {path.name for path in cell.iterdir()}
        assert {"config.yaml", "env.json", "records.jsonl", "metrics.json", "trace.json", "DONE"} <= names


def test_a_record_holds_every_field_and_stages_add_up(tiny_cell, tmp_path):
    run_here([*tiny_cell, "limit=2", "rho=0.3", "runner.time_decode=true"])
    (cell,) = cells_of(tmp_path)
    first, second = read_records(cell)
    assert list(first) == list(Record.__dataclass_fields__)
    assert first["num_selected"] == int(0.3 * first["num_context_tokens"])
    assert first["e2e_s"] == pytest.approx(first["ttft_s"] + first["decode_s"])
    assert set(first["stages_s"]) == set(STAGES)
    assert sum(first["stages_s"].values()) == pytest.approx(first["ttft_s"], rel=0.02)
    assert first["bytes"]["before_recompute"] < first["bytes"]["requested"] < first["bytes"]["total_kv"]
    assert second["ttft_s"] is None, "num_timed=1"
    metrics = json.loads((cell / "metrics.json").read_text())
    assert metrics["n"] == 2 and metrics["n_timed"] == 1 and metrics["n_failed"] == 0
    trace = json.loads((cell / "trace.json").read_text())
    assert {event["args"]["kind"] for event in trace["traceEvents"] if event["ph"] == "X"} >= {
        "probe",
        "score",
        "recompute",
    }


def test_a_sweep_loads_the_model_once_and_runs_endpoints_once(tiny_cell, tmp_path, monkeypatch):
    loads = []
    build = HFEngineConfig.build
    monkeypatch.setattr(HFEngineConfig, "build", lambda self, *a: loads.append(1) or build(self, *a))
    base = [o for o in tiny_cell if not o.startswith("selector")]
    jobs = [
        [*base, f"selector={name}", f"rho={rho}", "limit=1"]
        for name in ("full_prefill", "direct_reuse", "epic")
        for rho in (0.1, 0.5)
    ]
    run_here(*jobs)
    assert len(loads) == 1
    assert [f"{cell.parent.name}/{cell.name.split(',')[0]}" for cell in cells_of(tmp_path)] == [
        "direct_reuse/rho=0", "epic/rho=0.1", "epic/rho=0.5", "full_prefill/rho=1",
    ]  # fmt: skip


def test_full_prefill_is_the_noise_floor_and_rho_1_agrees_with_it(tiny_cell, tmp_path):
    base = [o for o in tiny_cell if not o.startswith("selector")]
    run_here([*base, "selector=full_prefill", "limit=2"], [*base, "selector=epic", "rho=1", "limit=2"])
    for cell in cells_of(tmp_path):
        for record in read_records(cell):
            assert record["answer_kl"] < 1e-6 and record["answer_agreement_frac"] == 1.0
    arms = read_records(tmp_path / "out" / "adhoc/hf/qwen3_8b/ruler_mq/full_prefill" / cells_of(tmp_path)[1].name)
    assert set(arms[0]["arms_ttft_s"]) == {"engine", "loop"}


def test_finished_cells_are_skipped_a_larger_limit_continues_and_force_redoes(tiny_cell, tmp_path, capsys):
    run_here([*tiny_cell, "limit=1", "rho=0.2"])
    (cell,) = cells_of(tmp_path)
    before = (cell / "records.jsonl").stat().st_mtime_ns
    run_here([*tiny_cell, "limit=1", "rho=0.2"])
    assert "finished, skipped" in capsys.readouterr().out
    assert (cell / "records.jsonl").stat().st_mtime_ns == before
    first = read_records(cell)[0]
    run_here([*tiny_cell, "limit=2", "rho=0.2"])
    records = read_records(cell)
    assert len(records) == 2 and untimed(records[:1]) == untimed([first])
    run_here([*tiny_cell, "limit=1", "rho=0.2", "force=true"])
    assert len(read_records(cell)) == 1


def test_another_configuration_in_the_same_directory_is_refused(tiny_cell, tmp_path):
    run_here([*tiny_cell, "limit=1", "rho=0.2"])
    (cell,) = cells_of(tmp_path)
    env = json.loads((cell / "env.json").read_text())
    (cell / "env.json").write_text(json.dumps({**env, "config_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="another configuration .*force=true"):
        run_here([*tiny_cell, "limit=1", "rho=0.2"])


def test_kill_9_then_the_same_command_gives_the_same_result(tiny_cell, tmp_path):
    arguments = [*tiny_cell, "limit=6", "rho=0.3", "runner.num_timed=0"]
    process = subprocess.Popen([sys.executable, "run.py", *arguments], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (found := list((tmp_path / "out").rglob("records.jsonl"))) or not found[0].read_text().count("\n"):
        assert time.monotonic() < deadline and process.poll() is None, "it ended or hung before a record was there"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not cells_of(tmp_path)
    with found[0].open("a") as file:
        file.write('{"sample_id": "half a li')
    run_here(arguments)
    (cell,) = cells_of(tmp_path)
    resumed = read_records(cell)
    run_here([*arguments, "force=true"])
    assert len(resumed) == 6
    assert untimed(resumed) == untimed(read_records(cell))


def test_a_failed_sample_is_a_record_scored_0(tiny_cell, tmp_path, monkeypatch):
    from qcfuse.engine.hf import HFEngine

    judge = HFEngine.judge

    def failing(self, request, arms, reference):
        if request.sample_id.endswith("0"):
            raise RuntimeError("out of\nmemory")
        return judge(self, request, arms, reference)

    monkeypatch.setattr(HFEngine, "judge", failing)
    run_here([*tiny_cell, "limit=2", "rho=0.3"])
    (cell,) = cells_of(tmp_path)
    metrics = json.loads((cell / "metrics.json").read_text())
    failed = [record for record in read_records(cell) if record["error"]]
    assert [(r["score"], r["error"]) for r in failed] == [(0.0, "RuntimeError: out of memory")]
    assert (metrics["n"], metrics["n_failed"]) == (2, 1)


def test_dump_keeps_the_selection(tiny_cell, tmp_path):
    run_here([*tiny_cell, "limit=1", "rho=0.3", "dump=true"])
    (path,) = (tmp_path / "out").rglob("dumps/*.safetensors")
    dump = load_file(path)
    num_context = int(dump["segment_lengths"][1:-1].sum())
    assert dump["importance"].shape == (num_context,)
    assert dump["layers"].tolist() == [1, 2]
    top = dump["importance"].sort(descending=True, stable=True).indices[: int(0.3 * num_context)]
    assert dump["selected"].tolist() == sorted(top.tolist())
    assert dump["first_logits"].ndim == 1 and dump["anchors"].numel() >= num_context // 10


def test_prepare_makes_caches_once(tiny_cell, capsys):
    job = [*(o for o in tiny_cell if not o.startswith("runner")), "runner=prepare", "limit=2", "storage=disk"]
    run_here(job)
    run_here(job)
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("prepare")]
    assert ": 0 caches made" not in first and ": 0 caches made" in second


def test_profile_ranks_layers_on_its_own_data(tiny_cell, tmp_path):
    kept = [o for o in tiny_cell if not o.startswith(("runner", "dataset", "selector.layers"))]
    run_here([*kept, "runner=profile", "dataset=ruler_profile", "model.critical_layers.file=null", "limit=3"])
    profile = json.loads((tmp_path / "out/profile/qwen3_8b.json").read_text())
    assert sorted(profile["layers"]) == [0, 1, 2, 3]
    recalls = [profile["recall_by_layer"][layer] for layer in profile["layers"]]
    assert recalls == sorted(recalls, reverse=True) and profile["num_samples"] == 3
    assert all(part["split"] == "profile" for part in profile["settings"]["dataset"]["parts"])


def test_every_cell_path_names_what_was_overridden(tiny_cell):
    from runners.cell import Cell

    cell = Cell.of(*composed([*tiny_cell, "rho=0.25", "anchors=knorm", "seed=3"]))
    assert cell.path.name.startswith("rho=0.25,bw=none,anchors=knorm,")
    assert "seed=3" in cell.path.name and "selector.layers=1-2" in cell.path.name
    assert "storage" not in cell.path.name and "limit" not in cell.path.name


def test_cells_that_differ_in_bandwidth_share_quality_and_say_how_fast_the_link_was(tiny_cell, tmp_path, monkeypatch):
    job = [*tiny_cell, "limit=2", "storage=disk"]
    run_here(job)
    judged = []
    monkeypatch.setattr(HFEngine, "judge", lambda *args: judged.append(args))
    matched = [*job, "bandwidth=4", "storage.match=qwen3_8b_h20"]
    run_here([*job, "bandwidth=0.5"], matched)
    assert not judged, "predictions do not depend on the link"
    plain, slow, scaled = (
        next((tmp_path / "out").rglob(name)) for name in ("rho=0.5,bw=none,*", "rho=0.5,bw=0.5,*", "rho=0.5,bw=4,*")
    )
    quality = [[(r["sample_id"], r["prediction"], r["score"], r["answer_kl"]) for r in read_records(cell)]
               for cell in (plain, slow, scaled)]  # fmt: skip
    assert quality[0] == quality[1] == quality[2]
    links = [json.loads((cell / "metrics.json").read_text())["link"] for cell in (plain, slow, scaled)]
    assert links[0]["gb_per_s"] is None and links[1] == {
        "nominal_gb_per_s": 0.5, "gb_per_s": 0.5, "description": "0.5 GB/s",
    }  # fmt: skip
    assert links[2]["nominal_gb_per_s"] == 4 and "compute-matched to Qwen3-8B" in links[2]["description"]
    measured = json.loads(next((tmp_path / "out" / "match").glob("*.json")).read_text())
    assert len(measured["raw"]["loop"]) == 5 and measured["prefill_s"] > 0
    metrics = json.loads((slow / "metrics.json").read_text())
    assert metrics["pipeline_efficiency_median"] > 0 and metrics["bytes"]["device"] >= metrics["bytes"]["requested"] > 0
    trace = json.loads((slow / "trace.json").read_text())["traceEvents"]
    assert {"view", "keys", "rest"} <= {event["args"].get("kind") for event in trace}


def test_another_criterion_shares_nothing(tiny_cell, tmp_path, monkeypatch):
    run_here([*tiny_cell, "limit=1"])
    calls = []
    judge = HFEngine.judge
    monkeypatch.setattr(HFEngine, "judge", lambda self, *args: calls.append(1) or judge(self, *args))
    run_here([*tiny_cell, "limit=1", "selector.reduce=mean", "bandwidth=1"])
    assert calls == [1]
