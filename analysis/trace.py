"""What the compute thread and the storage link did during one request: trace.json of a cell as a table of spans."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import series
from analysis.cells import Cell, MissingCells, Source, scan
from analysis.cells import load as load_records

ABOUT = ["engine", "model", "dataset", "selector", "rho", "bandwidth", "variant", "link", "num_context_tokens"]
COLUMNS = ["kind", "lane", "layer", "start_ms", "end_ms", "bytes"]
SELECTOR = "qcfuse"
GAP_MS = 0.05
"""Spans of one kind and layer that follow each other within this are one span."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """spans: one row a span, ABOUT (the cell and the request's N) + COLUMNS, sorted by lane and start.

    lane: compute or link; kind: a stage, or what the link reads; layer: NaN without one; milliseconds from arrival.
    """

    spans: pd.DataFrame
    source: str


def load(outputs: Path, experiment: str, source: Source = "auto") -> Trace:
    """Traces of the finished QCFuse cells at the main bandwidth, or the published table where there are none.

    A cell's trace is that of the last sample that it timed. Raises MissingCells where there is neither.
    """
    finished, unfinished = scan(outputs, experiment)
    found = {cell: path / "trace.json" for cell, path in finished.items() if cell.selector == SELECTOR}
    found = {cell: path for cell, path in found.items() if path.exists()}
    published = outputs / "published" / f"{experiment}.csv"
    if found and source != "published":
        main = series.main_bandwidth(cell.bandwidth for cell in found)
        records = load_records(outputs, experiment, "cells").frame
        traces = [_of_cell(cell, path, records) for cell, path in found.items() if cell.bandwidth == main]
        return Trace(spans=pd.concat(traces, ignore_index=True), source=f"trace.json of {len(traces)} cells of "
                     f"{outputs / experiment}")  # fmt: skip
    if published.exists() and source != "cells":
        return Trace(spans=_read_published(published), source=str(published))
    untraced = any(cell.selector == SELECTOR for cell in finished)
    why = f"no finished {SELECTOR} cell of {experiment} has a trace.json"
    raise MissingCells(experiment, unfinished, f"{why}; redo with force=true" if untraced else why)


def publish(outputs: Path, experiment: str) -> Path:
    """Writes outputs/published/<experiment>.csv, the spans of `load` to a microsecond, and returns its path."""
    spans = load(outputs, experiment, "cells").spans
    path = outputs / "published" / f"{experiment}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    spans.astype({"layer": "Int64"}).to_csv(temporary, index=False, lineterminator="\n")
    temporary.replace(path)
    return path


def spans_of(trace: dict) -> pd.DataFrame:
    """A Chrome trace (microseconds) -> COLUMNS; empty spans are dropped, adjacent ones of one kind and layer merged."""
    rows: list[dict] = []
    last: dict[str, dict] = {}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in sorted(events, key=lambda event: (event["cat"], event["ts"])):
        args, start_ms = event["args"], event["ts"] / 1e3
        row = {"kind": args["kind"], "lane": event["cat"], "layer": args["layer"], "start_ms": round(start_ms, 3),
               "end_ms": round(start_ms + event["dur"] / 1e3, 3), "bytes": args["bytes"]}  # fmt: skip
        before = last.get(row["lane"])
        if row["end_ms"] <= row["start_ms"] and not row["bytes"]:
            continue
        if before and _continues(row, before):
            before |= {"end_ms": row["end_ms"], "bytes": before["bytes"] + row["bytes"]}
            continue
        rows.append(row)
        last[row["lane"]] = row
    return pd.DataFrame(rows, columns=COLUMNS).astype({"layer": float, "bytes": "int64"})


def busy_ms(spans: pd.DataFrame) -> float:
    """Milliseconds that at least one of the spans covers."""
    total = upto = 0.0
    for start, end in spans[["start_ms", "end_ms"]].sort_values("start_ms").itertuples(index=False):
        total += max(0.0, end - max(start, upto))
        upto = max(upto, end)
    return total


def _continues(row: dict, before: dict) -> bool:
    alike = (row["kind"], row["layer"]) == (before["kind"], before["layer"])
    return alike and abs(row["start_ms"] - before["end_ms"]) <= GAP_MS and row["end_ms"] >= before["end_ms"]


def _of_cell(cell: Cell, path: Path, records: pd.DataFrame) -> pd.DataFrame:
    names = {name: getattr(cell, name) for name in ABOUT[:-2]} | {"rho": cell.rho_value}
    text = [name for name in names if name != "rho"]
    own = records[(records[text] == pd.Series({name: names[name] for name in text})).all(axis=1)]
    own = own[own["rho"] == names["rho"]]
    timed = own[own["ttft_s"].notna()]
    if timed.empty:
        raise ValueError(f"{path} is the trace of no record of its cell; redo it with force=true")
    try:
        spans = spans_of(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a trace of this harness ({error!r}); redo the cell with force=true") from None
    num_tokens = int(timed["num_context_tokens"].iloc[-1])
    return spans.assign(**names, link=own["link"].iloc[0], num_context_tokens=num_tokens)[[*ABOUT, *COLUMNS]]


def _read_published(path: Path) -> pd.DataFrame:
    text = dict.fromkeys([name for name in ABOUT if name not in ("rho", "num_context_tokens")], "object")
    frame = pd.read_csv(path, dtype=text, keep_default_na=False, na_values={"layer": ""})
    if lacking := [name for name in (*ABOUT, *COLUMNS) if name not in frame]:
        raise ValueError(f"{path} lacks the columns {lacking}; write it with `python -m analysis publish`")
    return frame.astype({"layer": float})
