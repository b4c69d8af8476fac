"""CacheBlend figure 17: quality and TTFT by storage device, a device being the bandwidth that its link is set to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from analysis import bars, series, style
from analysis.cells import KEYS, Cell, Loaded, MissingCells

RHO = 0.15
METHODS = ("full_prefill", "direct_reuse", "cacheblend", "qcfuse")
DEVICES = {"none": "RAM", "4.8": "NVMe"}
"""Bandwidth of a cell -> the device that the paper's set-up has at it; others are slower disks."""

COLUMNS = ["link", "metric", "score", "score_low", "score_high", "n", "n_failed", "ttft_s", "ttft_p20_s", "ttft_p80_s",
           "ttft_n", "speedup", "speedup_low", "speedup_high"]  # fmt: skip


def missing(loaded: Loaded) -> tuple[Cell, ...]:
    return bars.lacking(loaded, METHODS, RHO)


@style.paper()
def draw(loaded: Loaded, outputs: Path, name: str = "cb17") -> list[Path]:
    """Writes outputs/figures/<name>.{csv,pdf,png}; raises MissingCells where no cell has a TTFT."""
    rows = bars.points(loaded, RHO).dropna(subset="ttft_s")
    if rows.empty:
        raise MissingCells(str(loaded.frame["experiment"].iloc[0]), missing(loaded), f"{name}: no cell has a TTFT")
    panels = bars.panels(rows)
    fig, axes = style.figure(len(panels), 2, (4.4, 2.7))
    for pair, (title, panel) in zip(axes, panels, strict=True):
        _draw_pair(pair, panel)
        pair[0].set_title(title)
    style.finish(fig, (), _note(rows, len(missing(loaded))), bars.legend(rows["selector"]))
    rows = rows.assign(device=rows["bandwidth"].map(device))
    return style.save(fig, rows[[*KEYS, "device", *COLUMNS]], outputs, name)


def device(bandwidth: str) -> str:
    """`RAM`, `NVMe 4.8 GB/s`, `disk 1 GB/s`."""
    name = DEVICES.get(bandwidth, "disk")
    return name if bandwidth == "none" else f"{name} {bandwidth} GB/s"


def _draw_pair(pair: Sequence[Axes], panel: pd.DataFrame) -> None:
    metric = panel["metric"].iloc[0]
    measures = {"score": ("score_low", "score_high", f"{style.METRICS.get(metric, metric)} (0–1)"),
                "ttft_s": ("ttft_p20_s", "ttft_p80_s", "TTFT (s)")}  # fmt: skip
    for ax, (value, (low, high, label)) in zip(pair, measures.items(), strict=True):

        def bar(x: float, width: float, row: pd.Series, ax=ax, value=value, low=low, high=high) -> None:
            bars.stack(ax, x, width, row["selector"], {"prefill": row[value]})
            bars.whisker(ax, x, row, value, low, high)

        bandwidths = bars.grouped(ax, panel, bar)
        ax.set_xticks(range(len(bandwidths)), [device(name).replace(" ", "\n", 1) for name in bandwidths])
        matched = series.matched_to(panel)
        ax.set_xlabel(f"Device, bandwidth {matched}" if matched else "Device")
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0)


def _note(rows: pd.DataFrame, num_missing: int) -> str:
    return (f"{style.models(rows['model'])}; {style.rhos(rows['rho'])}. Left: mean over n = "
            f"{style.span(rows['n'])} samples, whiskers: 95% bootstrap interval. Right: median over n = "
            f"{style.span(rows['ttft_n'])}, whiskers: 20th to 80th percentile. Predictions do not depend "
            f"on the device. QCFuse is not part of the authors' figure. {bars.note(rows, num_missing)}")  # fmt: skip
