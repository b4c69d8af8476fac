"""Every option and experiment composes and builds; experiments expand to the cells that they claim."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from runners.cell import Cell
from tests.runners.conftest import composed

CONF = Path(__file__).resolve().parents[1] / "conf"
GROUPS = ("model", "dataset", "selector", "engine", "storage", "anchors", "runner", "logger", "scale")
OPTIONS = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
CELLS = {
    ("fig10", "embedded"): 1 * 4 * (5 * 5 + 2),
    ("fig11", "embedded"): 1 * 4 * (5 * 5 + 2),
    ("fig10", "paper"): 4 * 3 * (5 * 5 + 2),
    ("demo", "embedded"): 5 * 3 + 2,
    ("fig13", "embedded"): 3 * 8,
    ("fig13", "paper"): 4 * 3 * 8,
    ("fig01", "embedded"): 6,
    ("fig01", "paper"): 4 * 6,
    ("fig09", "embedded"): 1,
    ("cb17", "embedded"): 4 * 4,
    ("cb17", "paper"): 4 * 4 * 4,
}


def num_cells(*overrides: str) -> int:
    """Cells of an experiment's grid: a selector of one fixed rho has one cell where the others have one per rho.

    Every option of the grid is built, each beside the first ones of the other groups.
    """
    config, hydra = composed(overrides)
    params = OmegaConf.to_container(OmegaConf.merge(config, {"hydra": hydra}).hydra.sweeper.params, resolve=True)
    options = {key: str(values).split(",") for key, values in params.items()}
    first = [f"{key}={values[0]}" for key, values in options.items()]
    cells = {
        (key, value): Cell.of(*composed([*overrides, *first, f"{key}={value}"]))
        for key, values in options.items()
        for value in values
    }
    assert all("scale" not in str(cell.path) for cell in cells.values())
    fixed = sum(cells["selector", name].selector.fixed_rho is not None for name in options["selector"])
    swept = (len(options["selector"]) - fixed) * len(options.get("rho", [""]))
    return (fixed + swept) * prod(len(options.get(key, [""])) for key in ("model", "dataset", "bandwidth"))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_builds(option, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "Who?", "context": ["Ann was here."], "answers": ["Ann"]}\n')
    extra = [f"dataset.path={data}"] if option == "dataset=jsonl" else []
    cell = Cell.of(*composed([option, *extra, f"output_dir={tmp_path}"]))
    assert cell.path.is_relative_to(tmp_path) and len(cell.sha256) == 64


def test_all_groups_are_covered():
    assert {path.name for path in CONF.iterdir() if path.is_dir()} == {*GROUPS, "experiment", "critical_layers"}


@pytest.mark.parametrize("name,scale", CELLS)
def test_experiments_expand_to_their_cells(name, scale):
    given = [] if scale == "embedded" else [f"scale={scale}"]
    assert num_cells(f"experiment={name}", *given) == CELLS[name, scale]


def test_no_experiment_is_left_out():
    assert EXPERIMENTS == sorted({name for name, _ in CELLS})


@pytest.mark.parametrize("model,scale", [("smollm2_135m", "embedded"), ("qwen3_8b", "paper"), ("yi_34b", "paper")])
def test_scale_follows_the_model_unless_given(model, scale):
    assert composed([f"model={model}"])[1].runtime.choices["scale"] == scale
    other = {"embedded": "paper", "paper": "embedded"}[scale]
    assert composed([f"model={model}", f"scale={other}"])[1].runtime.choices["scale"] == other
    assert Cell.of(*composed([f"model={model}"])).model.default_scale == scale


def test_the_command_of_the_readme_parses():
    OverridesParser.create().parse_overrides(["model=qwen3_8b", "selector=qcfuse", "rho=0.1,0.2,0.3,0.4,0.5"])
