"""Figure 1: where the time of a request goes (selection, the rest of prefill, decoding), as shares and in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from analysis import bars, series, style
from analysis.cells import KEYS, Cell, Loaded, MissingCells

RHO = 0.3
METHODS = ("full_prefill", "cacheblend", "epic", "fusionrag", "prophetkv", "qcfuse")
NOT_TIMED = "no cell has both its stages and its decoding timed (runner.time_decode=true; redo cells with force=true)"
COLUMNS = ["link", *(f"{part}_{unit}" for unit in ("s", "share") for part in bars.PARTS), "total_s", "ttft_s",
           "ttft_p20_s", "ttft_p80_s", "ttft_n", "speedup", "speedup_low", "speedup_high"]  # fmt: skip


def missing(loaded: Loaded) -> tuple[Cell, ...]:
    return bars.lacking(series.only(loaded), METHODS, RHO)


@style.paper()
def draw(loaded: Loaded, outputs: Path, name: str = "fig01") -> list[Path]:
    """Writes outputs/figures/<name>.{csv,pdf,png}; raises MissingCells where no cell has all parts timed."""
    rows = parts(loaded)
    if rows.empty:
        raise MissingCells(str(loaded.frame["experiment"].iloc[0]), missing(loaded), f"{name}: {NOT_TIMED}")
    panels = bars.panels(rows)
    fig, axes = style.figure(len(panels), 2, (3.6, 2.8))
    for pair, (title, panel) in zip(axes, panels, strict=True):
        _draw_pair(pair, panel)
        pair[0].set_title(title)
    num_untimed = len(bars.points(series.only(loaded), RHO)) - len(rows)
    style.finish(fig, (), _note(rows, num_untimed, len(missing(loaded))), bars.legend((), bars.PARTS))
    return style.save(fig, rows[[*KEYS, *COLUMNS]], outputs, name)


def parts(loaded: Loaded) -> pd.DataFrame:
    """The summary at RHO and the main bandwidth, with prefill_s (the median of TTFT without selection), total_s (the
    sum of the parts' medians) and <part>_share (of total_s); cells whose parts were not all timed are left out."""
    rows = bars.points(series.only(loaded), RHO)
    rows = rows.dropna(subset=[f"{part}_s" for part in bars.PARTS])
    rows = rows.assign(total_s=sum(rows[f"{part}_s"] for part in bars.PARTS))
    return rows.assign(**{f"{part}_share": rows[f"{part}_s"] / rows["total_s"] for part in bars.PARTS})


def _draw_pair(pair: Sequence[Axes], panel: pd.DataFrame) -> None:
    selectors = style.in_order(panel["selector"])
    for ax, unit in zip(pair, ("share", "s"), strict=True):
        for _, row in panel.iterrows():
            x = selectors.index(row["selector"])
            bars.stack(ax, x, 0.7, row["selector"], {part: row[f"{part}_{unit}"] for part in bars.PARTS})
            if unit == "share" and row["select_share"] > 0:
                ax.text(x, 1.01, f"{row['select_share']:.0%}", ha="center", va="bottom", fontsize=7.5)
        labels = [style.method(name).label for name in selectors]
        ax.set_xticks(range(len(selectors)), labels, rotation=30, ha="right", rotation_mode="anchor")
        ax.grid(False, axis="x")
        ax.set_ylim(bottom=0)
    pair[0].set_ylim(0, 1.08)
    pair[0].set_ylabel("Share of end-to-end latency")
    pair[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    pair[1].set_ylabel("End-to-end latency (s)")


def _note(rows: pd.DataFrame, num_untimed: int, num_missing: int) -> str:
    text = (f"{style.models(rows['model'])}; {style.rhos(rows['rho'])}; medians of the parts over n = "
            f"{style.span(rows['ttft_n'])} samples, shares of their sum; above the bars: share of selection. Select: "
            "probe, waiting for what it reads, scoring and selecting. QCFuse is not part of the "
            "authors' figure.")  # fmt: skip
    if num_untimed:
        text += f" {num_untimed} cells without all parts timed are not drawn."
    return f"{text} {bars.note(rows, num_missing)}"
