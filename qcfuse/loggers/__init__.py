"""Run loggers; `create` is the only factory and imports the one that is asked for."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from qcfuse.loggers.base import RunLogger

LOGGERS = {"none": ("qcfuse.loggers.none", "NoLogger"), "wandb": ("qcfuse.loggers.wandb", "WandbLogger")}


def create(name: str, **options: Any) -> RunLogger:
    """The logger called `name` with its options; ValueError for a name that does not exist."""
    if name not in LOGGERS:
        near = get_close_matches(name, LOGGERS, n=1) or sorted(LOGGERS)
        raise ValueError(f"logger {name!r} does not exist; did you mean {' or '.join(near)}?")
    module, class_name = LOGGERS[name]
    return getattr(import_module(module), class_name)(**options)
