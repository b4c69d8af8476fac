"""Figure 10: quality against TTFT, a panel for each model and dataset, every method a line over rho."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis import published, series, stats, style
from analysis.cells import KEYS, Loaded, MissingCells
from analysis.summary import holes, summarise

COLUMNS = ["score", "score_low", "score_high", "n", "n_failed", "ttft_p20_s", "ttft_s", "ttft_p80_s", "ttft_n",
           "speedup", "speedup_low", "speedup_high"]  # fmt: skip


@style.paper()
def draw(loaded: Loaded, outputs: Path, name: str = "fig10") -> list[Path]:
    """Writes outputs/figures/<name>.{csv,pdf,png}; raises MissingCells where no cell has a TTFT.

    Cells at other bandwidths than the main one are drawn faint, without bars. Holes in the grid do not stop the figure:
    its note counts them. The CSV also has the normalised score where its
    scale (the paper's seven methods) is complete.
    """
    summary = summarise(loaded.frame)
    timed = summary[summary["ttft_n"] > 0]
    if timed.empty:
        raise MissingCells(str(summary["experiment"].iloc[0]), why=f"{name}: no finished cell has a TTFT")
    main = timed["bandwidth"] == series.main_bandwidth(timed["bandwidth"])
    panels = list(timed.groupby(["model", "dataset"], sort=False))
    fig, axes = style.figure(*_shape(panels))
    flat = list(axes.flat)
    overlaid = [
        draw_panel(ax, model, dataset, rows[main[rows.index]], rows[~main[rows.index]])
        for ax, ((model, dataset), rows) in zip(flat, panels, strict=False)
    ]
    for ax in flat[len(panels) :]:
        ax.remove()
    untimed = len(summary) - len(timed)
    style.finish(fig, timed["selector"], note(timed[main], timed[~main], untimed, len(holes(loaded)), any(overlaid)))
    return style.save(fig, table(summary), outputs, name)


def table(summary: pd.DataFrame) -> pd.DataFrame:
    """What the figure shows, with the normalised score beside the raw one (empty at a bandwidth whose scale is
    incomplete)."""
    shown = summary[[*KEYS, "link", "metric", *COLUMNS]].assign(score_normalised=float("nan"))
    for _, rows in summary.groupby("bandwidth"):
        try:
            shown.loc[rows.index, "score_normalised"] = stats.normalised_score(rows)
        except MissingCells:
            continue
    return shown


def draw_panel(ax: Axes, model: str, dataset: str, rows: pd.DataFrame, others: pd.DataFrame | None = None) -> bool:
    """One panel, `others` being drawn faint below `rows`; -> whether published points were drawn into it."""
    for part, draw_line in ((others, draw_faint), (rows, draw_method)):
        for selector in style.in_order(part["selector"]) if part is not None else ():
            for _, line in part[part["selector"] == selector].groupby(["engine", "bandwidth", "variant"]):
                draw_line(ax, selector, line.sort_values("rho"))
    rows = rows if len(rows) else others
    quoted = published.for_panel(model, dataset)
    for selector, line in quoted.groupby("selector"):
        look = style.method(selector)
        ax.plot(line["ttft_s"], line["quality"], color=look.color, marker=look.marker, markerfacecolor="white",
                linestyle=":", linewidth=1, alpha=0.8)  # fmt: skip
    ax.set_title(f"{style.dataset_label(dataset)}, {style.MODELS.get(model, model)}")
    metric = rows["metric"].iloc[0]
    ax.set_ylabel(f"{style.METRICS.get(metric, metric)} (0–1)")
    ax.yaxis.set_major_locator(MaxNLocator(5))
    top = max(rows["score_high"].max(), quoted["quality"].max() if len(quoted) else 0.0)
    ax.set_ylim(-0.04 * top if top > 0 else -0.04, 1.05 * top if top > 0 else 1.0)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    style.latency_axis(ax, "TTFT (s)")
    return not quoted.empty


def draw_method(ax: Axes, selector: str, line: pd.DataFrame) -> None:
    """One method over rho: filled points, 95% interval in y, p20 to p80 in x; full prefill also as a level."""
    look = style.method(selector)
    if selector == "full_prefill":
        ax.axhline(line["score"].iloc[0], color=look.color, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    ax.errorbar(
        line["ttft_s"], line["score"], color=look.color, marker=look.marker, linestyle=look.line, zorder=2 + look.order,
        yerr=[line["score"] - line["score_low"], line["score_high"] - line["score"]],
        xerr=[line["ttft_s"] - line["ttft_p20_s"], line["ttft_p80_s"] - line["ttft_s"]],
        elinewidth=0.7, ecolor=(look.color, 0.35), markersize=11 if look.marker == "*" else 5.5,
        markeredgecolor="white", markeredgewidth=0.6,
    )  # fmt: skip


def draw_faint(ax: Axes, selector: str, line: pd.DataFrame) -> None:
    """One method at another bandwidth than the figure's: medians and means alone, in the background."""
    look = style.method(selector)
    ax.plot(line["ttft_s"], line["score"], color=look.color, marker=look.marker, linestyle=look.line, linewidth=0.9,
            markersize=7 if look.marker == "*" else 3.5, alpha=0.3, zorder=1.5)  # fmt: skip


def note(rows: pd.DataFrame, others: pd.DataFrame, num_untimed: int, num_missing: int, has_published: bool) -> str:
    text = (f"{style.models(rows['model'])}; n = {style.span(rows['n'])} samples a point (TTFT: "
            f"{style.span(rows['ttft_n'])}). Bars: 95% bootstrap interval of the mean score; 20th to 80th percentile "
            f"around the median TTFT. Along a line, left to right: {style.rhos(rows['rho'])}. Dashed: score of "
            f"full prefill. {series.words(rows)}")  # fmt: skip
    if len(others):
        words = series.words(others)
        text += f" Faint: {words[0].lower()}{words[1:]}"
    if failed := int(rows["n_failed"].sum()):
        text += f" {failed} failed samples count as 0."
    if has_published:
        text += (" Hollow, dotted: published by the QCFuse authors (repository figure of June 2026, digitised; "
                 "other hardware).")  # fmt: skip
    if num_untimed:
        text += f" {num_untimed} cells have no TTFT and are not drawn."
    return text + (f" INCOMPLETE: {num_missing} cells missing." if num_missing else "")


def _shape(panels: list) -> tuple[int, int]:
    """Models x datasets; the panels of a single model are folded to at most three columns."""
    num_models = len({model for (model, _), _ in panels})
    if num_models > 1:
        return num_models, -(-len(panels) // num_models)
    num_cols = 2 if len(panels) in (2, 4) else min(3, len(panels))
    return -(-len(panels) // num_cols), num_cols
