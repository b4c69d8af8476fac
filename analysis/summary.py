"""One row a cell, or a point averaged over datasets: means with intervals, TTFT, and what differs from full prefill."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis import stats
from analysis.cells import ENDPOINT_RHO, KEYS, Cell, Loaded

MEANS = {"score": "score", "answer_kl": "answer_kl", "answer_agreement": "answer_agreement_frac",
         "first_token_kl": "first_token_kl", "top1_agreement": "top1_agrees"}  # fmt: skip
"""Column of the summary -> column of the records; each brings <name>_low, <name>_high and <name>_n along."""

MEDIANS = ("decode_s", "select_s", "pipeline_efficiency", "effective_recompute_frac")
Pair = tuple[pd.DataFrame, pd.DataFrame]


def summarise(frame: pd.DataFrame, over: Sequence[str] = ()) -> pd.DataFrame:
    """frame of analysis.cells.load -> one row a cell, sorted as KEYS; or one row a point averaged over the columns
    `over` (dataset, model), where a point that some of the averaged panels lack is left out.

    Columns: KEYS, metric, n, n_failed, MEANS (with _low, _high, _n), diff_full (paired score difference to full
    prefill), p_full (sign-flip), p_full_holm (Holm over all rows), ttft_p20_s, ttft_s (median), ttft_p80_s, ttft_n,
    speedup (TTFT of full prefill over this cell's, on their common samples), the medians MEDIANS and prefill_s (TTFT
    without selection), select_share (select_s over ttft_s), link (of the first cell averaged). A failed sample counts
    with score 0 and has no TTFT. NaN where nothing was measured.
    """
    panels = dict(list(frame.groupby(stats.PANEL)))
    points: dict[tuple, list[Pair]] = {}
    averaged = {name: f"mean of {frame[name].nunique()}" for name in over}
    for key, panel in panels.items():
        home = panels.get(stats.scale_panel(key, panels), panel)
        full = home[home["selector"] == "full_prefill"]
        for point, records in panel.groupby(["selector", "rho"], dropna=False):
            kept = tuple(value for name, value in zip(stats.PANEL, key, strict=True) if name not in over)
            points.setdefault((*kept, *point), []).append((records, full))
    most: dict[tuple, int] = {}
    for point, pairs in points.items():
        most[point[:-2]] = max(most.get(point[:-2], 0), len(pairs))
    rows = [_describe(pairs) | averaged for point, pairs in points.items() if len(pairs) == most[point[:-2]]]
    summary = pd.DataFrame(rows).sort_values(KEYS, ignore_index=True)
    return summary.assign(p_full_holm=stats.holm(summary["p_full"].to_list()))


def _describe(pairs: list[Pair]) -> dict:
    """pairs: per averaged panel, the records of one point and those of full prefill."""
    all_records = [records for records, _ in pairs]
    first = all_records[0].iloc[0]
    row = {name: first[name] for name in (*KEYS, "metric", "link")}
    row |= {"n": sum(map(len, all_records)), "n_failed": int(sum(records["failed"].sum() for records in all_records))}
    for name, column in MEANS.items():
        row |= _flat(name, stats.bootstrap_average([records[column].to_numpy(float) for records in all_records]))
    row |= _times(all_records)
    return row | (_against_full(pairs) if first["selector"] != "full_prefill" else _nothing_against_full())


def _times(all_records: list[pd.DataFrame]) -> dict:
    ttft_s = [records["ttft_s"].dropna().to_numpy() for records in all_records]
    timed = all(len(values) for values in ttft_s)
    quantiles = np.mean([np.quantile(v, [0.2, 0.5, 0.8]) for v in ttft_s], axis=0) if timed else [np.nan] * 3
    row = dict(zip(("ttft_p20_s", "ttft_s", "ttft_p80_s"), quantiles, strict=True))
    row["ttft_n"] = sum(map(len, ttft_s)) if timed else 0
    for name in MEDIANS:
        row[name] = np.mean([records[name].median() for records in all_records])
    row["prefill_s"] = np.mean([(records["ttft_s"] - records["select_s"]).median() for records in all_records])
    return row | {"select_share": row["select_s"] / row["ttft_s"]}


def _against_full(pairs: list[Pair]) -> dict:
    columns = ["sample_id", "score", "ttft_s"]
    indexed = [
        (records[columns].set_index("sample_id"), full[columns].set_index("sample_id")) for records, full in pairs
    ]
    if not all(records.index.isin(full.index).any() for records, full in indexed):
        return _nothing_against_full()
    differences = [stats.paired(records["score"], full["score"]) for records, full in indexed]
    ttft_s = [_both_timed(full["ttft_s"], records["ttft_s"]) for records, full in indexed]
    return {**_flat("diff_full", stats.bootstrap_average(differences)),
            "p_full": stats.sign_flip_p(np.concatenate(differences)),
            **_flat("speedup", stats.ttft_ratio(ttft_s))}  # fmt: skip


def _both_timed(full_s: pd.Series, method_s: pd.Series) -> np.ndarray:
    """[m, 2] TTFT of the samples that both have, full prefill first."""
    common = full_s.index.intersection(method_s.index)
    times_s = np.stack([full_s.loc[common], method_s.loc[common]], axis=1)
    return times_s[~np.isnan(times_s).any(axis=1)]


def _nothing_against_full() -> dict:
    nothing = stats.Estimate(value=np.nan, low=np.nan, high=np.nan, n=0)
    return {**_flat("diff_full", nothing), "p_full": np.nan, **_flat("speedup", nothing)}


def _flat(name: str, estimate: stats.Estimate) -> dict:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high, f"{name}_n": estimate.n}


def holes(loaded: Loaded) -> tuple[Cell, ...]:
    """Cells that the grid of an experiment implies and `loaded` lacks: those begun and not finished, and those that
    another panel of the same bandwidth and overrides has."""
    missing = dict.fromkeys(loaded.unfinished)
    for _, sweep in loaded.frame.groupby(["bandwidth", "variant"]):
        points = sweep[["selector", "rho"]].drop_duplicates()
        swept = sorted(points.loc[~points["selector"].isin(ENDPOINT_RHO), "rho"].dropna().unique())
        wanted = [(selector, rho) for selector in sorted(points["selector"].unique())
                  for rho in ([ENDPOINT_RHO[selector]] if selector in ENDPOINT_RHO else swept)]  # fmt: skip
        for key, panel in sweep.groupby(stats.PANEL):
            have = set(zip(panel["selector"], panel["rho"], strict=True))
            missing |= {stats.cell_of(key, *point): None for point in wanted if point not in have}
    return tuple(missing)


def arms(frame: pd.DataFrame, selector: str) -> list[stats.Arms]:
    """Per (model, dataset) of `frame`: full prefill and the points of `selector`, paired over their common samples.

    Points that some panel lacks are left out everywhere. Raises ValueError where no point beside full prefill is left.
    """
    chosen = frame[frame["selector"].isin(["full_prefill", selector])]
    points = [panel.pivot(index=["selector", "rho"], columns="sample_id") for _, panel in chosen.groupby(stats.PANEL)]
    common = sorted(
        set.intersection(*(set(panel.index) for panel in points)), key=lambda p: (p[0] != "full_prefill", p)
    )
    if len(common) < 2 or common[0][0] != "full_prefill":
        raise ValueError(f"{selector}: no point that every panel has beside full prefill, only {common}")
    return [stats.Arms(scores=panel["score"].loc[common].dropna(axis=1).to_numpy(),
                       ttft_s=panel["ttft_s"].loc[common].dropna(axis=1).to_numpy()) for panel in points]  # fmt: skip
