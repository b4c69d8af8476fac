"""logger=none: nothing is logged beside outputs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qcfuse.loggers.base import RunLogger


class NoLogger(RunLogger):
    """Accepts every call and keeps nothing."""

    def _start(self, cell_name: str, group: str, config: dict[str, Any]) -> None: ...

    def _log_metrics(self, metrics: dict[str, Any]) -> None: ...

    def _log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...

    def _log_image(self, name: str, path: Path) -> None: ...

    def _finish(self) -> None: ...
