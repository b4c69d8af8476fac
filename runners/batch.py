"""The cells of one engine and dataset, evaluated together: a quality pass, a timed pass, the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qcfuse import metrics
from qcfuse.engine.base import Arm, Engine, Quality, Timing
from qcfuse.engine.cost import Shape
from qcfuse.types import Record, Request
from runners.calibrate import cost_model
from runners.cell_dir import CellDir
from runners.dump import write_dump
from runners.link_speed import LinkSpeed, link_speed
from runners.references import References
from runners.summary import summarise, with_faster_arm


class Batch:
    """dirs: the unfinished cells. Every record is on disk before the next sample starts."""

    def __init__(self, engine: Engine, dirs: Sequence[CellDir], requests: Sequence[Request]) -> None:
        self.engine, self.dirs, self.requests = engine, dirs, requests
        cell = dirs[0].cell
        self.label = f"{cell.choices['model']} {cell.choices['dataset']}"
        self.metric = metrics.get(cell.dataset.metric)
        self.references = References(Path(cell.output_dir, "references"), engine)

    def judge(self, request: Request) -> None:
        """One probe per selector and one decoding batch for all cells that still miss the sample."""
        alike: dict[str, list[CellDir]] = {}
        for cell_dir in self.dirs:
            if request.sample_id not in cell_dir.records:
                alike.setdefault(cell_dir.cell.quality_key(), []).append(cell_dir)
        if alike:
            judged = self._judge(request, list(alike.values()))
            for dirs, record in zip(alike.values(), judged, strict=True):
                for cell_dir in dirs:
                    cell_dir.add_record(record)

    def time(self, decode: bool) -> None:
        """Request by request, the cells in turn, in an order that rotates with the sample; a warm-up is discarded."""
        requests = self.requests[: self.dirs[0].asked["num_timed"]]
        if any(request.sample_id not in d.timings for request in requests for d in self.dirs):
            for cell_dir in self.dirs:
                self._set_link(cell_dir)
            for cell_dir in {d.cell.choices["selector"]: d for d in self.dirs}.values():
                self._time(cell_dir, requests[0], decode=False)
        for number, request in enumerate(tqdm(requests, desc=f"time {self.label}", unit="sample")):
            shift = number % len(self.dirs)
            for cell_dir in [*self.dirs[shift:], *self.dirs[:shift]]:
                failed = cell_dir.records[request.sample_id]["error"] is not None
                if not failed and request.sample_id not in cell_dir.timings:
                    timing = self._time(cell_dir, request, decode=decode)
                    cell_dir.write_trace(timing.trace)
                    cell_dir.add_timing(request.sample_id, timing_fields(timing))

    def _time(self, cell_dir: CellDir, request: Request, *, decode: bool) -> Timing:
        gb_per_s = self._set_link(cell_dir).gb_per_s
        return self.engine.time(request, self._arm(cell_dir, request), decode=decode, gb_per_s=gb_per_s)

    def _set_link(self, cell_dir: CellDir) -> LinkSpeed:
        """How fast the cell's link is, found out once."""
        if cell_dir.link_speed is None:
            cell_dir.link_speed = link_speed(cell_dir.cell, self.engine, self.requests[0])
            cell_dir.note(link=cell_dir.link_speed.to_json())
        return cell_dir.link_speed

    def _arm(self, cell_dir: CellDir, request: Request) -> Arm:
        cell = cell_dir.cell
        rho = cell.rho
        if rho == "auto":
            gb_per_s = self._set_link(cell_dir).gb_per_s
            directory = Path(cell.output_dir, "calibration")
            model = cost_model(self.engine, cell.selector, cell.seed, self.requests[0], gb_per_s, directory)
            spec = cell.selector.probe_spec(self.engine.decoder.num_layers, self.engine.critical)
            row_bytes = self.engine.geometry.row_bytes
            rho = model.hiding_rho(Shape.of(request), spec, row_bytes=row_bytes, gb_per_s=gb_per_s)
        return Arm(selector=cell.selector, rho=rho, seed=cell.seed)

    def finish(self) -> None:
        sample_ids = [request.sample_id for request in self.requests]
        for cell_dir in self.dirs:
            cell_dir.timings = with_faster_arm(cell_dir.timings)
            records = cell_dir.merge(sample_ids)
            summary = {**summarise(records, cell_dir.cell.dataset.metric), "link": cell_dir.noted("link")}
            cell_dir.finish(records, summary)
            log_cell(cell_dir, records, summary)
            print(f"done: {cell_dir.path}  {headline(summary)}")

    def _judge(self, request: Request, groups: Sequence[Sequence[CellDir]]) -> list[Record]:
        """A record for each group of cells of equal quality. A failed sample is a record with its error, scored 0,
        never dropped."""
        arms = [self._arm(dirs[0], request) for dirs in groups]
        try:
            judged = self.engine.judge(request, arms, self.references.of(request))
        except (RuntimeError, ValueError) as error:
            failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return [
                Record(sample_id=request.sample_id, prompt_sha256=request.prompt_sha256, answers=request.answers,
                       evidence_cut_by_seam=request.evidence_cut_by_seam, error=failed)
                for _ in groups
            ]  # fmt: skip
        for dirs, quality in zip(groups, judged, strict=True):
            for cell_dir in dirs:
                if cell_dir.cell.dump:
                    write_dump(cell_dir.path / "dumps", request, quality)
        return [self._record(request, quality) for quality in judged]

    def _record(self, request: Request, quality: Quality) -> Record:
        prediction = self.engine.tokenizer.decode(quality.output_ids, skip_special_tokens=True)
        return Record(
            sample_id=request.sample_id,
            prompt_sha256=request.prompt_sha256,
            prediction=prediction,
            answers=request.answers,
            score=self.metric(prediction, request.answers),
            first_token_kl=quality.first_token_kl,
            top1_agrees=quality.top1_agrees,
            answer_kl=quality.answer_kl,
            answer_agreement_frac=quality.answer_agreement_frac,
            num_context_tokens=request.num_context_tokens,
            num_selected=quality.selection.selected.shape[0],
            effective_recompute_frac=quality.effective_recompute_frac,
            num_output_tokens=len(quality.output_ids),
            evidence_cut_by_seam=request.evidence_cut_by_seam,
        )


def timing_fields(timing: Timing) -> dict[str, Any]:
    fields = {key: value for key, value in asdict(timing).items() if key not in ("trace", "program")}
    e2e_s = None if timing.decode_s is None else timing.ttft_s + timing.decode_s
    return {**fields, "e2e_s": e2e_s}


def log_cell(cell_dir: CellDir, records: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    cell = cell_dir.cell
    run = cell.logger
    run.start(cell.name, cell.experiment_name, cell.config)
    run.log_metrics(summary)
    run.log_table("records", records)
    run.finish()


def headline(summary: dict[str, Any]) -> str:
    ttft = summary["ttft_s"]["median"]
    shown = "not timed" if ttft is None else f"{ttft:.3f} s"
    return (
        f"n={summary['n']} failed={summary['n_failed']} {summary['metric']}={summary['score_mean']:.3f} "
        f"answer_kl={summary['answer_kl_mean']:.4f} ttft={shown}"
    )
