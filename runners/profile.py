"""runner=profile: which layers' question attention finds gold answer spans, with the anchor view fixed.

Based on arXiv 2606.05875, section 3 (Recall@10% of answer-span tokens per layer; critical layers are the best ones).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from tqdm import tqdm

from analysis.stats import bootstrap_mean
from qcfuse.engine.base import Engine
from qcfuse.metrics.recall_at import recall_at
from qcfuse.selectors.qcfuse import QCFuse
from qcfuse.types import Request
from runners import env
from runners.cell import Cell
from runners.cell_dir import write_atomic
from runners.dispatch import Engines, build_requests


@dataclass(frozen=True, kw_only=True)
class Profile:
    """frac: share of the context whose recall of gold tokens counts. max_top_k: longest list of layers that is tried.

    Reads the selector's anchor ratio, reduce and score_rope; every layer is scored in one probe.
    """

    frac: float
    max_top_k: int

    def __post_init__(self) -> None:
        if not 0 < self.frac <= 1:
            raise ValueError(f"runner.frac={self.frac} is outside (0, 1]")
        if self.max_top_k < 1:
            raise ValueError(f"runner.max_top_k={self.max_top_k} must be at least 1")

    def run(self, cells: Sequence[Cell]) -> None:
        engines = Engines()
        for cell in cells:
            if not isinstance(cell.selector, QCFuse):
                raise ValueError(f"runner=profile profiles selector=qcfuse, not {cell.selector.name}")
            cell.dataset.count(cell.limit)
            engine = engines.of(cell)
            requests = build_requests(cell, engine)
            path = cell.model.critical_layers.path or Path(cell.output_dir, "profile", f"{cell.model.name}.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(self.profile(cell, engine, requests), indent=1) + "\n")
            print(f"wrote {path}")

    def profile(self, cell: Cell, engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
        """Recall by layer and by top-k over all samples; the list is ordered by recall, equal ones by depth."""
        without = [request.sample_id for request in requests if not request.evidence]
        if without:
            raise ValueError(
                f"runner=profile needs answer spans, and {without[0]} has none; give dataset=ruler_profile"
            )
        scores = [
            engine.layer_importance(request, cell.selector)
            for request in tqdm(requests, desc=f"profile {cell.choices['model']}", unit="sample")
        ]
        by_layer = np.array([[self._recall(row, r) for row in s] for s, r in zip(scores, requests, strict=True)])
        ranking = sorted(range(by_layer.shape[1]), key=lambda layer: (-by_layer[:, layer].mean(), layer))
        top_k = {
            str(k): mean(self._recall(s[ranking[:k]].sum(0), r) for s, r in zip(scores, requests, strict=True))
            for k in range(1, min(self.max_top_k, len(ranking)) + 1)
        }
        estimates = [bootstrap_mean(column) for column in by_layer.T]
        return {
            "layers": ranking,
            "recall_by_layer": [round(e.value, 4) for e in estimates],
            "recall_ci95_by_layer": [[round(e.low, 4), round(e.high, 4)] for e in estimates],
            "recall_by_top_k": {k: round(value, 4) for k, value in top_k.items()},
            "recall_all_layers": round(
                mean(self._recall(s.sum(0), r) for s, r in zip(scores, requests, strict=True)), 4
            ),
            "num_samples": len(requests),
            "settings": {
                "command": " ".join(["python run.py", *cell.overrides]),
                "frac": self.frac,
                "anchors": cell.config["anchors"],
                "selector": cell.config["selector"],
                "dataset": cell.config["dataset"],
                "model_fingerprint": engine.reference_key.split("-")[0],
                "versions": env.describe()["versions"],
            },
        }

    def _recall(self, importance: np.ndarray, request: Request) -> float:
        return recall_at(importance, request.evidence, self.frac)
