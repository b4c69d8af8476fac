"""The three ops of fused prefill: `score`, `recompute_attention`, `place_kv`; each picks the implementation by device.

CPU tensors use `<op>/cpu.py`, CUDA tensors `<op>/kernel.py` (Triton, imported when first needed). The environment
variable QCFUSE_KERNELS overrides that: `ref` takes the plain torch truth, `triton` takes the Triton kernel on every
device (on CPU only under TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from collections import Counter
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

calls: Counter[str] = Counter()
"""Calls per public op name since import; tests clear it and read it."""

_TIERS = {"ref": "ref", "triton": "kernel"}


def implementation(op: str, device: torch.device) -> ModuleType:
    """The module that computes `op` on `device`; counts the call under the op's name.

    Raises ValueError where QCFUSE_KERNELS is neither unset, `ref` nor `triton`.
    """
    calls[op] += 1
    forced = os.environ.get("QCFUSE_KERNELS")
    if forced and forced not in _TIERS:
        raise ValueError(f"QCFUSE_KERNELS={forced!r} is not a tier; leave it unset or give one of {sorted(_TIERS)}")
    tier = _TIERS[forced] if forced else ("kernel" if device.type == "cuda" else "cpu")
    return import_module(f"kernels.{op.partition('.')[0]}.{tier}")
