"""Finding, reading and publishing the cells of an experiment.

A cell is outputs/<experiment>/<engine>/<model>/<dataset>/<selector>/rho=<rho>,bw=<bandwidth>[,<overrides>]/ and is
finished once DONE lies in it. The compact form, outputs/published/<experiment>.csv, has one row a record.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

KEYS = ["experiment", "engine", "model", "dataset", "selector", "rho", "bandwidth", "variant"]
"""The columns that name a cell. rho is a float (NaN for `auto`); bandwidth ("none": not throttled) and variant are text
as in the path."""

VALUES = [
    "score", "first_token_kl", "top1_agrees", "answer_kl", "answer_agreement_frac", "ttft_s", "decode_s",
    "num_context_tokens", "num_selected", "effective_recompute_frac", "select_s", "e2e_s", "pipeline_efficiency",
    "bytes_requested", "bytes_before_recompute", "bytes_device", "bytes_total_kv", "bytes_wasted",
]  # fmt: skip
"""Numbers of a record, NaN where it has none. Times in seconds; select_s: what selection takes of TTFT (SELECT_STAGES);
bytes_<name>: the field `name` of the record's `bytes`."""

SELECT_STAGES = ("probe", "wait_select", "score", "select")
PUBLISHED_COLUMNS = [*KEYS, "metric", "link", "sample_id", *VALUES, "failed"]
ADDED = ["link", *VALUES[VALUES.index("select_s") :]]
"""Columns that tables published before the storage link existed may lack; they then read as "" and NaN."""

ENDPOINT_RHO = {"full_prefill": 1.0, "direct_reuse": 0.0}
Source = Literal["auto", "cells", "published"]
_LEAF = re.compile(r"rho=(?P<rho>[^,]+),bw=(?P<bandwidth>[^,]+)(?:,(?P<variant>.*))?")


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One point of a sweep. rho: text as in the path ("0.1", "auto"); variant: further overrides, "" without."""

    experiment: str
    engine: str
    model: str
    dataset: str
    selector: str
    rho: str
    bandwidth: str
    variant: str = ""

    def __str__(self) -> str:
        variant = f",{self.variant}" if self.variant else ""
        return f"{self.engine}/{self.model}/{self.dataset}/{self.selector}/rho={self.rho},bw={self.bandwidth}{variant}"

    @property
    def rho_value(self) -> float:
        return float("nan") if self.rho == "auto" else float(self.rho)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Records of an experiment. frame: one row a record, PUBLISHED_COLUMNS.

    link: what the storage link of the cell stands for, in words, "" where there was none.
    """

    frame: pd.DataFrame
    unfinished: tuple[Cell, ...]
    source: str


class MissingCells(ValueError):
    """Raised where a figure or a scale needs cells that outputs/ does not have; carries them and their command."""

    def __init__(self, experiment: str, cells: tuple[Cell, ...] = (), why: str = "") -> None:
        self.experiment, self.cells = experiment, cells
        listed = "".join(f"\n  missing  {cell}" for cell in cells[:12])
        more = f"\n  ... and {len(cells) - 12} more" if len(cells) > 12 else ""
        head = why or f"experiment {experiment} has {'missing' if cells else 'no finished'} cells"
        super().__init__(f"{head}{listed}{more}\n  run  {command_for(experiment, cells)}")


def command_for(experiment: str, cells: tuple[Cell, ...] = ()) -> str:
    """The command that measures `cells`, or the whole experiment; cells that are finished are skipped by it."""
    parts = [f"python run.py experiment={experiment}"]
    for group in ("engine", "model", "dataset", "selector"):
        values = sorted({getattr(cell, group) for cell in cells})
        parts += [f"{group}={','.join(values)}"] if values else []
    rhos = sorted({cell.rho for cell in cells if cell.selector not in ENDPOINT_RHO})
    parts += [f"rho={','.join(rhos)}"] if rhos else []
    bandwidths = sorted({cell.bandwidth.replace("none", "null") for cell in cells})
    parts += [f"bandwidth={','.join(bandwidths)}"] if bandwidths else []
    variants = {cell.variant for cell in cells}
    # a path holds long values shortened, marked with ~; those overrides are left to the reader
    parts += (
        sorted(text for text in variants.pop().split(",") if "~" not in text and text) if len(variants) == 1 else []
    )
    parts += ["-m"] if cells else []
    return " ".join(parts)


def parse(directory: Path, outputs: Path) -> Cell | None:
    """The cell that a directory below `outputs` stands for, None where the path is not that of a cell."""
    parts = directory.relative_to(outputs).parts
    leaf = _LEAF.fullmatch(parts[-1]) if len(parts) == 6 else None
    if leaf is None:
        return None
    names = dict(zip(("experiment", "engine", "model", "dataset", "selector"), parts[:5], strict=True))
    return Cell(**names, rho=leaf["rho"], bandwidth=leaf["bandwidth"], variant=leaf["variant"] or "")


def scan(outputs: Path, experiment: str) -> tuple[dict[Cell, Path], tuple[Cell, ...]]:
    """Finished cells with their directories, and the cells that were begun and not finished."""
    finished, unfinished = {}, []
    for config in sorted((outputs / experiment).glob("*/*/*/*/*/config.yaml")):
        cell = parse(config.parent, outputs)
        if cell and (config.parent / "DONE").exists():
            finished[cell] = config.parent
        elif cell:
            unfinished.append(cell)
    return finished, tuple(unfinished)


def load(outputs: Path, experiment: str, source: Source = "auto") -> Loaded:
    """Records of the finished cells, or of the published table where there are none (or `source` asks for it).

    Raises MissingCells where neither exists, ValueError where a file of a finished cell cannot be read.
    """
    finished, unfinished = scan(outputs, experiment)
    published = outputs / "published" / f"{experiment}.csv"
    if finished and source != "published":
        frame = pd.concat([_read_cell(cell, path) for cell, path in finished.items()], ignore_index=True)
        _check_same_prompts(frame)
        return Loaded(frame=frame, unfinished=unfinished, source=f"{len(finished)} cells of {outputs / experiment}")
    if published.exists() and source != "cells":
        return Loaded(frame=read_published(published), unfinished=(), source=str(published))
    raise MissingCells(experiment, unfinished)


def read_published(path: Path) -> pd.DataFrame:
    """The frame of `load` out of a published table; ValueError names the columns that it lacks, those ADDED apart."""
    text = dict.fromkeys(["experiment", "engine", "model", "dataset", "selector", "bandwidth", "variant", "metric",
                          "link", "sample_id"], "object")  # fmt: skip
    frame = pd.read_csv(path, dtype=text, keep_default_na=False, na_values={"rho": "", **dict.fromkeys(VALUES, "")})
    lacking = [name for name in PUBLISHED_COLUMNS if name not in frame]
    if lost := [name for name in lacking if name not in ADDED]:
        raise ValueError(f"{path} lacks the columns {lost}; write it with `python -m analysis publish`")
    frame = frame.assign(**{name: "" if name == "link" else float("nan") for name in lacking})
    frame[VALUES] = frame[VALUES].astype(float)
    return frame.assign(failed=frame["failed"].astype(bool))


def publish(outputs: Path, experiment: str) -> Path:
    """Writes outputs/published/<experiment>.csv from the finished cells (five digits a number) and returns its path."""
    frame = load(outputs, experiment, "cells").frame
    compact = frame[PUBLISHED_COLUMNS].assign(failed=frame["failed"].astype(int))
    path = outputs / "published" / f"{experiment}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    compact.sort_values([*KEYS, "sample_id"]).to_csv(temporary, index=False, float_format="%.5g", lineterminator="\n")
    temporary.replace(path)
    return path


def _read_cell(cell: Cell, path: Path) -> pd.DataFrame:
    records = _read_records(path / "records.jsonl")
    metrics = path / "metrics.json"
    summary = json.loads(metrics.read_text(encoding="utf-8")) if metrics.exists() else {}
    frame = pd.DataFrame([_row(record) for record in records]).astype(dict.fromkeys(VALUES, float))
    names = {name: getattr(cell, name) for name in KEYS if name != "rho"}
    return frame.assign(**names, rho=cell.rho_value, metric=str(summary.get("metric", "score")),
                        link=(summary.get("link") or {}).get("description") or "",
                        failed=[record.get("error") is not None for record in records])  # fmt: skip


def _row(record: dict) -> dict:
    stages_s, num_bytes = record.get("stages_s") or {}, record.get("bytes") or {}
    derived = {f"bytes_{name}": value for name, value in num_bytes.items()}
    if stages_s:
        derived["select_s"] = sum(stages_s.get(stage, 0.0) for stage in SELECT_STAGES)
    return {name: derived.get(name, record.get(name)) for name in ("sample_id", "prompt_sha256", *VALUES)}


def _read_records(path: Path) -> list[dict]:
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
        try:
            records += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}, is not JSON ({error.msg}); redo the cell with force=true"
            ) from None
    ids = [record["sample_id"] for record in records]
    if twice := sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []:
        raise ValueError(f"{path} holds {twice[:3]} more than once; redo the cell with force=true")
    if not records:
        raise ValueError(f"{path} is empty although the cell is finished; redo the cell with force=true")
    return records


def _check_same_prompts(frame: pd.DataFrame) -> None:
    """Samples are compared by their id, which is only fair while the id stands for one prompt."""
    by_sample = ["engine", "model", "dataset", "variant", "sample_id"]
    prompts = frame.groupby(by_sample)["prompt_sha256"].nunique()
    if (prompts > 1).any():
        sample = dict(zip(by_sample, prompts.idxmax(), strict=True))
        raise ValueError(f"{sample} stands for different prompts in different cells of {frame['experiment'].iloc[0]}; "
                         "redo the older cells with force=true")  # fmt: skip
