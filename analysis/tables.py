"""Markdown tables of an experiment, for the README and the terminal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from analysis import series, style
from analysis.cells import Loaded
from analysis.summary import summarise

Column = Callable[[pd.Series], str]


def markdown(loaded: Loaded, by_dataset: bool = False, bandwidth: str | None = None) -> str:
    """One row per selector and rho, averaged over datasets (samples drawn within each), or one table a dataset.

    bandwidth: as in analysis.series.only, which raises ValueError where it was not measured.
    """
    frame = series.only(loaded, bandwidth).frame
    link = series.words(frame)
    if by_dataset:
        parts = [
            f"**{style.dataset_label(dataset)}**\n\n{_table(summarise(rows))}"
            for dataset, rows in frame.groupby("dataset")
        ]
        return "\n\n".join([link, *parts])
    datasets = ", ".join(sorted(frame["dataset"].unique()))
    return f"Mean over {datasets}. {link}\n\n{_table(summarise(frame, over=('dataset',)))}"


def short(loaded: Loaded) -> str:
    """What the demo prints: quality, fidelity and TTFT per method, plain text with aligned columns."""
    summary = summarise(series.only(loaded).frame, over=("dataset",))
    columns = {
        name: COLUMNS[name] for name in ("method", "ρ", "n", "score", "answer KL", "top-1", "TTFT (s)", "speed-up")
    }
    rows = [list(columns), *([cell(row) for cell in columns.values()] for row in _ordered(summary))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _table(summary: pd.DataFrame) -> str:
    varied = [name for name in ("engine", "model", "bandwidth", "variant") if summary[name].nunique() > 1]
    columns: dict[str, Column] = {name: (lambda row, name=name: str(row[name])) for name in varied} | COLUMNS
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in _ordered(summary)]
    return "\n".join(lines) + "\n\n" + (
        "Brackets: 95% bootstrap interval; Δ is paired by sample with full prefill, p its sign-flip test after Holm's "
        "correction over the table; KL and top-1 along full prefill's answer; failed samples count as 0.")  # fmt: skip


def _ordered(summary: pd.DataFrame) -> list[pd.Series]:
    order = {name: place for place, name in enumerate(style.in_order(summary["selector"]))}
    by_style = summary.assign(order=summary["selector"].map(order)).sort_values(
        ["order", "rho", "bandwidth", "variant"]
    )
    return [row for _, row in by_style.iterrows()]


def _number(value: float, pattern: str) -> str:
    return "–" if np.isnan(value) else format(value, pattern)


def _with_interval(name: str, pattern: str, unit: str = "") -> Column:
    def cell(row: pd.Series) -> str:
        if np.isnan(row[name]) or row[f"{name}_n"] < 2:  # one sample has no interval
            return _number(row[name], pattern) + ("" if np.isnan(row[name]) else unit)
        return f"{row[name]:{pattern}}{unit} [{row[f'{name}_low']:{pattern}}, {row[f'{name}_high']:{pattern}}]"

    return cell


def _kl(value: float) -> str:
    """Below a millionth of a nat, rounding is all that is left."""
    return "<1e-6" if value < 1e-6 else _number(value, ".3g")


COLUMNS: dict[str, Column] = {
    "method": lambda row: style.method(row["selector"]).label,
    "ρ": lambda row: _number(row["rho"], "g") if not np.isnan(row["rho"]) else "auto",
    "n": lambda row: str(row["n"]),
    "failed": lambda row: str(row["n_failed"]),
    "score": _with_interval("score", ".3f"),
    "Δ to full": _with_interval("diff_full", "+.3f"),
    "p": lambda row: _number(row["p_full_holm"], ".2g"),
    "answer KL": lambda row: _kl(row["answer_kl"]),
    "top-1": lambda row: _number(row["answer_agreement"], ".1%"),
    "TTFT (s)": lambda row: _number(row["ttft_s"], ".2f"),
    "speed-up": _with_interval("speedup", ".2f", "×"),
}
"""Heading -> text of a row of `summarise`."""
