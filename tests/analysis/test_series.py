from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis import fidelity, fig10, fig11, series, style, tables
from analysis.cells import load
from analysis.summary import summarise
from tests.analysis.build import matched, record, write_cell


def two_links(outputs: Path) -> None:
    """full, reuse, epic at 0.5 with caches in memory (1 s) and at 10 GB/s (2 s), with scores 1, 0 and 0.5."""
    for bandwidth, ttft_s in (("none", 1.0), ("10", 2.0)):
        for selector, rho, score in (("full_prefill", "1", 1.0), ("direct_reuse", "0", 0.0), ("epic", "0.5", 0.5)):
            lines = [record(i, score, ttft_s * (2.0 if rho == "1" else 1.0), answer_kl=0.1) for i in range(2)]
            write_cell(outputs, selector, rho, lines, bandwidth=bandwidth,
                       link=matched(bandwidth) if bandwidth == "10" else None)  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "main"),
    [(["none", "10"], "10"), (["none"], "none"), (["none", "3", "0.5"], "3"), (["10", "20"], "10"), (["4.8"], "4.8")],
)
def test_the_main_bandwidth_is_10_or_the_fastest_link(measured: list[str], main: str) -> None:
    assert series.main_bandwidth(measured) == main


def test_bandwidths_stand_in_order_of_speed() -> None:
    assert series.in_order(["none", "10", "4.8", "0.5", "10"]) == ["0.5", "4.8", "10", "none"]


def test_words_describe_links_and_memory() -> None:
    def rows(*pairs: tuple[str, str]) -> pd.DataFrame:
        return pd.DataFrame(pairs, columns=["bandwidth", "link"])

    assert series.words(rows(("none", ""))) == "Caches in memory, no storage link."
    assert series.words(rows(("10", ""))) == "Storage link: 10 GB/s."
    assert series.words(rows(("10", "10 GB/s matched"))) == "Storage link: 10 GB/s matched."
    assert series.words(rows(("4", "4 GB/s"), ("3", "3 GB/s"), ("10", "10 GB/s"))) == "Storage link: 3 GB/s to 10 GB/s."
    assert series.words(rows(("none", ""), ("1", "1 GB/s"))) == (
        "Storage link: 1 GB/s. Bandwidth none: caches in memory."
    )


def test_what_links_are_matched_to_is_said_without_their_numbers() -> None:
    assert series.matched_to(pd.DataFrame({"link": [matched("3"), matched("10"), ""]})) == (
        "compute-matched to Qwen3-8B on H20"
    )
    assert series.matched_to(pd.DataFrame({"link": ["3 GB/s", "10 GB/s", ""]})) == ""


def test_averages_fidelity_and_tables_are_of_the_main_bandwidth_alone(tmp_path: Path) -> None:
    two_links(tmp_path)
    write_cell(tmp_path, "epic", "0.1", [record(0, 0.5)], bandwidth="none", done=False)
    loaded = load(tmp_path, "fig10")
    for draw in (fig11.draw, fidelity.draw):
        table = pd.read_csv(draw(loaded, tmp_path)[0], dtype={"bandwidth": str}, keep_default_na=False)
        assert set(table["bandwidth"]) - {""} == {"10"}
    text = tables.markdown(loaded)
    assert "Mean over ruler_single. Storage link: 10 GB/s compute-matched to Qwen3-8B on H20 (0.27 GB/s here" in text
    assert text.count("| EPIC |") == 1 and "| 2.00 | 2.00× [2.00, 2.00] |" in text


def test_a_table_of_another_bandwidth_or_of_all_is_there_for_the_asking(tmp_path: Path) -> None:
    two_links(tmp_path)
    loaded = load(tmp_path, "fig10")
    text = tables.markdown(loaded, bandwidth="none")
    assert "Caches in memory" in text and "| 1.00 | 2.00× [2.00, 2.00] |" in text
    assert tables.markdown(loaded, by_dataset=True, bandwidth="all").count("| EPIC |") == 2
    with pytest.raises(ValueError, match="no finished cell at bandwidth 3; there are 10, none, all"):
        tables.markdown(loaded, bandwidth="3")


def test_fig10_draws_other_bandwidths_faint_and_without_bars(tmp_path: Path) -> None:
    two_links(tmp_path)
    rows = summarise(load(tmp_path, "fig10").frame)
    main = rows["bandwidth"] == "10"
    fig, axes = style.figure(1, 1)
    fig10.draw_panel(axes[0, 0], "smollm2_135m", "ruler_single", rows[main], rows[~main])
    faint = [line for line in axes[0, 0].lines if line.get_alpha() == 0.3]
    assert sorted(line.get_xdata()[0] for line in faint) == [1.0, 1.0, 2.0] and len(axes[0, 0].containers) == 3
    note = fig10.note(rows[main], rows[~main], 0, 0, False)
    assert "Storage link: 10 GB/s compute-matched" in note
    assert "Faint: caches in memory, no storage link." in note


def test_fig10_csv_holds_both_series_with_their_link(tmp_path: Path) -> None:
    two_links(tmp_path)
    table = pd.read_csv(fig10.draw(load(tmp_path, "fig10"), tmp_path)[0], keep_default_na=False)
    assert table.groupby("bandwidth").size().to_dict() == {"10": 3, "none": 3}
    assert set(table["link"]) == {matched("10"), ""}
