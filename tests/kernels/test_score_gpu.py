"""GPU tier of `score`: the cases of kernels/gpu_cases.py, one test each."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]  # fmt: skip


def names() -> list[str]:
    if not torch.cuda.is_available():
        # Collected everywhere: without a device nothing here may import triton.
        return ["all"]
    from kernels.gpu_cases import score_cases

    return list(score_cases())


@pytest.mark.parametrize("case", names())
def test_as_accurate_as_plain_torch(case):
    from kernels.gpu_cases import score_cases

    score_cases()[case]()
