"""The files of one cell: what is finished is skipped, what was interrupted resumes by sample id."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from qcfuse.types import Record
from runners.cell import Cell

if TYPE_CHECKING:
    from runners.link_speed import LinkSpeed


class CellDir:
    """records.jsonl grows a line per sample (quality), timings.jsonl one per timed sample; `finish` joins them.

    Making one only looks. Raises ValueError where the directory holds another configuration's results.
    """

    def __init__(self, cell: Cell, num_samples: int, num_timed: int) -> None:
        self.cell, self.path = cell, cell.path
        self.asked = {"num_samples": num_samples, "num_timed": num_timed}
        done = None if cell.force else self._read_json("DONE")
        if not cell.force:
            self._check_config()
        self.finished = done is not None and all(done[name] >= count for name, count in self.asked.items())
        self.records: dict[str, dict[str, Any]] = {}
        self.timings: dict[str, dict[str, Any]] = {}
        self.link_speed: LinkSpeed | None = None

    def open(self, env: dict[str, Any]) -> None:
        """Makes the directory ready for more records and reads those it has; force empties it first."""
        if self.cell.force and self.path.exists():
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "DONE").unlink(missing_ok=True)
        write_atomic(self.path / "config.yaml", yaml.safe_dump(self.cell.config, sort_keys=False))
        notes = {"link": self.noted("link")}
        write_atomic(self.path / "env.json", json.dumps({"config_sha256": self.cell.sha256, **env, **notes}, indent=2))
        self.records = {line["sample_id"]: line for line in read_lines(self.path / "records.jsonl")}
        self.timings = {line["sample_id"]: line for line in read_lines(self.path / "timings.jsonl")}
        for record in self._records_beside():
            if record.sample_id not in self.records:
                self.add_record(record)

    def note(self, **values: Any) -> None:
        """Adds what was found out while the cell ran to env.json."""
        env = {**(self._read_json("env.json") or {}), **values}
        write_atomic(self.path / "env.json", json.dumps(env, indent=2))

    def noted(self, name: str) -> Any:
        return (self._read_json("env.json") or {}).get(name)

    def add_record(self, record: Record) -> None:
        self.records[record.sample_id] = record.to_json()
        append_line(self.path / "records.jsonl", self.records[record.sample_id])

    def add_timing(self, sample_id: str, timing: dict[str, Any]) -> None:
        self.timings[sample_id] = {"sample_id": sample_id, **timing}
        append_line(self.path / "timings.jsonl", self.timings[sample_id])

    def write_trace(self, trace: dict[str, Any]) -> None:
        write_atomic(self.path / "trace.json", json.dumps(trace))

    def merge(self, sample_ids: Iterable[str]) -> list[dict[str, Any]]:
        """The records of these samples, in order, with the times of those that were timed."""
        fields = set(Record.__dataclass_fields__)
        merged = []
        for sample_id in sample_ids:
            timing = {key: value for key, value in self.timings.get(sample_id, {}).items() if key in fields}
            merged.append({**self.records[sample_id], **timing})
        return merged

    def finish(self, records: Iterable[dict[str, Any]], metrics: dict[str, Any]) -> None:
        """Writes the merged records, metrics, and DONE last."""
        write_atomic(self.path / "records.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        write_atomic(self.path / "metrics.json", json.dumps(metrics, indent=2))
        write_atomic(self.path / "DONE", json.dumps({"config_sha256": self.cell.sha256, **self.asked}))

    def _records_beside(self) -> Iterator[Record]:
        """Quality records of cells that differ from this one in storage and bandwidth only (times are left out)."""
        if self.cell.force or self.cell.dump or self.cell.rho == "auto":
            return
        for path in sorted(self.path.parent.glob("rho=*/config.yaml")):
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            if path.parent == self.path or self.cell.quality_key(config) != self.cell.quality_key():
                continue
            env = json.loads((path.parent / "env.json").read_text(encoding="utf-8"))
            if env.get("config_sha256") == self.cell.sha256_of(config):  # the same critical layers as well
                for line in read_lines(path.parent / "records.jsonl"):
                    yield Record(**{**line, **UNTIMED})

    def _check_config(self) -> None:
        env = self._read_json("env.json")
        if env is not None and env.get("config_sha256") != self.cell.sha256:
            raise ValueError(
                f"{self.path} holds results of another configuration (hash {str(env.get('config_sha256'))[:12]}, this "
                f"one has {self.cell.sha256[:12]}); give force=true to redo it, or another output_dir"
            )

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


UNTIMED = {
    name: getattr(Record(sample_id="", prompt_sha256=""), name)
    for name in ("ttft_s", "decode_s", "e2e_s", "stages_s", "bytes", "pipeline_efficiency", "arms_ttft_s")
}
"""The timed fields of a record as they are before it has been timed."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a jsonl file; what a kill left of its last line is cut off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].decode().splitlines()
    values = [json.loads(line) for line in lines]
    write_atomic(path, "".join(line + "\n" for line in lines))
    return values


def append_line(path: Path, value: dict[str, Any]) -> None:
    """One line, on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, text: str) -> None:
    """Written beside and renamed, so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
