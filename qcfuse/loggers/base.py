"""The contract of run loggers: they mirror results elsewhere and never put a result at risk."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


class RunLogger(ABC):
    """One run per cell: start, then log_*, then finish; the same object then starts the next cell.

    Results are already on disk when a logger sees them. Whatever a logger raises becomes one warning, and the rest of
    that run is not logged; the next `start` tries again.
    """

    _broken: bool = False

    def start(self, cell_name: str, group: str, config: dict[str, Any]) -> None:
        """Opens the run of one cell. group: the sweep it belongs to. config: plain values, nested as resolved."""
        self._broken = False
        self._guard(self._start, cell_name, group, config)

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Numbers of the whole cell (metrics.json); nested dicts become `outer.inner`, null values are left out."""
        self._guard(self._log_metrics, {name: value for name, value in flatten(metrics).items() if value is not None})

    def log_table(self, name: str, records: list[dict[str, Any]]) -> None:
        """One row a record; the columns are the union of the records' flattened keys, in order of appearance."""
        rows = [flatten(record) for record in records]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        self._guard(self._log_table, name, columns, [[row.get(column) for column in columns] for row in rows])

    def log_image(self, name: str, path: Path) -> None:
        """A figure, as a PNG file."""
        self._guard(self._log_image, name, Path(path))

    def finish(self) -> None:
        """Closes the run, also one that broke; without a run it does nothing."""
        self._broken = False
        self._guard(self._finish)

    @abstractmethod
    def _start(self, cell_name: str, group: str, config: dict[str, Any]) -> None: ...

    @abstractmethod
    def _log_metrics(self, metrics: dict[str, Any]) -> None: ...

    @abstractmethod
    def _log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...

    @abstractmethod
    def _log_image(self, name: str, path: Path) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...

    def _guard(self, call: Callable[..., None], *args: Any) -> None:
        """A logger may fail in any way (library, disk, service); a measured result outlives all of them."""
        if self._broken:
            return
        try:
            call(*args)
        except Exception as error:
            self._broken = True
            reason = " ".join(str(error).split()) or "no reason given"
            _log.warning("%s stopped logging this run (%s: %s); results are kept in outputs/",
                         type(self).__name__, type(error).__name__, reason)  # fmt: skip


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"ttft_s": {"p20": 1}} -> {"ttft_s.p20": 1}; tuples and lists become text."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(list(value)) if isinstance(value, list | tuple) else value
    return flat
