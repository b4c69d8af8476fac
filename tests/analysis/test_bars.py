from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml
from matplotlib.colors import to_hex

from analysis import bars, cb17, fig01, fig13, style
from analysis.cells import MissingCells, load, publish
from tests.analysis.build import matched, record, stages, write_cell

CONF = Path(__file__).parents[2] / "conf" / "experiment"
RHO = {"full_prefill": "1", "direct_reuse": "0"}


def lines(ttfts_s: tuple[float, ...], select_s: float, score: float = 1.0, **values: object) -> list[dict]:
    """A record for each TTFT, of which selection takes select_s, in all four of its stages."""
    spent = {"probe": select_s / 2, "wait_select": select_s / 4, "score": select_s / 8, "select": select_s / 8}
    return [record(i, score, t, stages_s=stages(**spent, recompute=t - select_s), **values)
            for i, t in enumerate(ttfts_s)]  # fmt: skip


def table_of(draw: Callable[..., list[Path]], outputs: Path, experiment: str) -> pd.DataFrame:
    paths = draw(load(outputs, experiment), outputs)
    assert [path.suffix for path in paths] == [".csv", ".pdf", ".png"]
    assert paths[1].read_bytes().startswith(b"%PDF") and paths[2].stat().st_size > 8_000
    return pd.read_csv(paths[0], dtype={"bandwidth": str}, keep_default_na=False, na_values=[""])


def fig13_cells(outputs: Path, skip: tuple[str, str] | None = None) -> None:
    """Full prefill 4 s; at 3 GB/s ProphetKV 5 s (4 s of it selecting) and QCFuse 2.5 s (0.5 s), at 10 GB/s 3 and 2."""
    times_s = {("prophetkv", "3"): (5.0, 4.0), ("prophetkv", "10"): (3.0, 1.5), ("qcfuse", "3"): (2.5, 0.5),
               ("qcfuse", "10"): (2.0, 0.5), ("full_prefill", "3"): (4.0, 0.0),
               ("full_prefill", "10"): (4.0, 0.0)}  # fmt: skip
    for (selector, bandwidth), (ttft_s, select_s) in times_s.items():
        if (selector, bandwidth) != skip:
            write_cell(outputs, selector, RHO.get(selector, "0.5"),
                       lines((ttft_s - 0.25, ttft_s, ttft_s + 0.5), select_s, pipeline_efficiency=0.9),
                       experiment="fig13", bandwidth=bandwidth, link=matched(bandwidth))  # fmt: skip


@pytest.mark.parametrize("figure", [fig01, fig13, cb17])
def test_a_figure_is_about_the_rho_and_the_methods_of_its_experiment_file(figure) -> None:
    config = yaml.safe_load((CONF / f"{figure.__name__.split('.')[-1]}.yaml").read_text())
    assert config["rho"] == figure.RHO
    assert config["hydra"]["sweeper"]["params"]["selector"] == ",".join(figure.METHODS)


def test_fig13_medians_shares_and_speedups_by_hand(tmp_path: Path) -> None:
    fig13_cells(tmp_path)
    publish(tmp_path, "fig13")
    table = table_of(fig13.draw, tmp_path, "fig13").set_index(["selector", "bandwidth"])
    assert len(table) == 6
    row = table.loc[("prophetkv", "3")]
    assert (row["ttft_s"], row["ttft_p20_s"], row["ttft_p80_s"]) == (5.0, pytest.approx(4.85), pytest.approx(5.3))
    assert (row["ttft_n"], row["select_s"], row["select_share"], row["speedup"]) == (3, 4.0, 0.8, 0.8)
    assert row["speedup_low"] <= 0.8 <= row["speedup_high"] and row["pipeline_efficiency"] == 0.9
    row = table.loc[("qcfuse", "10")]
    assert (row["ttft_s"], row["select_share"], row["speedup"]) == (2.0, 0.25, 2.0)
    assert table.loc[("full_prefill", "10"), "select_s"] == 0 and row["link"] == matched("10")
    again = fig13.draw(load(tmp_path, "fig13", "published"), tmp_path, "again")[0]
    assert again.read_text() == (tmp_path / "figures" / "fig13.csv").read_text()


def test_fig13_axis_says_what_the_bandwidth_is_matched_to_and_selection_is_hatched(tmp_path: Path) -> None:
    fig13_cells(tmp_path)
    rows = bars.points(load(tmp_path, "fig13"), 0.5)
    with style.paper():
        fig, axes = style.figure(1, 1)
        ax = axes[0, 0]
        fig13._draw_panel(ax, rows)
    assert ax.get_xlabel() == "Nominal bandwidth (GB/s), compute-matched to Qwen3-8B on H20"
    assert [text.get_text() for text in ax.get_xticklabels()] == ["3", "10"] and ax.get_ylim()[0] == 0
    hatched = sorted(patch.get_height() for patch in ax.patches if patch.get_hatch() and patch.get_height())
    assert hatched == [0.5, 0.5, 1.5, 4.0]
    tops = {to_hex(patch.get_facecolor()): round(patch.get_y() + patch.get_height(), 9) for patch in ax.patches}
    assert tops[style.method("full_prefill").color] == 4.0


def test_fig13_counts_what_a_bandwidth_lacks_and_names_cell_and_command(tmp_path: Path) -> None:
    fig13_cells(tmp_path, skip=("qcfuse", "3"))
    loaded = load(tmp_path, "fig13")
    assert [str(cell) for cell in fig13.missing(loaded)] == ["hf/smollm2_135m/ruler_single/qcfuse/rho=0.5,bw=3"]
    assert "INCOMPLETE: 1 cells missing." in fig13._note(bars.points(loaded, 0.5), 1)
    assert len(table_of(fig13.draw, tmp_path, "fig13")) == 5


def test_without_stages_or_decoding_nothing_is_drawn(tmp_path: Path) -> None:
    for experiment in ("fig01", "fig13"):
        write_cell(tmp_path, "full_prefill", "1", [record(0, 1.0)], experiment=experiment, bandwidth="10")
    write_cell(tmp_path, "full_prefill", "1", [record(0, 1.0, None)], experiment="cb17")
    with pytest.raises(MissingCells, match="fig13: no cell has its stages") as refused:
        fig13.draw(load(tmp_path, "fig13"), tmp_path)
    assert "selector=prophetkv,qcfuse rho=0.5 bandwidth=10 -m" in str(refused.value)
    with pytest.raises(MissingCells, match="runner.time_decode=true"):
        fig01.draw(load(tmp_path, "fig01"), tmp_path)
    with pytest.raises(MissingCells, match="cb17: no cell has a TTFT"):
        cb17.draw(load(tmp_path, "cb17"), tmp_path)


def test_fig01_shares_by_hand(tmp_path: Path) -> None:
    # selecting 2 s, the rest of prefill 1, 2 or 4 s (median 2 s), decoding 1 s
    write_cell(tmp_path, "prophetkv", "0.3", lines((3.0, 4.0, 6.0), 2.0, decode_s=1.0), experiment="fig01",
               bandwidth="10", link=matched("10"))  # fmt: skip
    write_cell(tmp_path, "full_prefill", "1", lines((8.0, 8.0, 8.0), 0.0, decode_s=2.0), experiment="fig01",
               bandwidth="10", link=matched("10"))  # fmt: skip
    # another rho, another link and a cell whose decoding was not timed stay out
    write_cell(tmp_path, "prophetkv", "0.5", lines((3.0,), 1.0), experiment="fig01", bandwidth="10")
    write_cell(tmp_path, "prophetkv", "0.3", lines((3.0,), 1.0), experiment="fig01", bandwidth="none")
    write_cell(tmp_path, "epic", "0.3", lines((3.0,), 1.0, decode_s=None), experiment="fig01", bandwidth="10")
    table = table_of(fig01.draw, tmp_path, "fig01").set_index("selector")
    assert sorted(table.index) == ["full_prefill", "prophetkv"]
    row = table.loc["prophetkv"]
    assert (row["select_s"], row["prefill_s"], row["decode_s"], row["total_s"]) == (2.0, 2.0, 1.0, 5.0)
    assert (row["select_share"], row["prefill_share"], row["decode_share"]) == (0.4, 0.4, 0.2)
    assert (row["ttft_s"], row["speedup"]) == (4.0, 2.0)
    assert list(table.loc["full_prefill", ["select_share", "prefill_share", "decode_share"]]) == [0.0, 0.8, 0.2]
    absent = [cell.selector for cell in fig01.missing(load(tmp_path, "fig01"))]
    assert absent == ["cacheblend", "fusionrag", "qcfuse"]


def test_cb17_groups_quality_and_ttft_by_device(tmp_path: Path) -> None:
    for bandwidth, late_s in (("none", 0.0), ("4.8", 1.0), ("0.5", 3.0)):
        for selector, score, ttft_s in (("full_prefill", 0.75, 4.0), ("direct_reuse", 0.25, 0.5 + late_s),
                                        ("cacheblend", 0.5, 1.0 + late_s), ("qcfuse", 0.5, 1.0 + late_s)):  # fmt: skip
            write_cell(tmp_path, selector, RHO.get(selector, "0.15"), lines((ttft_s,) * 3, 0.25, score),
                       experiment="cb17", bandwidth=bandwidth,
                       link=None if bandwidth == "none" else matched(bandwidth))  # fmt: skip
    table = table_of(cb17.draw, tmp_path, "cb17").set_index(["device", "selector"])
    assert len(table) == 12
    row = table.loc[("NVMe 4.8 GB/s", "cacheblend")]
    assert (row["score"], row["score_low"], row["n"], row["ttft_s"], row["speedup"]) == (0.5, 0.5, 3, 2.0, 2.0)
    assert table.loc[("disk 0.5 GB/s", "direct_reuse"), "ttft_s"] == 3.5
    assert table.loc[("RAM", "qcfuse"), "ttft_s"] == 1.0
    assert cb17.missing(load(tmp_path, "cb17")) == ()


def test_bars_stand_side_by_side_in_the_order_of_style() -> None:
    rows = pd.DataFrame([(b, s) for b in ("10", "none", "3") for s in ("qcfuse", "full_prefill")],
                        columns=["bandwidth", "selector"])  # fmt: skip
    fig, axes = style.figure(1, 1)
    placed = {}
    found = bars.grouped(axes[0, 0], rows, lambda x, width, row: placed.update({(*row,): round(x, 9)}))
    assert found == ["3", "10", "none"]
    assert placed[("3", "full_prefill")] == -0.2 and placed[("3", "qcfuse")] == 0.2
    assert placed[("none", "full_prefill")] == 1.8
