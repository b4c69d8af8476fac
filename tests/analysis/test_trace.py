from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis import fig09, trace
from analysis.__main__ import main
from analysis.cells import MissingCells
from tests.analysis.build import chrome_trace, matched, record, write_cell

SPANS = [
    ("compute", "engine", None, 0.0, 2.0, 0), ("compute", "wait_select", 1, 2.0, 6.0, 0),
    ("compute", "probe", 1, 6.0, 10.0, 0), ("compute", "score", 1, 10.0, 11.0, 0),
    ("compute", "select", None, 11.0, 12.0, 0), ("compute", "place", 1, 12.0, 13.0, 0),
    ("compute", "place", 1, 13.0, 14.0, 0), ("compute", "wait_layer", 1, 14.0, 14.0, 0),
    ("compute", "recompute", 1, 14.0, 30.0, 0), ("compute", "first_token", None, 30.0, 32.0, 0),
    ("link", "view", 1, 1.0, 5.0, 4000), ("link", "rest", 1, 12.0, 20.0, 8000), ("link", "rest", 2, 18.0, 26.0, 8000),
]  # fmt: skip


def traced(outputs: Path, **values: object) -> None:
    records = [record(0, 1.0, 0.032, num_context_tokens=1023), record(1, 1.0, 0.032), record(2, 1.0, None)]
    given = {"experiment": "fig09", "bandwidth": "10", "link": matched("10"), "dataset": "ruler_mv",
             "trace": chrome_trace(SPANS)} | values  # fmt: skip
    write_cell(outputs, "qcfuse", "0.5", records, **given)


def test_spans_come_in_milliseconds_adjacent_ones_merged_and_empty_ones_dropped(tmp_path: Path) -> None:
    traced(tmp_path)
    spans = trace.load(tmp_path, "fig09").spans
    compute, link = (spans[spans["lane"] == lane] for lane in ("compute", "link"))
    assert compute["kind"].to_list() == ["engine", "wait_select", "probe", "score", "select", "place", "recompute",
                                         "first_token"]  # fmt: skip
    place = compute[compute["kind"] == "place"].iloc[0]
    assert (place["layer"], place["start_ms"], place["end_ms"]) == (1, 12.0, 14.0)
    # the partition of the compute thread is kept to its last microsecond
    assert (compute["end_ms"] - compute["start_ms"]).sum() == 32.0
    assert link["bytes"].to_list() == [4000, 8000, 8000] and link["layer"].to_list() == [1, 1, 2]
    assert spans["num_context_tokens"].eq(1024).all() and spans["link"].eq(matched("10")).all()


def test_overlapping_reads_get_rows_of_their_own_and_count_once(tmp_path: Path) -> None:
    traced(tmp_path)
    spans = trace.load(tmp_path, "fig09").spans
    link = spans[spans["lane"] == "link"]
    assert fig09.rows_of(link) == [0, 0, 1] and trace.busy_ms(link) == 18.0
    note = fig09._note(spans)
    assert "first token comes after 32 ms" in note and "busy for 18 ms" in note and "waits for it for 4 ms" in note


def test_reads_of_one_layer_that_overlap_are_not_merged() -> None:
    spans = [("link", "rest", 1, 0.0, 4.0, 10), ("link", "rest", 1, 2.0, 6.0, 10), ("link", "rest", 1, 6.01, 7.0, 10)]
    found = trace.spans_of(chrome_trace(spans))
    assert found[["start_ms", "end_ms", "bytes"]].to_numpy().tolist() == [[0.0, 4.0, 10], [2.0, 7.0, 20]]


def test_fig09_is_drawn_from_the_trace_and_from_its_published_form(tmp_path: Path) -> None:
    traced(tmp_path)
    assert main(["publish", "fig09", "--outputs", str(tmp_path)]) == 0
    published = tmp_path / "published" / "fig09.csv"
    assert published.stat().st_size < 100_000
    assert list(pd.read_csv(published).columns) == [*trace.ABOUT, *trace.COLUMNS]
    from_cells, again = (trace.load(tmp_path, "fig09", source) for source in ("cells", "published"))
    pd.testing.assert_frame_equal(again.spans, from_cells.spans, check_dtype=False)
    assert fig09.title(again.spans) == "QCFuse, SmolLM2-135M, N = 1,024, ρ = 0.5"
    assert main(["figures", "fig09", "--outputs", str(tmp_path)]) == 0
    assert (tmp_path / "figures" / "fig09.png").stat().st_size > 8_000
    assert len(pd.read_csv(tmp_path / "figures" / "fig09.csv")) == 11


def test_of_several_bandwidths_the_main_one_is_traced(tmp_path: Path) -> None:
    traced(tmp_path)
    traced(tmp_path, bandwidth="none", link=None)
    assert set(trace.load(tmp_path, "fig09").spans["bandwidth"]) == {"10"}


def test_without_a_trace_the_figure_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(MissingCells, match=r"no finished qcfuse cell.*\n  run  python run\.py experiment=fig09$"):
        trace.load(tmp_path, "fig09")
    traced(tmp_path, trace=None)
    with pytest.raises(MissingCells, match="has a trace.json; redo with force=true"):
        trace.load(tmp_path, "fig09")


def test_damaged_traces_are_refused(tmp_path: Path) -> None:
    traced(tmp_path, trace={"spans": []})
    with pytest.raises(ValueError, match="is not a trace of this harness"):
        trace.load(tmp_path, "fig09")
