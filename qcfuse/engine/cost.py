"""What a request will cost before it runs: operation times fitted to a few measured runs, replayed with the link.

CacheBlend's loading controller (EuroSys '25, section 5) needs two estimates, the time to recompute a share of the
tokens and the time to load the rest; the pipeline's own schedule joins them into a predicted TTFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qcfuse.fusion.probe import ProbeSpec
from qcfuse.fusion.schedule import schedule_bound_s
from qcfuse.fusion.source import anchor_count
from qcfuse.types import Request, budget

FLOOR_RHO = 0.15
"""CacheBlend's smallest recompute ratio that keeps quality (section 5)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a request in tokens; num_rows_question: suffix tokens up to the end of the question."""

    num_prefix: int
    chunk_lengths: tuple[int, ...]
    num_suffix: int
    num_rows_question: int

    @classmethod
    def of(cls, request: Request) -> Shape:
        return cls(num_prefix=request.num_prefix_tokens, chunk_lengths=tuple(map(len, request.chunk_ids)),
                   num_suffix=request.num_suffix_tokens, num_rows_question=request.question_span[1])  # fmt: skip

    @property
    def num_context(self) -> int:
        return sum(self.chunk_lengths)

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_context + self.num_suffix


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One timed run: its shape, method and program (see Timeline). num_layers: of the model.

    rest_frac: bytes read after the selection over all bytes that were still unread then.
    """

    shape: Shape
    spec: ProbeSpec | None
    rho: float
    num_layers: int
    stages_s: dict[str, float]
    rest_frac: float


def stage_features(shape: Shape, spec: ProbeSpec | None, rho: float, num_layers: int) -> dict[str, list[float]]:
    """What each stage's time over the whole request is linear in; the first entry is a constant of that stage."""
    num_selected = budget(rho, shape.num_context)
    rows = num_selected + shape.num_suffix
    middle = shape.num_prefix + shape.num_context / 2
    visible = num_selected * middle + shape.num_suffix * (shape.num_tokens - shape.num_suffix / 2)
    features = {
        "engine": [1.0, shape.num_context],
        "recompute": [num_layers, num_layers * rows, num_layers * visible],
        "place": [num_layers, num_layers * (shape.num_context - num_selected + shape.num_prefix)],
        "first_token": [1.0],
    }
    if spec is not None:
        seen = shape.num_prefix + sum(anchor_count(spec.anchor_ratio, n) for n in shape.chunk_lengths)
        question = shape.num_rows_question
        deepest = max(spec.layers)
        features["probe"] = [deepest, deepest * question, deepest * question * seen]
        features["score"] = [len(spec.layers), len(spec.layers) * shape.num_context * (1 + question)]
        features["select"] = [1.0, shape.num_context]
    return features


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """coefficients: stage -> seconds per feature. rest_frac: rho -> measured share of unread bytes that are read."""

    coefficients: dict[str, tuple[float, ...]]
    rest_frac: tuple[tuple[float, float], ...]
    num_layers: int

    @classmethod
    def fit(cls, runs: Sequence[Measured]) -> CostModel:
        """Least squares of relative errors, coefficients not below 0. Raises ValueError without runs."""
        if not runs:
            raise ValueError("a cost model needs measured runs")
        stages: dict[str, tuple[list[list[float]], list[float]]] = {}
        for run in runs:
            for stage, row in stage_features(run.shape, run.spec, run.rho, run.num_layers).items():
                rows, seconds = stages.setdefault(stage, ([], []))
                rows.append(row)
                seconds.append(run.stages_s[stage])
        coefficients = {stage: tuple(_fit(np.array(rows), np.array(s))) for stage, (rows, s) in stages.items()}
        by_rho: dict[float, list[float]] = {}
        for run in runs:
            by_rho.setdefault(run.rho, []).append(run.rest_frac)
        ends = {0.0: 1.0, 1.0: 0.0}
        fracs = {**ends, **{rho: float(np.median(values)) for rho, values in by_rho.items()}}
        return cls(coefficients=coefficients, rest_frac=tuple(sorted(fracs.items())), num_layers=runs[0].num_layers)

    def stages_s(self, shape: Shape, spec: ProbeSpec | None, rho: float) -> dict[str, float]:
        """Predicted seconds of each stage that does not wait."""
        features = stage_features(shape, spec, rho, self.num_layers)
        return {stage: float(np.dot(self.coefficients[stage], row)) for stage, row in features.items()}

    def rest_bytes(self, rho: float, unread_bytes: float) -> float:
        """What is read after the selection, of the bytes that were unread then."""
        known, fracs = zip(*self.rest_frac, strict=True)
        return float(np.interp(rho, known, fracs)) * unread_bytes

    def ttft_s(
        self, shape: Shape, spec: ProbeSpec | None, rho: float, *, row_bytes: int, gb_per_s: float | None
    ) -> float:
        """Predicted TTFT: the pipeline's schedule over these operations and a link of this speed, plus its overhead.

        row_bytes: of K (or V) of one token and layer.
        """
        stages_s = self.stages_s(shape, spec, rho)
        program = self._program(shape, spec, rho, row_bytes, stages_s)
        bytes_per_s = None if gb_per_s is None else gb_per_s * 1e9
        return stages_s["engine"] + schedule_bound_s(program, bytes_per_s=bytes_per_s)

    def hiding_rho(
        self, shape: Shape, spec: ProbeSpec | None, *, row_bytes: int, gb_per_s: float, floor: float = FLOOR_RHO
    ) -> float:
        """The largest recompute ratio (in steps of 0.01, at least `floor`) whose compute takes no longer than loading.

        More than that would add to TTFT; less would leave the compute thread waiting for rows.
        """
        def is_hidden(rho: float) -> bool:
            return self.recompute_s(shape, spec, rho) <= self.load_s(shape, spec, rho, row_bytes, gb_per_s)

        steps = [step / 100 for step in range(100, 0, -1) if step / 100 > floor]
        return next((rho for rho in steps if is_hidden(rho)), floor)

    def recompute_s(self, shape: Shape, spec: ProbeSpec | None, rho: float) -> float:
        """Seconds of the recompute pass, placing included."""
        stages_s = self.stages_s(shape, spec, rho)
        return stages_s["recompute"] + stages_s["place"]

    def load_s(self, shape: Shape, spec: ProbeSpec | None, rho: float, row_bytes: int, gb_per_s: float) -> float:
        """Seconds that the link is busy after the selection."""
        return self.rest_bytes(rho, self._unread_bytes(shape, spec, row_bytes)) / (gb_per_s * 1e9)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CostModel:
        return cls(coefficients={stage: tuple(c) for stage, c in value["coefficients"].items()},
                   rest_frac=tuple(map(tuple, value["rest_frac"])), num_layers=value["num_layers"])  # fmt: skip

    def _reads_before(self, shape: Shape, spec: ProbeSpec | None, row_bytes: int) -> tuple[float, float]:
        """Bytes of one view layer and of one layer's keys (what of them the view does not bring already)."""
        if spec is None:
            return 0.0, 0.0
        anchors = sum(anchor_count(spec.anchor_ratio, n) for n in shape.chunk_lengths)
        return 2.0 * anchors * row_bytes, float((shape.num_context - anchors) * row_bytes)

    def _unread_bytes(self, shape: Shape, spec: ProbeSpec | None, row_bytes: int) -> float:
        view, keys = self._reads_before(shape, spec, row_bytes)
        stored = 2.0 * (self.num_layers - 1) * shape.num_context * row_bytes
        if spec is None:
            return stored
        return max(0.0, stored - (max(spec.layers) - 1) * view - len(spec.layers) * keys)

    def _program(
        self, shape: Shape, spec: ProbeSpec | None, rho: float, row_bytes: int, stages_s: dict[str, float]
    ) -> list[tuple[str, Any, Any, int | None]]:
        program = _Program()
        num_stored = self.num_layers - 1
        prefix = 2.0 * shape.num_prefix * row_bytes
        with_view = 0
        if spec is not None:
            with_view = max(spec.layers) - 1
            view, keys = self._reads_before(shape, spec, row_bytes)
            views = [program.read(prefix + view) for _ in range(with_view)]
            scored = [program.read(keys) for layer in spec.layers if layer]
            program.run("probe", stages_s["probe"], views, parts=max(spec.layers))
            program.run("score", stages_s["score"], scored, parts=len(spec.layers))
            program.run("select", stages_s["select"], [], parts=1)
        rest = self.rest_bytes(rho, self._unread_bytes(shape, spec, row_bytes)) / num_stored
        needs = [program.read(rest + (prefix if layer >= with_view else 0.0)) for layer in range(num_stored)]
        program.run("recompute", stages_s["place"] + stages_s["recompute"], needs, parts=self.num_layers)
        program.run("first_token", stages_s["first_token"], [], parts=1)
        return program.events


class _Program:
    """A program as a Timeline would have logged it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any, Any, int | None]] = []
        self._num_reads = 0

    def read(self, num_bytes: float) -> int:
        """Hands a read to the link."""
        self.events.append(("submit", self._num_reads, num_bytes, None))
        self._num_reads += 1
        return self._num_reads - 1

    def run(self, stage: str, seconds: float, needs: Sequence[int], *, parts: int) -> None:
        """`seconds` in equal parts; the last len(needs) parts need a read each (layer 0 is not stored)."""
        for part in range(parts):
            if (place := part - (parts - len(needs))) >= 0:
                self.events.append(("need", needs[place], None, None))
            self.events.append(("run", stage, seconds / parts, None))


def _fit(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 of least relative squared error; columns whose coefficient would be negative are left out."""
    weight = 1 / np.maximum(seconds, 1e-4)
    scale = np.maximum(np.abs(rows).max(0), 1e-30)
    columns = list(range(rows.shape[1]))
    while columns:
        solved = np.linalg.lstsq(rows[:, columns] / scale[columns] * weight[:, None], seconds * weight, rcond=None)[0]
        if (solved >= 0).all():
            coefficients = np.zeros(rows.shape[1])
            coefficients[columns] = solved / scale[columns]
            return coefficients
        columns.pop(int(np.argmin(solved)))
    return np.zeros(rows.shape[1])
