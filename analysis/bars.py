"""Bars with one look: a method's colour, parts of its time told apart by hatching, whiskers, groups by bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis import series, style
from analysis.cells import ENDPOINT_RHO, Cell, Loaded
from analysis.stats import cell_of
from analysis.summary import summarise

PANEL = ["engine", "model", "dataset", "variant"]
PARTS = {
    "select": ("Select in prefill", {"hatch": "//////", "edgecolor": "white", "linewidth": 0}),
    "prefill": ("Rest of prefill", {}),
    "decode": ("Decode", {"alpha": 0.35}),
}
"""Part of a bar, in the order of stacking -> name in the legend, and how it differs from the method's plain colour."""

DrawBar = Callable[[float, float, pd.Series], None]


def points(loaded: Loaded, rho: float) -> pd.DataFrame:
    """The summary of the cells at `rho`, and of those whose rho is fixed."""
    summary = summarise(loaded.frame)
    return summary[(summary["rho"] == rho) | summary["selector"].isin(ENDPOINT_RHO)]


def lacking(loaded: Loaded, selectors: Iterable[str], rho: float) -> tuple[Cell, ...]:
    """Cells begun and not finished, and those of `selectors` that a panel lacks at any bandwidth of the experiment."""
    missing = dict.fromkeys(loaded.unfinished)
    bandwidths = series.in_order(loaded.frame["bandwidth"])
    for (experiment, engine, model, dataset, variant), rows in loaded.frame.groupby(["experiment", *PANEL]):
        have = set(zip(rows["selector"], rows["bandwidth"], rows["rho"], strict=True))
        for bandwidth in bandwidths:
            panel = (experiment, engine, model, dataset, bandwidth, variant)
            wanted = [(selector, ENDPOINT_RHO.get(selector, rho)) for selector in selectors]
            missing |= {cell_of(panel, name, at): None for name, at in wanted if (name, bandwidth, at) not in have}
    return tuple(missing)


def panels(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Title and rows of each panel; engine and overrides are named where they differ between panels."""
    told = [name for name in ("engine", "variant") if rows[name].nunique() > 1]
    found = []
    for (_, model, dataset, _), panel in rows.groupby(PANEL):
        extra = [str(panel[name].iloc[0]) for name in told]
        names = (style.dataset_label(dataset), style.MODELS.get(model, model), *filter(None, extra))
        found.append((", ".join(names), panel))
    return found


def stack(ax: Axes, x: float, width: float, selector: str, parts: Mapping[str, float]) -> None:
    """One bar of `parts` (names of PARTS -> height), from the bottom up."""
    bottom = 0.0
    for name, height in parts.items():
        ax.bar(x, height, width, bottom=bottom, color=style.method(selector).color, **PARTS[name][1])
        bottom += height


def whisker(ax: Axes, x: float, row: pd.Series, value: str, low: str, high: str) -> None:
    """From row[low] to row[high] around row[value]."""
    ends = [[max(0.0, row[value] - row[low])], [max(0.0, row[high] - row[value])]]
    ax.errorbar(x, row[value], yerr=ends, color="#808080", elinewidth=0.9, capsize=1.8, linestyle="none", zorder=5)


def grouped(ax: Axes, rows: pd.DataFrame, draw_bar: DrawBar) -> list[str]:
    """A group of bars for each bandwidth, methods side by side; draw_bar gets x, width and the row. -> the bandwidths,
    slowest first, whose groups stand at x = 0, 1, ..."""
    bandwidths, selectors = series.in_order(rows["bandwidth"]), style.in_order(rows["selector"])
    width = 0.8 / len(selectors)
    for _, row in rows.iterrows():
        shift = selectors.index(row["selector"]) - (len(selectors) - 1) / 2
        draw_bar(bandwidths.index(row["bandwidth"]) + shift * width, 0.92 * width, row)
    ax.set_xticks(range(len(bandwidths)), bandwidths)
    ax.grid(False, axis="x")
    return bandwidths


def legend(selectors: Iterable[str], parts: Iterable[str] = ()) -> list[Patch]:
    """Methods by colour, then parts in grey."""
    looks = [style.method(name) for name in style.in_order(selectors)]
    return [Patch(color=look.color, label=look.label) for look in looks] + [
        Patch(**({"facecolor": "#777777", "edgecolor": "#777777"} | PARTS[name][1]), label=PARTS[name][0])
        for name in parts
    ]


def note(rows: pd.DataFrame, num_missing: int) -> str:
    """What every bar figure says last: failures, the link, what is missing."""
    failed = int(rows["n_failed"].sum())
    texts = [series.words(rows), f"{failed} failed samples count as 0." if failed else "",
             f"INCOMPLETE: {num_missing} cells missing." if num_missing else ""]  # fmt: skip
    return " ".join(filter(None, texts))
