"""Figure 13: TTFT against the bandwidth of the storage link, with the part that selection takes of it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from analysis import bars, series, style
from analysis.cells import KEYS, Cell, Loaded, MissingCells

RHO = 0.5
METHODS = ("full_prefill", "prophetkv", "qcfuse")
COLUMNS = ["link", "ttft_s", "ttft_p20_s", "ttft_p80_s", "ttft_n", "select_s", "select_share", "speedup", "speedup_low",
           "speedup_high", "speedup_n", "pipeline_efficiency"]  # fmt: skip


def missing(loaded: Loaded) -> tuple[Cell, ...]:
    return bars.lacking(loaded, METHODS, RHO)


@style.paper()
def draw(loaded: Loaded, outputs: Path, name: str = "fig13") -> list[Path]:
    """Writes outputs/figures/<name>.{csv,pdf,png}; raises MissingCells where no cell has its stages timed.

    select_s is the median over samples; select_share that median over the median TTFT, which is what is drawn.
    """
    rows = bars.points(loaded, RHO).dropna(subset=["ttft_s", "select_s"])
    if rows.empty:
        raise MissingCells(str(loaded.frame["experiment"].iloc[0]), missing(loaded), f"{name}: no cell has its stages")
    panels = bars.panels(rows)
    fig, axes = style.figure(len(panels), 1, (6.6, 2.7))
    for ax, (title, panel) in zip(axes[:, 0], panels, strict=True):
        _draw_panel(ax, panel)
        ax.set_title(title)
    style.finish(fig, (), _note(rows, len(missing(loaded))), bars.legend(rows["selector"], ("select",)))
    return style.save(fig, rows[[*KEYS, *COLUMNS]], outputs, name)


def _draw_panel(ax: Axes, panel: pd.DataFrame) -> None:
    def bar(x: float, width: float, row: pd.Series) -> None:
        parts = {"select": row["select_s"], "prefill": row["ttft_s"] - row["select_s"]}
        bars.stack(ax, x, width, row["selector"], parts)
        bars.whisker(ax, x, row, "ttft_s", "ttft_p20_s", "ttft_p80_s")

    bars.grouped(ax, panel, bar)
    matched = series.matched_to(panel)
    ax.set_xlabel(f"Nominal bandwidth (GB/s), {matched}" if matched else "Bandwidth of the storage link (GB/s)")
    ax.set_ylabel("TTFT (s)")
    ax.set_ylim(bottom=0)


def _note(rows: pd.DataFrame, num_missing: int) -> str:
    return (f"{style.models(rows['model'])}; {style.rhos(rows['rho'])}; median over n = "
            f"{style.span(rows['ttft_n'])} samples, whiskers: 20th to 80th percentile. Hatched: probe, "
            f"waiting for what it reads, scoring and selecting (medians). {bars.note(rows, num_missing)}")  # fmt: skip
