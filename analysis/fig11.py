"""Figure 11: the averages over RULER (and LongBench, once measured), beside the published aggregate.

Three panels a suite: the raw score against TTFT in seconds; the normalised score against TTFT relative to full prefill;
and the authors' aggregate (hollow) on the axes of the second, since their GPU seconds and ours do not compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import published, series, stats, style
from analysis.cells import KEYS, Loaded, MissingCells
from analysis.fig10 import draw_method
from analysis.summary import arms, holes, summarise

SUITES = {"ruler": "RULER", "longbench": "LongBench"}
SERIES = ["engine", "bandwidth", "variant"]
POINT = [*SERIES, "selector", "rho"]
LONGBENCH = ("musique", "2wikimqa", "hotpotqa")


def suite_of(dataset: str) -> str | None:
    """The suite whose average a dataset enters, None for one that belongs to neither."""
    words = set(dataset.split("_"))
    if "ruler" in words:
        return "ruler"
    return "longbench" if words & set(LONGBENCH) else None


@style.paper()
def draw(loaded: Loaded, outputs: Path, name: str = "fig11") -> list[Path]:
    """Writes outputs/figures/<name>.{csv,pdf,png}.

    Of the main bandwidth only. Raises MissingCells while a cell of its grid is missing: an average over other tasks is
    no comparison.
    """
    loaded = series.only(loaded)
    frame = loaded.frame.assign(suite=loaded.frame["dataset"].map(suite_of)).dropna(subset="suite")
    experiment = str(loaded.frame["experiment"].iloc[0])
    if missing := tuple(cell for cell in holes(loaded) if suite_of(cell.dataset)):
        raise MissingCells(experiment, missing, f"{name} averages over tasks and needs every one of them")
    if frame.empty or not frame["ttft_s"].notna().any():
        raise MissingCells(experiment, why=f"{name}: no finished RULER or LongBench cell with a TTFT")
    suites = [suite for suite in SUITES if (frame["suite"] == suite).any()]
    fig, axes = style.figure(len(suites), 3, (3.1, 2.75))
    points, notes = [], []
    for row, suite in zip(axes, suites, strict=True):
        measured, note = average(frame[frame["suite"] == suite].drop(columns="suite"))
        _draw_suite(row, suite, measured)
        points += [measured.assign(suite=suite, source="measured"), _published_rows(suite)]
        notes.append(f"{SUITES[suite]}: {note}")
    shown = pd.concat(points, ignore_index=True)
    style.finish(fig, shown["selector"], "\n".join(notes) + f"\n{_note(shown)} {series.words(frame)}")
    return style.save(
        fig, shown[["source", "suite", *(c for c in shown if c not in ("source", "suite"))]], outputs, name
    )


def average(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Records of one suite -> one row a point, averaged over models and datasets, and what the reader must know.

    Adds score_normalised (0 to 1, with its interval, the scale held fixed), ttft_rel (TTFT over full prefill's) and
    matched_speedup (per method, with its interval) to the columns of `summarise`.
    """
    cells = frame.groupby([*KEYS], as_index=False).agg(
        score=("score", "mean"), n=("score", "size"), ttft_n=("ttft_s", "count")
    )
    swept = sorted(rho for rho in cells["rho"].unique() if 0 < rho < 1)
    methods = [name for name in stats.PAPER_METHODS if (cells["selector"] == name).any()]
    bounds = stats.scale_bounds(cells, methods, [rho for rho in swept if rho in stats.PAPER_RHOS])
    points = summarise(frame, over=("model", "dataset"))
    points = points.merge(_normalised(frame, bounds), on=POINT, how="left")
    points = pd.concat([_relative(rows, frame) for _, rows in points.groupby(SERIES)], ignore_index=True)
    return points, _describe(cells, points, methods, bounds)


def _relative(points: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Points of one series, with what needs its full prefill; NaN in a series without one."""
    full_s = points.loc[points["selector"] == "full_prefill", "ttft_s"].min()
    points = points.assign(
        **{f"ttft_rel{quantile}": points[f"ttft{quantile}_s"] / full_s for quantile in ("_p20", "", "_p80")}
    )
    columns = ["matched_speedup", "matched_speedup_low", "matched_speedup_high", "matched_share"]
    points[columns] = np.nan
    records = frame[(frame[SERIES] == points[SERIES].iloc[0]).all(axis=1)]
    for selector in set(points["selector"]) - set(stats.ENDPOINT_RHO) if full_s > 0 else ():
        speedup, share = stats.matched_speedup(arms(records, selector))
        points.loc[points["selector"] == selector, columns] = [speedup.value, speedup.low, speedup.high, share]
    return points


def _normalised(frame: pd.DataFrame, bounds: dict[tuple, tuple[float, float]]) -> pd.DataFrame:
    """POINT and score_normalised with its interval: scores in the scale of their panel, averaged over panels.

    Panels with a flat scale are left out, as no method differs there.
    """
    strata: dict[tuple, list[np.ndarray]] = {}
    for key, panel in frame.groupby(stats.PANEL):
        low, high = bounds[key]
        for point, records in panel.groupby(POINT) if high > low else ():
            strata.setdefault(point, []).append(((records["score"] - low) / (high - low)).to_numpy())
    rows = []
    for point, scores in strata.items():
        mean = stats.bootstrap_average(scores)
        rows.append([*point, mean.value, mean.low, mean.high])
    return pd.DataFrame(rows, columns=[*POINT, "score_normalised", "score_normalised_low", "score_normalised_high"])


def _describe(cells: pd.DataFrame, points: pd.DataFrame, methods: Sequence[str], bounds: dict) -> str:
    flat = [f"{key[3]}/{key[2]}" for key, (low, high) in bounds.items() if low == high]
    names = ", ".join(style.dataset_label(name) for name in sorted(cells["dataset"].unique()))
    timed = style.span(cells["ttft_n"])
    text = (f"mean over {names}; {style.models(cells['model'])}; n = {style.span(cells['n'])} samples a task "
            f"(TTFT: {timed}).")  # fmt: skip
    if len(methods) < len(stats.PAPER_METHODS):
        absent = [style.method(name).label for name in stats.PAPER_METHODS if name not in methods]
        text += (f" Normalised by the {len(methods)} of the paper's {len(stats.PAPER_METHODS)} methods measured here "
                 f"(without {', '.join(absent)}), {style.rhos(cells['rho'])}.")  # fmt: skip
    if flat:
        text += f" All methods score alike, so left out of the normalised mean: {', '.join(flat)}."
    matched = points.dropna(subset="matched_speedup").drop_duplicates("selector")
    gains = ", ".join(_gain(row) for _, row in matched.iterrows())
    return text + (" TTFT gain over full prefill at matched quality (fastest ρ whose score is at most "
                   f"{stats.MATCH_MARGIN:g} lower): {gains or 'no method matches'}.")  # fmt: skip


def _gain(row: pd.Series) -> str:
    text = f"{style.method(row['selector']).label} {row['matched_speedup']:.2f}×"
    text += f" [{row['matched_speedup_low']:.2f}, {row['matched_speedup_high']:.2f}]"
    return text if row["matched_share"] > 0.975 else f"{text} (a match in {row['matched_share']:.0%} of resamples)"


def _draw_suite(axes: Sequence[Axes], suite: str, points: pd.DataFrame) -> None:
    raw, normalised, quoted = axes
    scaled = points.copy()
    for end in ("", "_low", "_high"):
        scaled[f"score{end}"] = 100 * points[f"score_normalised{end}"]
    for quantile in ("_p20", "", "_p80"):
        scaled[f"ttft{quantile}_s"] = points[f"ttft_rel{quantile}"]
    for ax, rows in ((raw, points), (normalised, scaled)):
        for selector in style.in_order(rows["selector"]):
            for _, line in rows[rows["selector"] == selector].groupby(["engine", "bandwidth", "variant"]):
                draw_method(ax, selector, line.sort_values("rho"))
    _draw_published(quoted, suite)
    raw.set_title(f"{SUITES[suite]}, measured: raw")
    raw.set_ylabel("Mean score (0–1)")
    raw.set_ylim(bottom=min(0, raw.get_ylim()[0]))
    style.latency_axis(raw, "TTFT (s)")
    normalised.set_title(f"{SUITES[suite]}, measured: normalised")
    normalised.set_ylabel("Normalised score (%)")
    quoted.set_title(f"{SUITES[suite]}, published (QCFuse Fig. 11)")
    for ax in (normalised, quoted):
        ax.set_ylim(-8, 110)
        ax.set_yticks(range(0, 101, 20))
        style.latency_axis(ax, "TTFT relative to full prefill")
        ax.set_xlim(0, max(1.08, 1.05 * scaled["ttft_p80_s"].max()))


def _draw_published(ax: Axes, suite: str) -> None:
    rows = published.aggregate()
    for selector, line in rows[rows["suite"] == suite].groupby("selector"):
        look = style.method(selector)
        if selector == "full_prefill":
            ax.axhline(line["quality"].iloc[0], color=look.color, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        size = 10 if look.marker == "*" else 5.5
        ax.plot(line["ttft_rel"], line["quality"], color=look.color, marker=look.marker, linewidth=1,
                markerfacecolor="white", markersize=size, zorder=2 + look.order)  # fmt: skip


def _published_rows(suite: str) -> pd.DataFrame:
    rows = published.aggregate().query("suite == @suite")
    return pd.DataFrame({"suite": suite, "source": rows["source"], "model": rows["model"], "selector": rows["selector"],
                         "rho": rows["rho"], "score_normalised": rows["quality"] / 100, "ttft_s": rows["ttft_s"],
                         "ttft_rel": rows["ttft_rel"]})  # fmt: skip


def _note(shown: pd.DataFrame) -> str:
    measured = shown[shown["source"] == "measured"]
    text = ("Filled: measured here; bars: 95% bootstrap interval over samples (scale held fixed), 20th to 80th "
            "percentile of TTFT. Hollow: published, digitised to ±1 point and ±0.01 s, mean of 4 models, TTFT over the "
            "authors' own full prefill.")  # fmt: skip
    failed = int(measured["n_failed"].sum())
    return text + (f" {failed} failed samples count as 0." if failed else "")
