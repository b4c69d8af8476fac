"""Picks and layer choices, by hand."""

from __future__ import annotations

import pytest
import torch

from qcfuse.fusion.layout import Layout
from qcfuse.selectors.base import resolve_layers, top_indices
from qcfuse.types import budget
from tests.factories import selector
from tests.fusion.conftest import make_request


@pytest.mark.parametrize(
    "rho,num,expected", [(0.35, 180, 63), (0.29, 100, 29), (0.1, 9, 0), (1, 7, 7), ("0.57", 100, 57)]
)
def test_budget_is_decimal(rho, num, expected):
    assert budget(rho, num) == expected


@pytest.mark.parametrize("rho", [-0.1, 1.01, "x", "nan", None])
def test_budget_refuses(rho):
    with pytest.raises(ValueError, match=str(rho)):
        budget(rho, 10)


def test_epic_takes_chunk_starts_and_gives_the_rest_to_who_lost_most():
    layout = Layout(make_request(chunks=(7, 12, 1, 20)), "cpu")
    picked = selector("epic").pick(layout, 0.3, None, 0).tolist()
    # floor(.3 x 7, 12, 1, 20) = 2, 3, 0, 6 and |P| = 12: the twelfth goes to chunk 1, which lost 0.6.
    assert picked == [0, 1, 7, 8, 9, 10, 20, 21, 22, 23, 24, 25]


def test_epic_at_the_paper_setting_takes_51_tokens_a_chunk():
    layout = Layout(make_request(chunks=(512,) * 4), "cpu")
    picked = selector("epic").pick(layout, 0.1, None, 0)
    assert torch.bincount(layout.chunk_of[picked]).tolist() == [51, 51, 51, 51]


def test_random_is_seeded_by_prompt_and_seed_and_nested_over_rho():
    layout = Layout(make_request(), "cpu")
    small, again, large, other = (
        set(selector("random").pick(layout, rho, None, seed).tolist())
        for rho, seed in ((0.2, 1), (0.2, 1), (0.5, 1), (0.2, 2))
    )
    assert small == again and small < large and small != other
    assert set(selector("random").pick(Layout(make_request(seed=5), "cpu"), 0.2, None, 1).tolist()) != small


def test_top_indices_breaks_ties_by_the_lower_index():
    scores = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    assert top_indices(scores, 3).tolist() == [0, 1, 3]


CRITICAL = {"default": (5, 2, 5, 7), "later_list": (1, 3)}


@pytest.mark.parametrize(
    "layers,top_k,expected",
    [
        ("default", 3, (2, 5, 7)), ("default", 1, (5,)), ("later_list", 3, (1, 3)), ("all", 1, tuple(range(9))),
        ("first", 1, (0,)), ("middle", 1, (4,)), ("final", 1, (8,)), ([8, 1, 1], 3, (1, 8)),
    ],
)  # fmt: skip
def test_layers(layers, top_k, expected):
    assert resolve_layers(layers, top_k, 9, CRITICAL) == expected


@pytest.mark.parametrize(
    "layers,message", [("defualt", "defualt"), ([9], "0 to 8"), ([], "empty"), ("later_list", "runner=profile")]
)
def test_layers_that_do_not_exist(layers, message):
    with pytest.raises(ValueError, match=message):
        resolve_layers(layers, 3, 9, {} if layers == "later_list" else CRITICAL)
