"""runner=evaluate: quality of every cell sample by sample, then TTFT request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tqdm import tqdm

from runners import env
from runners.batch import Batch
from runners.cell import Cell
from runners.cell_dir import CellDir
from runners.dispatch import Engines, build_requests, engine_key, grouped


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """num_timed: how many of a cell's first samples are timed, None for all. time_decode: time whole answers too."""

    num_timed: int | None
    time_decode: bool

    def __post_init__(self) -> None:
        if self.num_timed is not None and self.num_timed < 0:
            raise ValueError(f"runner.num_timed={self.num_timed} must not be negative (null: all samples)")

    def run(self, cells: Sequence[Cell]) -> None:
        """Cells that share an engine run together, those that share a dataset share each sample's work."""
        engines = Engines()
        for same_engine in grouped(cells, engine_key):
            by_data = grouped(same_engine, lambda cell: cell.key("dataset", "limit"))
            opened = (self._open(same_data, engines) for same_data in by_data)
            batches = [batch for batch in opened if batch is not None]
            # Datasets in turn, so that an interrupted run has as many samples of each.
            turns = [[(batch, request) for request in batch.requests] for batch in batches]
            in_turn = [turn for same in zip_longest(*turns) for turn in same if turn is not None]
            for batch, request in tqdm(in_turn, desc="quality", unit="sample"):
                batch.judge(request)
            for batch in batches:
                batch.time(self.time_decode)
                batch.finish()

    def _open(self, cells: Sequence[Cell], engines: Engines) -> Batch | None:
        """Checks everything before the first sample runs; None (and nothing loaded) where all cells are done."""
        dataset, limit = cells[0].dataset, cells[0].limit
        count = dataset.count(limit)
        num_timed = count if self.num_timed is None else min(count, self.num_timed)
        dirs = [CellDir(cell, count, num_timed) for cell in cells]
        for done in [d for d in dirs if d.finished]:
            print(f"finished, skipped: {done.path} (force=true redoes it)")
        pending = [d for d in dirs if not d.finished]
        if not pending:
            return None
        engine = engines.of(cells[0])
        for cell_dir in pending:
            engine.check_selector(cell_dir.cell.selector)
        requests = build_requests(cells[0], engine)
        description = {"task_prompt_sha256": dataset.prompt_sha256, **env.describe()}
        for cell_dir in pending:
            cell_dir.open(description)
        return Batch(engine, pending, requests)
