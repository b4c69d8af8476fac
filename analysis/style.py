"""How every figure looks: one colour and marker per method, paper-ready text, and the plumbing to save a figure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

SETTINGS = {
    "font.family": "DejaVu Sans", "font.size": 8.5, "axes.titlesize": 9.5, "axes.labelsize": 9, "legend.fontsize": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7, "axes.edgecolor": "#444444",
    "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "xtick.color": "#444444", "ytick.color": "#444444", "lines.linewidth": 1.5, "lines.markersize": 5.5,
    "legend.frameon": False, "figure.dpi": 100, "savefig.dpi": 200, "pdf.fonttype": 42, "svg.hashsalt": "qcfuse",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Style:
    """label: name in the legend; order: place in legends and draw order (later lies on top)."""

    label: str
    color: str
    marker: str
    line: str = "-"
    order: int = 50


METHODS = {
    "full_prefill": Style(label="Full prefill", color="#1a1a1a", marker="*", order=0),
    "prefix_caching": Style(label="Prefix caching", color="#7f7f7f", marker="P", order=1),
    "direct_reuse": Style(label="Direct reuse", color="#6b6b6b", marker="X", order=2),
    "mapreduce": Style(label="MapReduce", color="#8c6d31", marker="p", line=":", order=3),
    "maprerank": Style(label="MapRerank", color="#bd9e39", marker="h", line=":", order=4),
    "random": Style(label="Random", color="#a9a9a9", marker=".", line=":", order=5),
    "epic": Style(label="EPIC", color="#c678b0", marker="v", order=6),
    "cacheblend": Style(label="CacheBlend", color="#e69f00", marker="^", order=7),
    "fusionrag": Style(label="FusionRAG", color="#009e73", marker="D", order=8),
    "prophetkv": Style(label="ProphetKV", color="#0072b2", marker="s", order=9),
    "oracle": Style(label="KV-deviation oracle", color="#5e4fa2", marker="d", line="--", order=10),
    "qcfuse": Style(label="QCFuse", color="#d62728", marker="o", order=11),
}
@dataclass(frozen=True, kw_only=True)
class SpanStyle:
    """How a stage of the compute thread, or what the link reads, looks in a timeline."""

    label: str
    color: str
    hatch: str = ""


_WAIT = SpanStyle(label="Wait for the link", color="#d9d9d9", hatch="/////")
_START = SpanStyle(label="Engine, read plans", color="#8c8c8c")
_SELECT = SpanStyle(label="Score, select", color="#d62728")
_END = SpanStyle(label="Suffix, first token", color="#1a1a1a")
SPANS = {
    "queue": _START, "engine": _START, "wait_prefix": _WAIT, "wait_select": _WAIT, "wait_layer": _WAIT,
    "probe": SpanStyle(label="Query forward", color="#e69f00"), "score": _SELECT, "select": _SELECT,
    "place": SpanStyle(label="Place", color="#9ecae1"), "recompute": SpanStyle(label="Recompute", color="#0072b2"),
    "suffix": _END, "first_token": _END,
    "prefix": SpanStyle(label="Load: prefix", color="#bdb5d5"),
    "view": SpanStyle(label="Load: anchors", color="#f4c17a"),
    "keys": SpanStyle(label="Load: critical layers' keys", color="#c678b0"),
    "rest": SpanStyle(label="Load: rest of context", color="#009e73"),
    "speculate": SpanStyle(label="Load: speculative", color="#b8d8a8"),
}  # fmt: skip
"""Span kind (qcfuse.types.STAGES, and what the link reads) -> its look; several kinds share one."""

MODELS = {
    "smollm2_135m": "SmolLM2-135M", "qwen3_8b": "Qwen3-8B", "qwen3_14b": "Qwen3-14B", "qwen3_32b": "Qwen3-32B",
    "llama31_8b": "Llama-3.1-8B", "mistral_v03_7b": "Mistral-v0.3-7B", "mistral_7b": "Mistral-7B", "yi_34b": "Yi-34B",
    "llama_70b": "Llama-70B",
}  # fmt: skip
METRICS = {"string_match_all": "String match", "qa_f1": "F1", "rouge_l": "Rouge-L", "score": "Score"}


def method(selector: str) -> Style:
    """The style of a selector; one that is not listed is drawn in a neutral colour under its own name."""
    return METHODS.get(selector, Style(label=selector, color="#8a5a44", marker="<"))


def span_style(kind: str) -> SpanStyle:
    """The look of a span; a kind that is not listed is drawn in a neutral colour under its own name."""
    return SPANS.get(kind, SpanStyle(label=kind, color="#8a5a44"))


def in_order(selectors: Iterable[str]) -> list[str]:
    return sorted(set(selectors), key=lambda name: (method(name).order, name))


DATASETS = {
    "ruler": "RULER", "single": "single needle", "mq": "multi-query", "mv": "multi-value", "vt": "variable tracking",
    "musique": "MuSiQue", "2wikimqa": "2WikiMQA", "wikimqa": "2WikiMQA", "hotpotqa": "HotpotQA",
}  # fmt: skip


def dataset_label(dataset: str) -> str:
    """`ruler_mq` -> `RULER multi-query`."""
    label = " ".join(DATASETS.get(word, word) for word in dataset.split("_"))
    return label[:1].upper() + label[1:]


def models(names: Iterable[str]) -> str:
    """`Qwen3-8B, SmolLM2-135M`."""
    return ", ".join(MODELS.get(name, name) for name in sorted(set(names)))


def span(counts: Iterable[int]) -> str:
    """How many samples stand behind the points: `30`, or `20–30` where they differ."""
    low, high = int(min(counts)), int(max(counts))
    return f"{low}" if low == high else f"{low}–{high}"


def rhos(values: Iterable[float]) -> str:
    """`ρ = 0.1, 0.3, 0.5`, the endpoints left out."""
    return "ρ = " + ", ".join(f"{rho:g}" for rho in sorted(set(values)) if 0 < rho < 1)


def paper() -> AbstractContextManager:
    """The settings under which a figure is drawn; also a decorator: `@style.paper()`."""
    return matplotlib.rc_context(SETTINGS)


def figure(num_rows: int, num_cols: int, panel_inches: tuple[float, float] = (3.6, 2.7), **kwargs: object) -> tuple:
    """A grid of axes with room for the legend and the note; -> (Figure, [num_rows, num_cols] axes)."""
    width = max(panel_inches[0] * num_cols, 5.4)
    fig = Figure(figsize=(width, panel_inches[1] * num_rows + 0.8), layout="constrained")
    fig.get_layout_engine().set(w_pad=0.06, h_pad=0.06, hspace=0.04, wspace=0.03)
    return fig, fig.subplots(num_rows, num_cols, squeeze=False, **kwargs)


def latency_axis(axes: Axes, label: str) -> None:
    """Latency starts at 0."""
    axes.set_xlim(left=0)
    axes.set_xlabel(label)


def finish(fig: Figure, selectors: Iterable[str], note: str, extra: Iterable[Artist] = ()) -> None:
    """Legend above the panels, in the order of style, and the note below them, wrapped to the width of the figure."""
    handles = [legend_entry(method(name)) for name in in_order(selectors)] + list(extra)
    num_cols = _legend_columns([0.42 + 0.066 * len(handle.get_label()) for handle in handles], fig.get_figwidth())
    # matplotlib fills a legend by columns; the reader goes by rows
    by_rows = [handles[i] for column in range(num_cols) for i in range(column, len(handles), num_cols)]
    fig.legend(handles=by_rows, loc="outside upper center", ncols=num_cols, columnspacing=1.2, handletextpad=0.4,
               handlelength=1.9)  # fmt: skip
    wrapped = "\n".join(textwrap.fill(line, int(fig.get_figwidth() * 19.5)) for line in note.splitlines())
    fig.supxlabel(wrapped, fontsize=7, color="#555555", x=0.012, ha="left", linespacing=1.35)


def _legend_columns(widths: list[float], available: float) -> int:
    """The most columns (at least 3) that fit when entries go by rows; widths and available in inches."""
    for num_cols in range(len(widths), 3, -1):
        if sum(max(widths[column::num_cols]) for column in range(num_cols)) <= available:
            num_rows = -(-len(widths) // num_cols)
            return -(-len(widths) // num_rows)
    return 3


def legend_entry(style: Style, hollow: bool = False) -> Line2D:
    line = "none" if style.marker in "*X" else style.line
    size = 9 if style.marker == "*" else 5.5
    return Line2D([], [], color=style.color, marker=style.marker, linestyle=line, label=style.label, markersize=size,
                  markerfacecolor="white" if hollow else style.color, markeredgecolor=style.color)  # fmt: skip


def save(fig: Figure, frame: pd.DataFrame, outputs: Path, name: str) -> list[Path]:
    """Writes outputs/figures/<name>.csv, .pdf and .png (no time stamps inside) and returns their paths."""
    stem = outputs / "figures" / name
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(suffix) for suffix in (".csv", ".pdf", ".png")]
    frame.to_csv(paths[0], index=False, float_format="%.6g", lineterminator="\n")
    # one layout for both files
    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    fig.savefig(paths[1], metadata={"CreationDate": None})
    fig.savefig(paths[2], metadata={"Software": None})
    return paths
