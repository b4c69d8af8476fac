"""CPU score: exact softmax over all visible keys, context columns kept."""

from __future__ import annotations

import pytest
import torch

from kernels.score import cpu, ref, score
from tests.kernels.guarded import guarded


def truth(q, k, q_last_key, context, reduce, scale=None):
    """One row, one head, one layer at a time, in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    num_layers, num_rows, num_heads, _ = q.shape
    result = torch.zeros(num_layers, num_rows, num_heads, k.shape[1], dtype=torch.float64)
    for layer in range(num_layers):
        for row in range(num_rows):
            for head in range(num_heads):
                seen = int(q_last_key[row]) + 1
                keys = k[layer, :seen, head * k.shape[2] // num_heads].double()
                result[layer, row, head, :seen] = (keys @ q[layer, row, head].double() * scale).softmax(0)
    kept = result[..., slice(*context)]
    return (kept.amax((1, 2)) if reduce == "max" else kept.mean((1, 2))).float()


def case(num_rows, num_keys, heads=(9, 3), num_layers=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q = (2 * torch.randn(num_layers, num_rows, heads[0], 64, generator=generator)).to(dtype)
    k = torch.randn(num_layers, num_keys, heads[1], 64, generator=generator).to(dtype)
    return q, k, torch.arange(num_keys - num_rows, num_keys)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (4, 1)])
@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 1), (1, 63), (63, 129), (7, 300)])
def test_shapes_and_groups(reduce, heads, num_rows, num_keys):
    q, k, last_key = case(num_rows, num_keys, heads)
    for context in ((0, num_keys), (num_keys // 3, num_keys - num_keys // 3)):
        expected = truth(q, k, last_key, context, reduce)
        for implementation in (cpu, ref):
            actual = implementation.score(q, k, last_key, context, reduce)
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_rows_out_of_order_and_columns_that_nobody_sees(reduce):
    q, k, _ = case(5, 129)
    last_key = torch.tensor([90, 3, 50, 90, 0])
    expected = truth(q, k, last_key, (40, 120), reduce)
    assert not expected[:, 51:].any()
    torch.testing.assert_close(score(q, k, last_key, (40, 120), reduce), expected, atol=1e-6, rtol=1e-5)
    assert not score(q, k, last_key, (100, 120), reduce).any()


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_blocks_of_rows_agree_with_one_block(reduce, monkeypatch):
    q, k, last_key = case(23, 200)
    whole = cpu.score(q, k, last_key, (10, 170), reduce)
    for elements in (1, 9 * 200 * 5):
        monkeypatch.setattr(cpu, "_BLOCK_ELEMENTS", elements)
        torch.testing.assert_close(cpu.score(q, k, last_key, (10, 170), reduce), whole, atol=1e-6, rtol=1e-5)


def test_list_of_layers_with_permuted_strides_inside_nan():
    q, k, last_key = case(7, 129)
    held = [guarded(*layer.shape, fill=layer).view for layer in k]
    queries = guarded(*q.shape, fill=q).view
    assert torch.equal(score(queries, held, last_key, (5, 120)), score(q, k, last_key, (5, 120)))


def test_scale_and_empty_context():
    q, k, last_key = case(7, 63)
    torch.testing.assert_close(
        score(q, k, last_key, (3, 50), "mean", 0.3), truth(q, k, last_key, (3, 50), "mean", 0.3), atol=1e-6, rtol=1e-5
    )
    assert score(q, k, last_key, (9, 9)).shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_scored_in_float32(dtype):
    q, k, last_key = case(9, 129, dtype=dtype)
    actual = score(q, k, last_key, (5, 100))
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual, truth(q, k, last_key, (5, 100), "max"), atol=1e-6, rtol=1e-5)


def test_unknown_reduce_is_named():
    with pytest.raises(ValueError, match="'sum'.*max"):
        score(*case(2, 9), (0, 5), reduce="sum")
