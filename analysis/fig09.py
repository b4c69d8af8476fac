"""Figure 9: the pipeline of one request as it ran, what the compute thread did above what the storage link read."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis import series, style
from analysis.trace import ABOUT, GAP_MS, Trace, busy_ms

LANE_HEIGHT = 0.8
CELL = [name for name in ABOUT if name not in ("link", "num_context_tokens")]


@style.paper()
def draw(trace: Trace, outputs: Path, name: str = "fig09") -> list[Path]:
    """Writes outputs/figures/<name>.{csv,pdf,png}, a panel for each traced cell."""
    cells = [spans for _, spans in trace.spans.groupby(CELL, dropna=False)]
    fig, axes = style.figure(len(cells), 1, (7.4, 2.3))
    for ax, spans in zip(axes[:, 0], cells, strict=True):
        _draw_panel(ax, spans)
    style.finish(fig, (), "\n".join(map(_note, cells)), _legend(trace.spans))
    return style.save(fig, trace.spans, outputs, name)


def title(spans: pd.DataFrame) -> str:
    """`QCFuse, SmolLM2-135M, N = 1,024, ρ = 0.5`."""
    about = spans.iloc[0]
    names = [style.method(about["selector"]).label, style.MODELS.get(about["model"], about["model"])]
    return ", ".join([*names, f"N = {about['num_context_tokens']:,}", f"ρ = {about['rho']:g}", *_variant(about)])


def rows_of(spans: pd.DataFrame) -> list[int]:
    """For each span of one lane, sorted by start, the lowest row in which nothing else runs at the time."""
    ends: list[float] = []
    rows = []
    for start, end in spans[["start_ms", "end_ms"]].itertuples(index=False):
        row = next((i for i, upto in enumerate(ends) if upto <= start + GAP_MS), len(ends))
        ends[row : row + 1] = [end]
        rows.append(row)
    return rows


def _draw_panel(ax: Axes, spans: pd.DataFrame) -> None:
    lanes = [lane for lane in ("compute", "link") if (spans["lane"] == lane).any()]
    for number, lane in enumerate(lanes):
        own = spans[spans["lane"] == lane]
        rows = rows_of(own)
        height = LANE_HEIGHT / (max(rows) + 1)
        for row, span in zip(rows, own.itertuples(), strict=True):
            look = style.span_style(span.kind)
            bottom = number - LANE_HEIGHT / 2 + row * height
            ax.broken_barh([(span.start_ms, span.end_ms - span.start_ms)], (bottom, height), color=look.color,
                           hatch=look.hatch, edgecolor="white", linewidth=0.15)  # fmt: skip
    chosen = spans.loc[spans["kind"] == "select", "end_ms"]
    if len(chosen):
        ax.axvline(chosen.max(), color="#1a1a1a", linewidth=0.8, linestyle=(0, (3, 2)))
    ax.set_yticks(range(len(lanes)), [lane.capitalize() for lane in lanes])
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.grid(False, axis="y")
    ax.set_title(f"{title(spans)}\n{series.words(spans)}")
    style.latency_axis(ax, "Time from arrival (ms)")
    ax.set_xlim(right=spans["end_ms"].max() * 1.005)


def _legend(spans: pd.DataFrame) -> list[Patch]:
    kinds = set(spans["kind"])
    known = [kind for kind in style.SPANS if kind in kinds] + sorted(kinds - set(style.SPANS))
    looks = dict.fromkeys(style.span_style(kind) for kind in known)
    return [Patch(facecolor=look.color, hatch=look.hatch, edgecolor="white", label=look.label) for look in looks]


def _note(spans: pd.DataFrame) -> str:
    compute, link = (spans[spans["lane"] == lane] for lane in ("compute", "link"))
    text = f"{title(spans)}: the first token comes after {compute['end_ms'].max():,.0f} ms"
    if len(link):
        waits = compute[compute["kind"].str.startswith("wait")]
        text += (f"; the link is busy for {busy_ms(link):,.0f} ms and moves {link['bytes'].sum() / 1e6:,.1f} MB, "
                 f"compute waits for it for {busy_ms(waits):,.0f} ms")  # fmt: skip
    return text + ". One request, as traced. Dashed: the tokens to recompute are known."


def _variant(about: pd.Series) -> list[str]:
    return [about["variant"]] if about["variant"] else []
