from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import fidelity, fig10, fig11, style
from analysis.cells import KEYS, MissingCells, load
from tests.analysis.build import record, write_cell


def drawn(draw: Callable[..., list[Path]], outputs: Path, name: str) -> pd.DataFrame:
    paths = draw(load(outputs, "fig10"), outputs, name)
    assert [path.name for path in paths] == [f"{name}.csv", f"{name}.pdf", f"{name}.png"]
    assert paths[1].read_bytes().startswith(b"%PDF") and paths[2].read_bytes().startswith(b"\x89PNG")
    assert min(path.stat().st_size for path in paths[1:]) > 8_000
    return pd.read_csv(paths[0], keep_default_na=False, na_values=[""])


def of_cell(outputs: Path, dataset: str, selector: str, rho: float) -> pd.DataFrame:
    frame = load(outputs, "fig10").frame
    return frame[(frame["dataset"] == dataset) & (frame["selector"] == selector) & (frame["rho"] == rho)]


def test_fig10_csv_holds_the_numbers_of_the_cells(outputs: Path) -> None:
    table = drawn(fig10.draw, outputs, "fig10")
    assert len(table) == 2 * (3 * 2 + 2)
    row = table.query("dataset == 'ruler_vt' and selector == 'qcfuse' and rho == 0.5").iloc[0]
    records = of_cell(outputs, "ruler_vt", "qcfuse", 0.5)
    assert row["score"] == pytest.approx(records["score"].mean(), rel=1e-5) and (row["n"], row["ttft_n"]) == (8, 4)
    assert row["ttft_s"] == pytest.approx(records["ttft_s"].median(), rel=1e-5)
    assert row["ttft_p80_s"] == pytest.approx(records["ttft_s"].quantile(0.8), rel=1e-5)
    full = of_cell(outputs, "ruler_vt", "full_prefill", 1.0)
    assert row["speedup"] == pytest.approx(full["ttft_s"].median() / records["ttft_s"].median(), rel=1e-5)
    assert row["score_low"] <= row["score"] <= row["score_high"]


def test_fig11_averages_tasks_and_sets_the_published_points_beside_them(outputs: Path) -> None:
    table = drawn(fig11.draw, outputs, "fig11")
    measured = table[table["source"] == "measured"].set_index(["selector", "rho"])
    means = {name: {point: of_cell(outputs, name, *point)["score"].mean() for point in measured.index}
             for name in ("ruler_single", "ruler_vt")}  # fmt: skip
    point = ("epic", 0.5)
    assert measured.loc[point, "score"] == pytest.approx(np.mean([means[name][point] for name in means]), rel=1e-5)
    scale = {name: [value for key, value in scores.items() if key[0] != "random"] for name, scores in means.items()}
    by_hand = [(means[name][point] - min(scale[name])) / (max(scale[name]) - min(scale[name])) for name in means]
    assert measured.loc[point, "score_normalised"] == pytest.approx(np.mean(by_hand), rel=1e-5)
    assert measured.loc[("full_prefill", 1.0), "ttft_rel"] == 1.0
    quoted = table[table["source"] != "measured"]
    assert len(quoted) == 27 and quoted["source"].str.contains("digitised").all() and (quoted["suite"] == "ruler").all()


def test_fidelity_csv_holds_the_numbers_of_the_cells(outputs: Path) -> None:
    table = drawn(fidelity.draw, outputs, "fidelity").set_index(["dataset", "selector", "rho"])
    records = of_cell(outputs, "ruler_single", "epic", 0.1)
    row = table.loc[("ruler_single", "epic", 0.1)]
    assert row["answer_kl"] == pytest.approx(records["answer_kl"].mean(), rel=1e-5) and row["answer_kl_n"] == 8
    assert row["answer_agreement"] == pytest.approx(records["answer_agreement_frac"].mean(), rel=1e-5)
    assert row["top1_agreement"] == pytest.approx(records["top1_agrees"].mean(), rel=1e-5)


def small(outputs: Path, skip: tuple[str, str] | None = None, **values: object) -> None:
    """Two tasks x (full, reuse, epic at .1 and .5), two samples; without the cell `skip` = (dataset, rho) of epic."""
    for dataset in ("ruler_mq", "ruler_vt"):
        for selector, rho, score in (("full_prefill", "1", 1.0), ("direct_reuse", "0", 0.0), ("epic", "0.1", 0.5),
                                     ("epic", "0.5", 0.75)):  # fmt: skip
            if selector != "epic" or (dataset, rho) != skip:
                lines = [record(i, score, **({"ttft_s": 2.0} | values)) for i in range(2)]
                write_cell(outputs, selector, rho, lines, dataset=dataset)


def test_fig11_refuses_an_average_over_fewer_tasks_and_names_cell_and_command(tmp_path: Path) -> None:
    small(tmp_path, skip=("ruler_vt", "0.5"))
    with pytest.raises(MissingCells) as refused:
        fig11.draw(load(tmp_path, "fig10"), tmp_path)
    assert "missing  hf/smollm2_135m/ruler_vt/epic/rho=0.5,bw=none" in str(refused.value)
    assert (
        "python run.py experiment=fig10 engine=hf model=smollm2_135m dataset=ruler_vt selector=epic rho=0.5 "
        "bandwidth=null -m"
        in str(refused.value)
    )


def test_fig11_leaves_a_task_that_all_methods_solve_out_of_the_normalised_mean(tmp_path: Path) -> None:
    small(tmp_path)
    for selector, rho in (("full_prefill", "1"), ("direct_reuse", "0"), ("epic", "0.1"), ("epic", "0.5")):
        write_cell(tmp_path, selector, rho, [record(i, 1.0) for i in range(2)], dataset="ruler_single")
    frame = load(tmp_path, "fig10").frame
    points, note = fig11.average(frame)
    epic = points.set_index(["selector", "rho"]).loc[("epic", 0.5)]
    assert epic["score"] == pytest.approx((0.75 + 0.75 + 1) / 3) and epic["score_normalised"] == pytest.approx(0.75)
    assert "left out of the normalised mean: ruler_single/smollm2_135m" in note
    assert "without CacheBlend, FusionRAG, ProphetKV, QCFuse" in note


def test_figures_say_what_their_cells_do_not_hold(tmp_path: Path) -> None:
    small(tmp_path, ttft_s=None)
    loaded = load(tmp_path, "fig10")
    with pytest.raises(MissingCells, match=r"no finished cell has a TTFT\n  run  python run\.py experiment=fig10"):
        fig10.draw(loaded, tmp_path)
    with pytest.raises(MissingCells, match="no finished cell has an answer KL"):
        fidelity.draw(loaded, tmp_path)


def test_published_points_are_drawn_hollow_in_their_own_panel() -> None:
    fig, axes = style.figure(1, 2)
    row = dict.fromkeys(KEYS, "") | {
        "selector": "qcfuse",
        "rho": 0.5,
        "metric": "qa_f1",
        "score": 0.3,
        "score_low": 0.2,
    }
    rows = pd.DataFrame([row | {"score_high": 0.4, "ttft_s": 1.0, "ttft_p20_s": 0.9, "ttft_p80_s": 1.1}])
    assert fig10.draw_panel(axes[0, 0], "qwen3_8b", "musique", rows)
    assert not fig10.draw_panel(axes[0, 1], "smollm2_135m", "musique", rows)
    hollow = [line for line in axes[0, 0].lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == 3 and not [line for line in axes[0, 1].lines if line.get_markerfacecolor() == "white"]
    assert (
        axes[0, 0].get_xlim()[0] == 0
        and axes[0, 0].get_xlabel() == "TTFT (s)"
        and axes[0, 0].get_ylabel() == "F1 (0–1)"
    )


def test_methods_differ_in_colour_and_marker_and_unknown_ones_are_drawn_too() -> None:
    looks = list(style.METHODS.values())
    assert len({look.color for look in looks}) == len({look.marker for look in looks}) == len(looks)
    assert style.method("my_method").label == "my_method"
    assert style.in_order(["qcfuse", "my_method", "full_prefill"]) == ["full_prefill", "qcfuse", "my_method"]
