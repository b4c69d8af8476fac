from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from analysis.__main__ import main
from tests.analysis.build import plausible, record, write_cell


def test_figures_draws_what_it_can_and_lists_the_rest(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(outputs / "fig10", tmp_path / "fig10")
    (tmp_path / "fig10/hf/smollm2_135m/ruler_vt/epic/rho=0.5,bw=none/DONE").unlink()
    assert main(["figures", "--outputs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"fig10: {tmp_path}/figures/fig10.png" in said and "from 15 cells of" in said
    assert "fig10: incomplete, 1 cells missing:\n  missing  hf/smollm2_135m/ruler_vt/epic/rho=0.5,bw=none" in said
    assert "fig11: not drawn" in said and "python run.py experiment=demo" in said
    assert (tmp_path / "figures/fidelity.png").exists() and not (tmp_path / "figures/fig11.png").exists()


def test_a_named_figure_that_cannot_be_drawn_fails(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["figures", "fig10", "--outputs", str(tmp_path)]) == 1
    assert "python run.py experiment=fig10" in capsys.readouterr().out
    assert main(["figures", "--outputs", str(tmp_path)]) == 0


def test_a_mistyped_figure_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["figures", "fig14", "--outputs", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "no figure is called 'fig14'; did you mean fig13?\n"


def test_demo_draws_and_prints_quality_fidelity_and_ttft(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plausible(tmp_path, experiment="demo", num_samples=3, num_timed=3, datasets=("ruler_single",), methods=("qcfuse",),
              rhos=(0.5,))  # fmt: skip
    assert main(["demo", "--log", "--outputs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "figures/demo.png").exists()
    logged = [path.name for path in (tmp_path / "wandb").glob("offline-run-*/files/media/images/*.png")]
    assert sorted(name.split("_0_")[0].split("_1_")[0] for name in logged) == ["demo", "demo_fidelity"]
    assert said.splitlines()[-4].split()[:4] == ["method", "ρ", "n", "score"]
    assert said.splitlines()[-1].startswith("QCFuse        0.5  3")


def test_publish_then_draw_and_tabulate_without_cells(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for dataset in ("ruler_mq", "ruler_vt"):
        write_cell(tmp_path, "full_prefill", "1", [record(0, 1.0, 6.0), record(1, 0.5, 6.0)], dataset=dataset)
        write_cell(tmp_path, "qcfuse", "0.3", [record(0, 0.5, 2.0, answer_kl=0.25, answer_agreement_frac=0.75),
                                               record(1, 0.0, None, error="x")], dataset=dataset)  # fmt: skip
    assert main(["publish", "fig10", "--outputs", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "fig10")
    assert main(["table", "fig10", "--outputs", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "from " + str(tmp_path / "published" / "fig10.csv") in said.err
    line = next(line for line in said.out.splitlines() if "| QCFuse" in line)
    row = [cell.strip() for cell in line.split("|")[1:-1]]
    assert row == ["QCFuse", "0.3", "4", "2", "0.250 [0.000, 0.500]", "-0.500 [-0.500, -0.500]", "0.12", "0.25",
                   "75.0%", "2.00", "3.00× [3.00, 3.00]"]  # fmt: skip
    assert main(["table", "fig10", "--by-dataset", "--outputs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("| QCFuse | 0.3 | 2 | 1 |") == 2


def test_damaged_cells_are_one_line_and_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (write_cell(tmp_path, "epic", "0.1", [record(0, 1.0)]) / "records.jsonl").write_text("{")
    assert main(["table", "fig10", "--outputs", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_one_sample_has_no_interval_and_rounding_is_no_divergence(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_cell(tmp_path, "full_prefill", "1", [record(0, 1.0, 6.0, answer_kl=3e-12)])
    write_cell(tmp_path, "epic", "0.3", [record(0, 0.5, 2.0, answer_kl=0.5)])
    assert main(["table", "fig10", "--outputs", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| Full", "| EPIC"))]
    assert lines == ["| Full prefill | 1 | 1 | 0 | 1.000 | – | – | <1e-6 | – | 6.00 | – |",
                     "| EPIC | 0.3 | 1 | 0 | 0.500 | -0.500 | 1 | 0.5 | – | 2.00 | 3.00× |"]  # fmt: skip
