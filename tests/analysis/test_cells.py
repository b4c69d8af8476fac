from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import cells, trace
from tests.analysis import build
from tests.analysis.build import record, write_cell


def test_every_part_of_the_path_and_of_the_record_arrives(tmp_path: Path) -> None:
    records = [record(0, 0.25, 1.5, answer_kl=0.125, top1_agrees=True), record(1, 1.0, None)]
    write_cell(tmp_path, "qcfuse", "0.35", records,
               bandwidth="10", variant="layers=later_list,seed=3", model="qwen3_8b", dataset="ruler_vt")  # fmt: skip
    loaded = cells.load(tmp_path, "fig10")
    first, second = loaded.frame.to_dict("records")
    assert [first[key] for key in cells.KEYS] == ["fig10", "hf", "qwen3_8b", "ruler_vt", "qcfuse", 0.35, "10",
                                                 "layers=later_list,seed=3"]  # fmt: skip
    assert (first["score"], first["ttft_s"], first["answer_kl"], first["top1_agrees"]) == (0.25, 1.5, 0.125, 1.0)
    assert first["metric"] == "string_match_all" and second["sample_id"] == "s001" and np.isnan(second["ttft_s"])
    assert "1 cells" in loaded.source


def test_a_cell_without_done_is_not_read_and_is_named(tmp_path: Path) -> None:
    write_cell(tmp_path, "epic", "0.1", [record(0, 1.0)])
    write_cell(tmp_path, "epic", "0.5", [record(0, 1.0)], done=False)
    loaded = cells.load(tmp_path, "fig10")
    assert loaded.frame["rho"].to_list() == [0.1]
    assert [str(cell) for cell in loaded.unfinished] == ["hf/smollm2_135m/ruler_single/epic/rho=0.5,bw=none"]


def test_nothing_at_all_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(cells.MissingCells, match=r"python run\.py experiment=fig10$"):
        cells.load(tmp_path, "fig10")


def test_the_command_names_groups_rhos_bandwidth_and_overrides() -> None:
    base = {"experiment": "fig10", "engine": "hf", "model": "m", "dataset": "d"}
    missing = (cells.Cell(**base, selector="epic", rho="0.3", bandwidth="10", variant="scale=paper"),
               cells.Cell(**base, selector="epic", rho="0.1", bandwidth="10", variant="scale=paper"),
               cells.Cell(**base, selector="full_prefill", rho="1", bandwidth="10", variant="scale=paper"))  # fmt: skip
    assert cells.command_for("fig10", missing) == (
        "python run.py experiment=fig10 engine=hf model=m dataset=d selector=epic,full_prefill rho=0.1,0.3 "
        "bandwidth=10 scale=paper -m"
    )


def test_published_table_gives_back_what_the_cells_held(tmp_path: Path) -> None:
    write_cell(tmp_path, "epic", "0.1", [record(0, 1 / 3, 1.23456789, answer_kl=2.5e-7, top1_agrees=False),
                                         record(1, 0.0, None, error="out of memory")], bandwidth="10")  # fmt: skip
    from_cells = cells.load(tmp_path, "fig10").frame
    path = cells.publish(tmp_path, "fig10")
    assert path == tmp_path / "published" / "fig10.csv"
    again = cells.load(tmp_path, "fig10", "published")
    assert again.source == str(path)
    columns = cells.PUBLISHED_COLUMNS
    pd.testing.assert_frame_equal(again.frame[columns], from_cells[columns], rtol=5e-5, check_dtype=False)
    assert again.frame["failed"].to_list() == [False, True]
    assert ",0.33333," in path.read_text() and "1.2346" in path.read_text()


def test_stages_bytes_and_link_arrive_and_survive_publishing(tmp_path: Path) -> None:
    timed = record(0, 1.0, 2.0, e2e_s=2.5, pipeline_efficiency=0.75,
                   stages_s=build.stages(probe=0.25, wait_select=0.5, score=0.125, select=0.0625, recompute=1.0),
                   bytes={"total_kv": 800, "prefix": 7, "before_recompute": 100, "requested": 500, "device": None,
                          "wasted": 3})  # fmt: skip
    write_cell(tmp_path, "qcfuse", "0.5", [timed, record(1, 1.0, None)], bandwidth="10", link=build.matched("10"))
    cells.publish(tmp_path, "fig10")
    for source in ("cells", "published"):
        first, second = cells.load(tmp_path, "fig10", source).frame.to_dict("records")
        assert (first["select_s"], first["e2e_s"], first["pipeline_efficiency"]) == (0.9375, 2.5, 0.75)
        found = [first[f"bytes_{name}"] for name in ("total_kv", "before_recompute", "requested", "wasted")]
        assert found == [800, 100, 500, 3] and np.isnan(first["bytes_device"])
        assert np.isnan(second["select_s"]) and np.isnan(second["bytes_requested"])
        assert second["link"] == "10 GB/s compute-matched to Qwen3-8B on H20 (0.27 GB/s here, reading error 6%)"


def test_a_table_published_before_the_link_existed_is_read(tmp_path: Path) -> None:
    write_cell(tmp_path, "epic", "0.1", [record(0, 1.0, stages_s=build.stages(probe=1.0))])
    path = cells.publish(tmp_path, "fig10")
    pd.read_csv(path).drop(columns=cells.ADDED).to_csv(path, index=False)
    frame = cells.load(tmp_path, "fig10", "published").frame
    assert frame["link"].to_list() == [""] and frame[cells.ADDED[1:]].isna().all(axis=None)
    assert list(frame.loc[0, ["score", "ttft_s"]]) == [1.0, 1.0]


def test_the_tracked_tables_can_be_read() -> None:
    tracked = Path(cells.__file__).parents[1] / "outputs" / "published"
    frame = cells.load(tracked.parent, "fig10", "published").frame
    assert frame["ttft_s"].notna().any() and set(frame["bandwidth"]) == {"10"}
    assert frame["link"].str.contains("compute-matched").all()
    swept = cells.load(tracked.parent, "fig13", "published").frame
    assert set(swept["bandwidth"]) == {str(speed) for speed in range(3, 11)} and swept["select_s"].notna().all()
    assert len(trace.load(tracked.parent, "fig09", "published").spans)


def test_cells_come_before_the_published_table(tmp_path: Path) -> None:
    cell = write_cell(tmp_path, "epic", "0.1", [record(0, 1.0)])
    cells.publish(tmp_path, "fig10")
    assert "cells of" in cells.load(tmp_path, "fig10").source
    (cell / "DONE").unlink()
    assert cells.load(tmp_path, "fig10").source.endswith("published/fig10.csv")
    with pytest.raises(cells.MissingCells):
        cells.load(tmp_path, "fig10", "cells")


def test_one_id_for_two_prompts_is_refused(tmp_path: Path) -> None:
    write_cell(tmp_path, "epic", "0.1", [record(0, 1.0)])
    write_cell(tmp_path, "qcfuse", "0.1", [record(0, 1.0, prompt_sha256="f" * 64)])
    with pytest.raises(ValueError, match="s000.*different prompts"):
        cells.load(tmp_path, "fig10")


@pytest.mark.parametrize(("text", "why"), [('{"sample_id": "s0"', "line 1, is not JSON"), ("", "is empty")])
def test_damaged_records_of_a_finished_cell_are_refused(tmp_path: Path, text: str, why: str) -> None:
    (write_cell(tmp_path, "epic", "0.1", [record(0, 1.0)]) / "records.jsonl").write_text(text)
    with pytest.raises(ValueError, match=why):
        cells.load(tmp_path, "fig10")


def test_a_sample_recorded_twice_is_refused(tmp_path: Path) -> None:
    write_cell(tmp_path, "epic", "0.1", [record(0, 1.0), record(0, 0.0)])
    with pytest.raises(ValueError, match="'s000'.*more than once"):
        cells.load(tmp_path, "fig10")


def test_a_published_table_without_a_column_is_refused(tmp_path: Path) -> None:
    write_cell(tmp_path, "epic", "0.1", [record(0, 1.0)])
    path = cells.publish(tmp_path, "fig10")
    pd.read_csv(path).drop(columns="score").to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"lacks the columns \['score'\]"):
        cells.load(tmp_path, "fig10", "published")


def test_analysis_imports_neither_torch_nor_the_library() -> None:
    code = ("import sys, analysis.__main__; loaded = {name.split('.')[0] for name in sys.modules};"
            "print(sorted(loaded & {'torch', 'transformers', 'qcfuse', 'wandb'}))")  # fmt: skip
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            cwd=Path(cells.__file__).parents[1])  # fmt: skip
    assert result.stdout.strip() == "[]"
