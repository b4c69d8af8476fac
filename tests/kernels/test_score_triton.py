"""Interpreter tier of `score`: the Triton kernels on CPU against plain torch, fp32 and fp16."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.guarded import guarded
from tests.kernels.interpreter import interpreted

ATOL = 2e-6
"""Both sides take the same fp16 or fp32 inputs to float32 at once, so the dtype does not widen it."""


def inputs(layers: int, rows: int, keys: int, heads: int, heads_kv: int, dim: int, dtype: torch.dtype = torch.float32):
    """q, k and the last visible key of each row, in no order; one row sees key 0 alone, one sees everything."""
    generator = torch.Generator().manual_seed(rows * keys)
    q = torch.randn(layers, rows, heads, dim, generator=generator).to(dtype)
    k = torch.randn(layers, keys, heads_kv, dim, generator=generator).to(dtype)
    last_key = torch.randint(0, keys, (rows,), generator=generator)
    last_key[0] = 0
    last_key[-1] = keys - 1
    return q, k, last_key


def assert_scores(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=ATOL)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("layers", "rows", "keys", "heads", "heads_kv", "dim"),
    [(1, 1, 1, 1, 1, 64), (2, 1, 129, 4, 1, 64), (1, 63, 129, 3, 1, 32), (2, 7, 600, 4, 2, 80), (3, 33, 63, 3, 3, 16)],
)  # fmt: skip
@interpreted
def test_matches_the_whole_matrix(layers, rows, keys, heads, heads_kv, dim, dtype, reduce):
    from kernels.score import kernel, ref

    q, k, last_key = inputs(layers, rows, keys, heads, heads_kv, dim, dtype)
    context = (min(3, keys - 1), keys)
    actual = kernel.score(q, k, last_key, context, reduce)
    assert actual.dtype == torch.float32
    assert_scores(actual, ref.score(q, k, last_key, context, reduce))


@pytest.mark.parametrize("context", [(0, 129), (64, 128), (5, 6), (128, 129), (40, 40)])
@interpreted
def test_context_columns(context):
    from kernels.score import kernel, ref

    q, k, last_key = inputs(2, 9, 129, 2, 1, 32)
    actual = kernel.score(q, k, last_key, context, "max", scale=0.3)
    assert actual.shape == (2, context[1] - context[0])
    assert_scores(actual, ref.score(q, k, last_key, context, "max", scale=0.3))


@pytest.mark.parametrize("layout", ["list", "list of other strides"])
@interpreted
def test_layers_as_a_list(layout):
    from kernels.score import kernel, ref

    q, k, last_key = inputs(3, 9, 129, 4, 2, 32)
    layers = [x.clone() for x in k]
    if layout != "list":
        layers[1] = k[1].transpose(0, 1).contiguous().transpose(0, 1)
    assert_scores(kernel.score(q, layers, last_key, (4, 120), "mean"), ref.score(q, k, last_key, (4, 120), "mean"))


@pytest.mark.parametrize("reduce", ["max", "mean"])
@interpreted
def test_permuted_strides_inside_nan_margins(reduce):
    from kernels.score import kernel, ref

    q, k, last_key = inputs(2, 21, 129, 6, 2, 24)
    actual = kernel.score(
        guarded(*q.shape, fill=q).view, guarded(*k.shape, fill=k).view, last_key, (10, 129), reduce
    )
    assert_scores(actual, ref.score(q, k, last_key, (10, 129), reduce))


@pytest.mark.parametrize("reduce", ["max", "mean"])
@interpreted
def test_keys_that_no_row_sees_may_hold_nan_and_score_zero(reduce):
    from kernels.score import kernel, ref

    q, k, _ = inputs(1, 5, 700, 2, 1, 32)
    last_key = torch.tensor([30, 7, 99, 0, 50])
    expected = ref.score(q, k, last_key, (0, 700), reduce)
    k[:, 100:] = float("nan")
    actual = kernel.score(q, k, last_key, (0, 700), reduce)
    assert_scores(actual, expected)
    assert not actual[:, 100:].any()


@interpreted
def test_mean_over_all_keys_sums_to_one():
    from kernels.score import kernel

    q, k, last_key = inputs(2, 17, 1100, 2, 1, 32)
    total = kernel.score(q * 40, k, last_key, (0, 1100), "mean").sum(-1)
    torch.testing.assert_close(total, torch.ones(2), rtol=0, atol=1e-5)
