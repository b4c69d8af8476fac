"""From configurations to a runner: cells are built and checked, doubles dropped, engines shared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from qcfuse.engine.base import Engine
from runners.cell import Cell


def run_configs(jobs: Sequence[tuple[DictConfig, DictConfig]]) -> None:
    """Runs all (config, hydra config) pairs with the runner they name. Raises ValueError or OSError with one line that says what to do."""
    cells = list({cell.path: cell for cell in (Cell.of(*job) for job in jobs)}.values())
    check_writable(Path(cells[0].output_dir))
    by_runner: dict[str, list[Cell]] = {}
    for cell in cells:
        by_runner.setdefault(cell.key("runner"), []).append(cell)
    for group in by_runner.values():
        group[0].runner.run(group)


def check_writable(directory: Path) -> None:
    """Raises OSError where results could not be kept."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"output_dir={directory} cannot be made ({error.strerror}); give output_dir=DIR") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OSError(f"output_dir={directory} is not writable; give output_dir=DIR or change its permissions")


class Engines:
    """One engine at a time, built when a cell first needs it and kept while cells want the same."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._engine: Engine | None = None

    def of(self, cell: Cell) -> Engine:
        key = cell.key("model", "engine", "storage", "anchors")
        if key != self._key:
            self._engine = None
            self._engine = cell.engine.build(cell.model, cell.anchors, cell.storage)
            self._key = key
        return self._engine


def grouped(cells: Sequence[Cell], *groups: str) -> list[list[Cell]]:
    """Cells in order, those alike in these groups together."""
    groups_by_key: dict[str, list[Cell]] = {}
    for cell in cells:
        groups_by_key.setdefault(cell.key(*groups), []).append(cell)
    return list(groups_by_key.values())
