"""From configurations to a runner: cells are built and checked, doubles dropped, engines shared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from omegaconf import DictConfig
from tqdm import tqdm

from qcfuse.engine.base import Engine
from qcfuse.types import Request
from runners.cell import Cell


def run_configs(jobs: Sequence[tuple[DictConfig, DictConfig]]) -> None:
    """Runs all (config, hydra config) pairs with the runner they name.

    Raises ValueError or OSError with one line that says what to do.
    """
    cells = list({cell.path: cell for cell in (Cell.of(*job) for job in jobs)}.values())
    by_runner: dict[str, list[Cell]] = {}
    for cell in cells:
        by_runner.setdefault(cell.key("runner"), []).append(cell)
    for group in by_runner.values():
        group[0].runner.run(group)


class Engines:
    """One engine at a time, built when a cell first needs it and kept while cells want the same."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._engine: Engine | None = None

    def of(self, cell: Cell) -> Engine:
        key = engine_key(cell)
        if key != self._key:
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            self._engine = cell.engine.build(cell.model, cell.anchors, cell.storage)
            self._key = key
        return self._engine


def engine_key(cell: Cell) -> str:
    """Equal for cells that one engine serves: how fast the storage link is set is no part of it."""
    storage = {key: value for key, value in cell.config["storage"].items() if key != "match"}
    storage["link"] = {key: value for key, value in storage["link"].items() if key != "bandwidth_gb_per_s"}
    return f"{cell.key('model', 'engine', 'anchors')} {json.dumps(storage, sort_keys=True, default=str)}"


def build_requests(cell: Cell, engine: Engine) -> list[Request]:
    """The cell's requests in the engine's ids. Raises ValueError where one does not fit the model's window."""
    label = f"requests {cell.choices['dataset']}"
    requests = [
        cell.dataset.request(index, engine.tokenizer, cell.model.template)
        for index in tqdm(range(cell.dataset.count(cell.limit)), desc=label, unit="sample", leave=False)
    ]
    for request in requests:
        engine.check(request)
    return requests


def grouped(cells: Sequence[Cell], key: Callable[[Cell], str]) -> list[list[Cell]]:
    """Cells in order, those of equal key together."""
    groups_by_key: dict[str, list[Cell]] = {}
    for cell in cells:
        groups_by_key.setdefault(key(cell), []).append(cell)
    return list(groups_by_key.values())
