"""Runs a test under Triton's interpreter, in a process of its own.

TRITON_INTERPRET must be set before triton is imported and would spoil the compile tier in the same process, so the body
of an `@interpreted` test runs in one worker that all of them share; pytest sees an ordinary test.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, wraps
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator, innermost: parameters and exceptions are pickled on their way to and from the worker."""

    @wraps(test)
    def submitted(**parameters: Any) -> None:
        _worker().submit(_run, test.__code__.co_filename, test.__name__, parameters).result()

    return submitted


@cache
def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_set_up)


def _set_up() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)


@cache
def _load(path: str) -> ModuleType:
    spec = spec_from_file_location("interpreted_tests", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(path: str, name: str, parameters: dict[str, Any]) -> None:
    getattr(_load(path), name).__wrapped__(**parameters)
