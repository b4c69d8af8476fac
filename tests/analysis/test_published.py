from __future__ import annotations

import pytest

from analysis import published


def test_aggregate_holds_every_method_and_rho_of_the_figure_with_its_source() -> None:
    frame = published.aggregate()
    assert len(frame) == 2 * (5 * 5 + 2)
    assert frame["source"].str.contains("2606.05875").all() and (frame["quality_error"] == 1).all()
    for (_, selector), line in frame.groupby(["suite", "selector"]):
        if selector in ("full_prefill", "direct_reuse"):
            assert line["rho"].to_list() == [1.0 if selector == "full_prefill" else 0.0]
        else:
            assert line["rho"].to_list() == [0.1, 0.2, 0.3, 0.4, 0.5] and line["ttft_s"].is_monotonic_increasing


def test_relative_ttft_is_over_the_suites_own_full_prefill() -> None:
    frame = published.aggregate().set_index(["suite", "selector", "rho"])
    assert frame.loc[("ruler", "qcfuse", 0.5), "ttft_rel"] == pytest.approx(1.07 / 1.85)
    assert frame.loc[("longbench", "full_prefill", 1.0), "ttft_rel"] == 1.0
    # the speed-ups that the paper prints over full prefill: 1.8x on LongBench, 1.7x on RULER
    assert 1 / frame.loc[("longbench", "qcfuse", 0.5), "ttft_rel"] == pytest.approx(1.75, abs=0.06)
    assert 1 / frame.loc[("ruler", "qcfuse", 0.5), "ttft_rel"] == pytest.approx(1.7, abs=0.06)


def test_a_panel_gets_only_points_that_have_a_ttft() -> None:
    points = published.for_panel("qwen3_8b", "hotpotqa")
    assert sorted(points["selector"].unique()) == ["full_prefill", "prophetkv", "qcfuse"] and len(points) == 7
    assert published.for_panel("smollm2_135m", "ruler_vt").empty
