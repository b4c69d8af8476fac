"""Weights & Biases: offline by default, so that no account, key or network is needed (`wandb sync` uploads later)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qcfuse.loggers.base import RunLogger

MODES = ("offline", "online", "disabled")


@dataclass(kw_only=True)
class WandbLogger(RunLogger):
    """One W&B run per cell, grouped per sweep, under <output_dir>/wandb.

    mode: offline (nothing leaves the machine), online (asks for an account) or disabled.
    start_timeout_s: how long the W&B service may take to come up before the run goes on without it.
    """

    project: str
    mode: str
    output_dir: Path
    start_timeout_s: float
    _run: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"logger.mode={self.mode!r} is unknown; give one of {', '.join(MODES)}")
        if self.start_timeout_s <= 0:
            raise ValueError(f"logger.start_timeout_s={self.start_timeout_s} must be above 0 seconds")
        if not self.project:
            raise ValueError("logger.project is empty; give the name of a W&B project")
        self.output_dir = Path(self.output_dir)

    def _start(self, cell_name: str, group: str, config: dict[str, Any]) -> None:
        directory = self.output_dir / "wandb"
        directory.mkdir(parents=True, exist_ok=True)
        self._keep_at_home(directory.resolve())
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True,
            init_timeout=self.start_timeout_s,
        )  # fmt: skip
        self._run = wandb.init(project=self.project, name=cell_name, group=group, config=config, mode=self.mode,
                               dir=str(self.output_dir), settings=settings, reinit="finish_previous")  # fmt: skip

    def _keep_at_home(self, directory: Path) -> None:
        """W&B reads these when it is imported: no crash reports, and caches beside the runs, not in the home folder."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        for name in ("CACHE", "CONFIG", "DATA"):
            os.environ.setdefault(f"WANDB_{name}_DIR", str(directory / name.lower()))

    def _log_metrics(self, metrics: dict[str, Any]) -> None:
        self._run.summary.update(metrics)

    def _log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        # columns of mixed type (a failed sample's nulls, an integral mean) are legal here
        self._run.log({name: wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})

    def _log_image(self, name: str, path: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(path))})

    def _finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
