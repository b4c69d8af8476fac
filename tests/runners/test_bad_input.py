"""Bad input: one clear line that carries the value and says what would be right, and nothing half-written."""

from __future__ import annotations

import os

import pytest

from runners.cell import Cell
from runners.compose_errors import explain
from tests.runners.conftest import composed, run_cli, run_here


@pytest.mark.parametrize(
    "argument,expected",
    [
        ("selektor=qcfuse", "did you mean selector?"),
        ("selector=qcfus", "did you mean qcfuse?"),
        ("model=qwen3_8", "did you mean qwen3_8b?"),
        ("model.pth=/x", "did you mean model.path?"),
        ("runner.num_timd=3", "did you mean runner.num_timed?"),
        ("experiment=fig99", "fig10"),
        ("limit=many", "limit=many"),
    ],
)
def test_mistyped_options_are_named_with_the_nearest(argument, expected):
    with pytest.raises(SystemExit) as stopped:
        explain([argument])
    message = str(stopped.value)
    assert message.startswith("error: ") and expected in message and "\n" not in message
    assert argument.split("=")[0] in message


def test_good_arguments_pass():
    explain(["selector=qcfuse,epic", "rho=0.1,0.2", "-m", "experiment=fig10", "hydra.verbose=true"])


@pytest.mark.parametrize("rho", ["1.5", "-0.1", "much", "nan"])
def test_rho_outside_0_to_1(tiny_cell, rho):
    with pytest.raises(ValueError, match=f"rho=.?{rho}"):
        Cell.of(*composed([*tiny_cell, f"rho={rho}"]))


@pytest.mark.parametrize(
    "override,expected",
    [
        ("selector.layers=[1,9]", "layers 0 to 3, not .9."),
        ("selector.layers=default", "selector.layers=default|has layers 0 to 3"),
        ("selector.anchor_ratio=1.2", "anchor_ratio=1.2"),
        ("limit=5000", "limit=5000 is larger than the 200"),
        ("limit=0", "limit=0 must be at least 1"),
        ("bandwidth=-5", "bandwidth=-5"),
        ("rho=auto", "rho=auto"),
        ("reduce=median", "reduce='median'"),
        ("model.max_context=300", "exceed the model.s window of 300"),
        ("anchors.scope=token", "anchors.scope='token'"),
        ("engine.num_threads=0", "engine.num_threads=0"),
    ],
)
def test_impossible_values(tiny_cell, tmp_path, override, expected):
    with pytest.raises(ValueError, match=expected):
        run_here([*tiny_cell, override])
    assert not list((tmp_path / "out").rglob("DONE"))


def test_an_error_ends_the_command_with_one_line(tmp_path):
    done = run_cli("model=qwen3_8b", f"model.path={tmp_path}/none", f"output_dir={tmp_path}", "logger=none")
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode != 0 and len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ") and "none" in errors[0]


def test_outputs_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SystemExit, match="error: output_dir=.*cannot be made"):
        explain([f"output_dir={blocked}/out"])
    if os.geteuid():
        sealed = tmp_path / "sealed"
        sealed.mkdir(mode=0o500)
        with pytest.raises(SystemExit, match="error: output_dir=.*not writable"):
            explain([f"output_dir={sealed}"])


def test_chunks_of_one_token_run(tiny_cell, tmp_path):
    """Legal, if odd: one-token chunks (a chunk's own start is all that it has)."""
    from dataclasses import replace

    from qcfuse.engine.base import Arm
    from runners.dispatch import Engines
    from tests.factories import selector

    cell = Cell.of(*composed(tiny_cell))
    engine = Engines().of(cell)
    request = cell.dataset.request(0, engine.tokenizer, cell.model.template)
    ones = tuple((i,) for chunk in request.chunk_ids for i in chunk)[:9]
    request = replace(request, chunk_ids=ones)
    arm = Arm(selector=selector("qcfuse", layers=[1]), rho=0.5, seed=0)
    (quality,) = engine.judge(request, [arm], engine.reference(request))
    assert quality.selection.selected.shape == (4,)
