"""runner=prepare: chunk caches and anchors into the store, ahead of serving; what is there is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from runners.cell import Cell
from runners.dispatch import Engines, build_requests, engine_key, grouped


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Needs a storage tier that outlives the process (storage=disk or ram_disk)."""

    def run(self, cells: Sequence[Cell]) -> None:
        engines = Engines()
        for same_engine in grouped(cells, engine_key):
            if not same_engine[0].storage.uses_disk:
                raise ValueError("runner=prepare with storage=ram would be lost at exit; give storage=ram_disk or disk")
            for same_data in grouped(same_engine, lambda cell: cell.key("dataset", "limit")):
                cell = same_data[0]
                cell.dataset.count(cell.limit)
                engine = engines.of(cell)
                requests = build_requests(cell, engine)
                label = f"prepare {cell.choices['model']} {cell.choices['dataset']}"
                made = sum(engine.prepare(request) for request in tqdm(requests, desc=label, unit="sample"))
                print(f"{label}: {made} caches made for {len(requests)} samples, the rest was there")
