"""runner=plan and rho=auto: the device that is chosen, the ratio that is picked, what is kept and what is refused."""

from __future__ import annotations

import json

import pytest

from qcfuse.engine.cost import FLOOR_RHO
from runners.cell import Cell
from runners.plan import Device, Estimate, Plan, chosen
from tests.runners.conftest import composed, read_records, run_here


def estimate(name: str, gb_per_s: float, price: float, hidden: bool) -> Estimate:
    device = Device(name=name, gb_per_s=gb_per_s, price_per_gb_month=price)
    return Estimate(device=device, load_s=1, recompute_s=1, hidden=hidden, ttft_s=1, rho_auto=0.2, price_per_month=1)


def test_the_cheapest_hidden_device_wins_and_the_faster_of_equal_ones():
    devices = [estimate("ram", 50, 3, True), estimate("tape", 0.01, 0.001, False), estimate("ssd", 1, 0.1, True),
               estimate("nvme", 5, 0.1, True)]  # fmt: skip
    assert chosen(devices) == "nvme"
    assert chosen([estimate("tape", 0.01, 0.001, False)]) is None


def test_a_plan_for_a_small_model(tiny_cell, tmp_path, capsys):
    kept = [o for o in tiny_cell if not o.startswith("runner")]
    run_here([*kept, "runner=plan", "rho=auto", "bandwidth=1", "limit=1"])
    found = json.loads((tmp_path / "out/plan/qwen3_8b-qcfuse.json").read_text())
    assert [e["device"]["name"] for e in found["estimates"]] == ["ram", "nvme", "ssd", "object_store"]
    assert found["rho"] == FLOOR_RHO and found["context_tokens"] == 600
    loads = [e["load_s"] for e in found["estimates"]]
    assert loads == sorted(loads) and all(e["hidden"] == (e["load_s"] <= e["recompute_s"]) for e in found["estimates"])
    printed = capsys.readouterr().out
    assert "object_store" in printed and ("cheapest whose load is hidden" in printed or "no device" in printed)


def test_auto_picks_a_ratio_from_measured_compute_and_link(tiny_cell, tmp_path):
    auto = [*tiny_cell, "limit=1", "rho=auto"]
    run_here([*auto, "bandwidth=1000"], [*auto, "bandwidth=0.001"])
    fast, slow = (next((tmp_path / "out").rglob(f"rho=auto,bw={bw},*")) for bw in ("1000", "0.001"))
    (quick,), (lazy,) = read_records(fast), read_records(slow)
    assert quick["num_selected"] == int(0.15 * 600), "nothing to hide behind: the floor"
    assert lazy["num_selected"] > quick["num_selected"], "a slow link hides more recompute"
    assert len(list((tmp_path / "out" / "calibration").glob("*.json"))) == 1, "measured once a method"


def test_what_is_refused(tiny_cell):
    with pytest.raises(ValueError, match="rho=auto .* set bandwidth"):
        Cell.of(*composed([*tiny_cell, "rho=auto"]))
    with pytest.raises(ValueError, match="devices is empty"):
        Plan(devices=[])
    with pytest.raises(ValueError, match="ssd: gb_per_s=0 must be above 0"):
        Plan(devices=[{"name": "ssd", "gb_per_s": 0, "price_per_gb_month": 1}])
    twice = {"name": "ssd", "gb_per_s": 1, "price_per_gb_month": 1}
    with pytest.raises(ValueError, match="ssd more than once"):
        Plan(devices=[twice, twice])
