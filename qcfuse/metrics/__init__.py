"""Answer metrics by name. Each takes (prediction, answers) and gives a score in [0, 1]."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib import import_module

Metric = Callable[[str, Sequence[str]], float]

NAMES = ("qa_f1", "string_match_all")


def get(name: str) -> Metric:
    """The metric called `name`, from the module of that name. Raises ValueError with the nearest name."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown metric {name!r}; did you mean {near!r}? known: {', '.join(NAMES)}")
    return getattr(import_module(f"qcfuse.metrics.{name}"), name)
