"""GPU tier of `place_kv`: bf16 against float32, flash-attention's tolerance rule (kernels/gpu_cases.py)."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cases() -> list[str]:
    pytest.importorskip("triton")
    from kernels.gpu_cases import place_cases

    return list(place_cases())


@pytest.mark.parametrize("case", cases())
def test_as_accurate_as_plain_torch(case):
    from kernels.gpu_cases import place_cases

    place_cases()[case]()
