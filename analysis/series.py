"""The bandwidths that an experiment was measured at: which one a figure shows, and what its link stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from analysis.cells import Loaded

PREFERRED = "10"
"""GB/s that the figures' experiment files ask for, as in the path of a cell."""

ALL = "all"


def in_order(bandwidths: Iterable[str]) -> list[str]:
    """Slowest first, unthrottled ("none") last."""
    return sorted(set(bandwidths), key=lambda text: float("inf") if text == "none" else float(text))


def main_bandwidth(bandwidths: Iterable[str]) -> str:
    """The one that a figure is about: PREFERRED where it was measured, else the fastest throttled one, else "none"."""
    names = in_order(bandwidths)
    throttled = [name for name in names if name != "none"]
    return PREFERRED if PREFERRED in names else (throttled or names)[-1]


def only(loaded: Loaded, bandwidth: str | None = None) -> Loaded:
    """What was measured at one bandwidth: the main one unless it is named; ALL leaves everything in.

    Raises ValueError where no finished cell has the bandwidth that was asked for.
    """
    known = in_order(loaded.frame["bandwidth"])
    wanted = main_bandwidth(known) if bandwidth is None else bandwidth
    if wanted == ALL:
        return loaded
    if wanted not in known:
        raise ValueError(f"no finished cell at bandwidth {wanted}; there are {', '.join([*known, ALL])}")
    unfinished = tuple(cell for cell in loaded.unfinished if cell.bandwidth == wanted)
    return replace(loaded, frame=loaded.frame[loaded.frame["bandwidth"] == wanted], unfinished=unfinished)


def words(rows: pd.DataFrame) -> str:
    """Rows with `bandwidth` and `link` -> a sentence for notes, of the slowest and the fastest link where several."""
    links = []
    for bandwidth in in_order(rows["bandwidth"]):
        if bandwidth != "none":
            described = sorted(set(rows.loc[rows["bandwidth"] == bandwidth, "link"]) - {""})
            links += described or [f"{bandwidth} GB/s"]
    ends = links if len(links) < 3 else [links[0], links[-1]]
    text = f"Storage link: {(' to ' if len(links) > 2 else '; ').join(ends)}." if links else ""
    if not (rows["bandwidth"] == "none").any():
        return text
    return f"{text} Bandwidth none: caches in memory." if text else "Caches in memory, no storage link."


def matched_to(rows: pd.DataFrame) -> str:
    """What an axis of nominal bandwidths adds: `compute-matched to Qwen3-8B on H20`, "" for links taken as they are."""
    kinds = {re.sub(r"^[\d.]+ GB/s ?| ?\([^()]*\)$", "", link) for link in rows["link"] if link}
    return "; ".join(sorted(kinds - {""}))
