"""Intervals, paired tests, the normalised score and the matched-quality speed-up (design: fair comparison).

Every random draw is seeded, so that a table drawn twice is the same table. Intervals are percentile bootstraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
import pandas as pd

from analysis.cells import ENDPOINT_RHO, Cell, MissingCells

PAPER_METHODS = ("full_prefill", "direct_reuse", "cacheblend", "epic", "fusionrag", "prophetkv", "qcfuse")
PAPER_RHOS = (0.1, 0.2, 0.3, 0.4, 0.5)
PANEL = ["experiment", "engine", "model", "dataset", "bandwidth", "variant"]
NUM_RESAMPLES = 10_000
SEED = 0
MATCH_MARGIN = 0.02
"""A point matches full prefill while its mean score is lower by no more than this (scores run from 0 to 1)."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95% interval and the number of samples behind it (NaN and n = 0 without samples)."""

    value: float
    low: float
    high: float
    n: int


@lru_cache(maxsize=8)
def _draws(n: int, seed: int) -> np.ndarray:
    """[NUM_RESAMPLES, n] indices of bootstrap samples; equal n share them, which pairs whatever is compared."""
    return np.random.default_rng(seed).integers(0, n, size=(NUM_RESAMPLES, n), dtype=np.int32)


@lru_cache(maxsize=8)
def _weights(n: int, seed: int) -> np.ndarray:
    """[NUM_RESAMPLES, n] share of each sample in each draw: resampled means are then one matrix product."""
    rows = np.arange(NUM_RESAMPLES)[:, None] * n
    counts = np.bincount((_draws(n, seed) + rows).ravel(), minlength=NUM_RESAMPLES * n)
    return counts.reshape(NUM_RESAMPLES, n) / n


def _interval(resampled: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)


def bootstrap_mean(values: Sequence[float], seed: int = SEED) -> Estimate:
    """Mean of the values that are not NaN, with its percentile bootstrap interval."""
    return bootstrap_average([np.asarray(values, dtype=float)], seed)


def bootstrap_average(strata: Sequence[np.ndarray], seed: int = SEED) -> Estimate:
    """Mean over strata (datasets) of the mean in each, samples being drawn within each stratum.

    NaN values are left out. n counts all samples; a stratum without a value makes the estimate NaN with n = 0.
    """
    known = [values[~np.isnan(values)] for values in strata]
    if not all(values.size for values in known):
        return Estimate(value=np.nan, low=np.nan, high=np.nan, n=0)
    low, high = _interval(np.mean([_weights(v.size, seed + i) @ v for i, v in enumerate(known)], axis=0))
    value = float(np.mean([values.mean() for values in known]))
    return Estimate(value=value, low=low, high=high, n=sum(values.size for values in known))


def paired(values: pd.Series, baseline: pd.Series) -> np.ndarray:
    """values - baseline over the sample ids (the index) that both have; ValueError where they share none."""
    common = values.index.intersection(baseline.index)
    differences = values.loc[common].to_numpy(float) - baseline.loc[common].to_numpy(float)
    if not (differences := differences[~np.isnan(differences)]).size:
        raise ValueError(f"no sample in common: {list(values.index[:3])}... against {list(baseline.index[:3])}...")
    return differences


def paired_difference(values: pd.Series, baseline: pd.Series, seed: int = SEED) -> Estimate:
    """Mean of values - baseline, paired by sample id, with its bootstrap interval over samples."""
    return bootstrap_mean(paired(values, baseline), seed)


def sign_flip_p(differences: Sequence[float], seed: int = SEED) -> float:
    """Two-sided p of the sign-flip permutation test that paired differences are symmetric about 0.

    Exact over all 2^n flips while these are no more than NUM_RESAMPLES, else over NUM_RESAMPLES random flips.
    """
    moved = np.asarray([value for value in differences if value != 0], dtype=float)
    if not moved.size:
        return 1.0
    exact = 2**moved.size <= NUM_RESAMPLES
    if exact:
        bits = np.arange(2**moved.size)[:, None] >> np.arange(moved.size)
    else:
        bits = np.random.default_rng(seed).integers(0, 2, size=(NUM_RESAMPLES, moved.size))
    sums = np.abs((1 - 2 * (bits & 1)) @ moved)
    reached = int((sums >= abs(moved.sum()) * (1 - 1e-12)).sum())
    return reached / len(sums) if exact else (reached + 1) / (len(sums) + 1)


def mcnemar_p(values: Sequence[bool], baseline: Sequence[bool]) -> float:
    """Exact two-sided McNemar p of two paired yes/no results: binomial over the pairs that disagree."""
    if len(values) != len(baseline):
        raise ValueError(f"McNemar pairs samples, got {len(values)} against {len(baseline)}")
    only_first = sum(bool(a) and not b for a, b in zip(values, baseline, strict=True))
    only_second = sum(bool(b) and not a for a, b in zip(values, baseline, strict=True))
    num_pairs, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(num_pairs, i) for i in range(fewer + 1)) / 2**num_pairs)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given; NaN (not tested) stays NaN and is not counted."""
    tested = sorted((p, i) for i, p in enumerate(p_values) if not np.isnan(p))
    adjusted, running = [float("nan")] * len(p_values), 0.0
    for rank, (p, i) in enumerate(tested):
        running = max(running, min(1.0, (len(tested) - rank) * p))
        adjusted[i] = running
    return adjusted


def normalised_score(
    summary: pd.DataFrame, methods: Sequence[str] = PAPER_METHODS, rhos: Sequence[float] = PAPER_RHOS
) -> pd.Series:
    """Min-max of `summary.score` within each panel; every row is drawn in the scale that `methods` x `rhos` define.

    summary: one row a cell, with the columns of analysis.cells.KEYS and `score`. Returns values aligned with summary,
    NaN over a panel whose scale is flat (max = min). Raises MissingCells while a cell of a scale is missing.
    """
    result = pd.Series(np.nan, index=summary.index)
    bounds = scale_bounds(summary, methods, rhos)
    for key, panel in summary.groupby(PANEL):
        low, high = bounds[key]
        if high > low:
            result[panel.index] = (panel["score"] - low) / (high - low)
    return result


def scale_bounds(
    summary: pd.DataFrame, methods: Sequence[str] = PAPER_METHODS, rhos: Sequence[float] = PAPER_RHOS
) -> dict[tuple, tuple[float, float]]:
    """Panel (values of PANEL) -> the smallest and largest mean score among `methods` x `rhos`.

    full_prefill and direct_reuse count at rho = 1 and 0 only. Raises MissingCells, which names what is missing.
    """
    wanted = [(method, rho) for method in methods
              for rho in ([ENDPOINT_RHO[method]] if method in ENDPOINT_RHO else rhos)]  # fmt: skip
    panels = dict(list(summary.groupby(PANEL)))
    bounds, missing = {}, {}
    for key, panel in panels.items():
        home = scale_panel(key, panels)
        scores = {(row.selector, round(row.rho, 9)): row.score for row in panels.get(home, panel).itertuples()}
        missing |= {cell_of(home, method, rho): None for method, rho in wanted if (method, rho) not in scores}
        known = [scores[cell] for cell in wanted if cell in scores]
        bounds[key] = (min(known, default=np.nan), max(known, default=np.nan))
    if missing:
        cells = tuple(missing)
        raise MissingCells(cells[0].experiment, cells, "the normalised score needs every cell of its scale")
    return bounds


def scale_panel(key: tuple, panels: dict[tuple, pd.DataFrame]) -> tuple:
    """The panel whose full prefill `key` is compared with: its own, or that without overrides where it has none."""
    return key if (panels[key]["selector"] == "full_prefill").any() else (*key[:-1], "")


def cell_of(panel_key: tuple, selector: str, rho: float) -> Cell:
    """The cell of `selector` at `rho` in the panel whose PANEL values are `panel_key`."""
    return Cell(**dict(zip(PANEL, panel_key, strict=True)), selector=selector, rho=f"{rho:g}")


@dataclass(frozen=True, kw_only=True)
class Arms:
    """Full prefill (row 0) and the points of one method over rho (rows 1...) on one dataset, paired by sample.

    scores: [A, n]; ttft_s: [A, m] seconds. Time may be measured on fewer samples than quality.
    """

    scores: np.ndarray
    ttft_s: np.ndarray

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.ttft_s) or len(self.scores) < 2 or not self.scores.size or not self.ttft_s.size:
            raise ValueError(f"scores {self.scores.shape} and ttft_s {self.ttft_s.shape} must both be [A, samples], "
                             "A >= 2: full prefill first, then the points")  # fmt: skip


def ttft_ratio(strata: Sequence[np.ndarray], seed: int = SEED) -> Estimate:
    """TTFT ratio of two arms measured on the same samples: strata of [m, 2] seconds, the slower arm first.

    Medians within each stratum, averaged over strata, then divided; the two columns are resampled together.
    """
    if not all(len(ttft_s) for ttft_s in strata):
        return Estimate(value=np.nan, low=np.nan, high=np.nan, n=0)
    slow_s, fast_s = np.mean([np.median(ttft_s, axis=0) for ttft_s in strata], axis=0)
    drawn = [[_drawn_medians(column, seed + i) for column in ttft_s.T] for i, ttft_s in enumerate(strata)]
    drawn_slow_s, drawn_fast_s = np.mean(drawn, axis=0)
    low, high = _interval(drawn_slow_s / drawn_fast_s)
    return Estimate(value=float(slow_s / fast_s), low=low, high=high, n=sum(map(len, strata)))


def _drawn_medians(values: np.ndarray, seed: int) -> np.ndarray:
    """[n] -> [NUM_RESAMPLES] medians of the bootstrap samples."""
    return np.median(values[_draws(len(values), seed)], axis=1)


def matched_speedup(datasets: Sequence[Arms], margin: float = MATCH_MARGIN, seed: int = SEED) -> tuple[Estimate, float]:
    """TTFT of full prefill over that of the method at matched quality, and the share of resamples with a match.

    Rule: of the method's points, the one of smallest TTFT whose mean score (averaged over datasets) is not below
    full prefill's by more than `margin`. TTFT is the mean over datasets of the medians. Each resample draws samples
    within every dataset and chooses the point anew, so the interval covers the choice; resamples without a match are
    left out of it and show in the share. value is NaN where no point matches.
    """
    if not 0 <= margin <= 1:
        raise ValueError(f"margin={margin} is outside [0, 1]; scores run from 0 to 1")
    scores = np.mean([arms.scores.mean(axis=1) for arms in datasets], axis=0)
    ttft_s = np.mean([np.median(arms.ttft_s, axis=1) for arms in datasets], axis=0)
    drawn_scores = np.mean([arms.scores @ _weights(arms.scores.shape[1], seed + i).T
                            for i, arms in enumerate(datasets)], axis=0)  # fmt: skip
    drawn_ttft_s = np.mean([[_drawn_medians(row, seed + i) for row in arms.ttft_s]
                            for i, arms in enumerate(datasets)], axis=0)  # fmt: skip
    value = float(_speedups(scores[:, None], ttft_s[:, None], margin)[0])
    drawn = _speedups(drawn_scores, drawn_ttft_s, margin)
    matched = drawn[~np.isnan(drawn)]
    low, high = _interval(matched) if matched.size else (np.nan, np.nan)
    n = min(arms.scores.shape[1] for arms in datasets)
    return Estimate(value=value, low=low, high=high, n=n), matched.size / len(drawn)


def _speedups(scores: np.ndarray, ttft_s: np.ndarray, margin: float) -> np.ndarray:
    """scores, ttft_s: [A, B], full prefill first -> [B], NaN where nothing matches. 1e-9 forgives rounding of means."""
    eligible = np.where(scores[1:] >= scores[0] - margin - 1e-9, ttft_s[1:], np.inf).min(axis=0)
    return np.where(np.isinf(eligible), np.nan, ttft_s[0] / eligible)
