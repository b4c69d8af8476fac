"""How near each method stays to full prefill: KL divergence and top-1 agreement against rho.

Both are taken along full prefill's own answer, and separate methods that a small model gives the same low score.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from analysis import series, style
from analysis.cells import KEYS, Loaded, MissingCells
from analysis.summary import MEANS, holes, summarise

FIDELITY = [name for name in MEANS if name != "score"]
LABELS = {"answer_kl": "KL(full ‖ method), nats", "answer_agreement": "Top-1 agreement with full"}
DODGE = 0.006
"""Shift in rho between neighbouring methods, so that intervals at one rho do not cover each other."""


@style.paper()
def draw(loaded: Loaded, outputs: Path, name: str = "fidelity") -> list[Path]:
    """Writes outputs/figures/<name>.{csv,pdf,png}; raises MissingCells where no cell has an answer KL.

    Cells of the main bandwidth only: what a method predicts does not depend on the link.
    """
    loaded = series.only(loaded)
    summary = summarise(loaded.frame)
    known = summary[(summary["answer_kl_n"] > 0) & (summary["selector"] != "full_prefill")]
    if known.empty:
        raise MissingCells(str(summary["experiment"].iloc[0]), why=f"{name}: no finished cell has an answer KL")
    models, datasets = known["model"].unique(), known["dataset"].unique()
    fig, axes = style.figure(2 * len(models), len(datasets), (2.25, 2.05), sharex=True, sharey="row")
    for row, model in enumerate(models):
        for column, dataset in enumerate(datasets):
            rows = known[(known["model"] == model) & (known["dataset"] == dataset)]
            for ax, measure in zip(axes[2 * row : 2 * row + 2, column], LABELS, strict=True):
                _draw_panel(ax, rows, measure)
            axes[2 * row, column].set_title(style.dataset_label(dataset))
        _label(axes[2 * row : 2 * row + 2], style.MODELS.get(model, model) if len(models) > 1 else "")
    for ax in axes[-1]:
        ax.set_xlabel("Recompute ratio ρ")
    style.finish(fig, known["selector"], _note(known, len(holes(loaded))))
    columns = [f"{measure}{end}" for measure in FIDELITY for end in ("", "_low", "_high", "_n")]
    return style.save(fig, summary[[*KEYS, "n", "n_failed", *columns]], outputs, name)


def _draw_panel(ax: Axes, rows: pd.DataFrame, measure: str) -> None:
    lines = [
        (selector, line)
        for selector in style.in_order(rows["selector"])
        for _, line in rows[(rows["selector"] == selector) & (rows["rho"] < 1)].groupby(
            ["engine", "bandwidth", "variant"]
        )
    ]
    for number, (selector, line) in enumerate(lines):
        look = style.method(selector)
        line = line.sort_values("rho")
        shift = 0 if selector == "direct_reuse" else DODGE * (number - len(lines) / 2)
        low, high = line[measure] - line[f"{measure}_low"], line[f"{measure}_high"] - line[measure]
        ax.errorbar(line["rho"] + shift, line[measure], yerr=[low, high], color=look.color, marker=look.marker,
                    linestyle=look.line, elinewidth=0.7, ecolor=(look.color, 0.45), zorder=2 + look.order,
                    markeredgecolor="white", markeredgewidth=0.5, markersize=5)  # fmt: skip
        if selector == "direct_reuse":
            ax.axhline(line[measure].iloc[0], color=look.color, linewidth=0.7, linestyle=(0, (1, 2)), zorder=1)
    if measure == "answer_kl":
        ax.set_yscale("log", nonpositive="clip")


def _label(pair: list, model: str) -> None:
    """Only the leftmost panels of a model carry the names of the measures."""
    for ax, text in zip((pair[0][0], pair[1][0]), LABELS.values(), strict=True):
        ax.set_ylabel(f"{model}\n{text}" if model else text)
    kl, agreement = pair[0][0], pair[1][0]
    agreement.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    agreement.set_ylim(min(0.9, agreement.get_ylim()[0]), 1.015)
    low, high = kl.get_ylim()
    kl.yaxis.set_major_formatter("{x:g}")
    # within about a decade there is hardly a power of ten to read off
    few = NullFormatter() if high > 20 * low else FuncFormatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
    kl.yaxis.set_minor_formatter(few)


def _note(known: pd.DataFrame, num_missing: int) -> str:
    text = (f"{style.models(known['model'])}; n = {style.span(known['answer_kl_n'])} samples a point. "
            "Teacher-forced along full prefill's own greedy answer, mean over its tokens. Bars: 95% bootstrap "
            "interval of the mean over samples. Full prefill lies at "
            "KL 0 and 100%; the dotted level is direct reuse (ρ = 0).")  # fmt: skip
    return text + (f" INCOMPLETE: {num_missing} cells missing." if num_missing else "")
