"""The root of every configuration. A key that is not here does not compose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class RootConfig:
    """Groups first, then the scalars that a user sweeps.

    rho: share of context tokens recomputed (a number from 0 to 1). bandwidth: GB/s of the storage link, None for
    unthrottled. limit: samples per cell, None for all. reduce: how scores join heads and question rows.
    force: redo finished cells. dump: keep importances and selections. output_dir: where cells go.
    experiment_name: set by an experiment file; the first folder below output_dir.
    """

    model: Any = MISSING
    dataset: Any = MISSING
    selector: Any = MISSING
    engine: Any = MISSING
    storage: Any = MISSING
    anchors: Any = MISSING
    runner: Any = MISSING
    logger: Any = MISSING
    scale: Any = MISSING
    rho: Any = MISSING
    bandwidth: float | None = None
    limit: int | None = None
    seed: int = MISSING
    reduce: str = MISSING
    force: bool = MISSING
    dump: bool = MISSING
    output_dir: str = MISSING
    experiment_name: str = MISSING


def register() -> None:
    """Makes the schema known to hydra under the name that conf/config.yaml extends."""
    ConfigStore.instance().store(name="root_schema", node=RootConfig)
