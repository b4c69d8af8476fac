import math

import numpy as np
import pytest
import torch

from qcfuse import metrics
from qcfuse.metrics.postprocess import clean_prediction
from qcfuse.metrics.qa_f1 import normalise
from qcfuse.metrics.recall_at import recall_at


@pytest.mark.parametrize(("prediction", "answers", "expected"), [
    ("1234567, 7654321", ["1234567", "7654321"], 1.0),
    (" the number is 1234567.", ["1234567", "7654321", "1111111", "2222222"], 0.25),
    ("abcde FGHIJ", ["ABCDE", "fghij", "KLMNO"], 2 / 3),
    ("", ["1"], 0.0),
    ("123 4567", ["1234567"], 0.0),
    ("123\x004567", ["1234567"], 0.0),
    ("x1234567y", ["1234567"], 1.0),
])
def test_string_match_all(prediction, answers, expected):
    assert metrics.get("string_match_all")(prediction, answers) == pytest.approx(expected)


@pytest.mark.parametrize(("prediction", "answers", "expected"), [
    ("The Eiffel Tower!", ["eiffel tower"], 1.0),
    # Shared: tower; 1 of 3 predicted words, 1 of 2 answer words: F1 = 2 * 1 / (3 + 2).
    ("the tall white tower", ["Eiffel Tower"], 0.4),
    # Multiset: "new" is shared once only; F1 = 2 * 1 / (3 + 2).
    ("new new new", ["new york"], 0.4),
    ("Paris", ["London", "paris, France", "Paris"], 1.0),
    ("Paris", ["London", "paris, France"], 2 / 3),
    ("no", ["yes"], 0.0),
    ("", ["yes"], 0.0),
    ("the", ["a"], 0.0),
    # All of a prediction counts, not its first line: 2 * 1 / (4 + 1).
    ("Paris\nis the capital city", ["Paris"], 0.4),
])
def test_qa_f1(prediction, answers, expected):
    assert metrics.get("qa_f1")(prediction, answers) == pytest.approx(expected)


def test_normalise_takes_punctuation_before_articles():
    assert normalise("An  U.S.-based a.k.a. thE  theory, the a!") == ["usbased", "aka", "theory"]


def test_clean_prediction():
    assert clean_prediction("  a\x07b\tc\x1f ") == "a\nb\nc"


@pytest.mark.parametrize("name", metrics.NAMES)
def test_metrics_need_answers(name):
    with pytest.raises(ValueError, match="at least one"):
        metrics.get(name)("text", [])


def test_unknown_metric_names_the_nearest():
    with pytest.raises(ValueError, match="unknown metric 'f1'; did you mean 'qa_f1'"):
        metrics.get("f1")


def test_recall_takes_the_top_share():
    importance = [0.0, 5.0, 1.0, 4.0, 3.0, 2.0, 0.5, 0.1, 0.2, 0.3]
    assert recall_at(importance, (1, 3, 9), "0.2") == pytest.approx(2 / 3)
    assert recall_at(importance, (0,), 1) == 1.0
    assert recall_at(importance, (1,), 0.05) == 0.0
    assert recall_at(torch.tensor(importance, dtype=torch.float64), [1, 3], 0.2) == 1.0


def test_recall_ties_go_to_the_lower_index():
    assert recall_at(np.ones(10), (0, 1, 2, 9), 0.3) == pytest.approx(3 / 4)
    # 0.35 x 180 is 63 in decimal arithmetic and 62 in binary floats.
    assert recall_at(np.zeros(180), (62,), 0.35) == 1.0
    assert recall_at(np.zeros(180), (63,), 0.35) == 0.0


@pytest.mark.parametrize(("importance", "evidence", "message"), [
    ([1.0, math.nan], (0,), "1 values that are not finite"),
    ([[1.0]], (0,), r"shape \(1, 1\)"),
    ([1.0, 2.0], (), "at least one"),
    ([1.0, 2.0], (2,), "from 0 to 1"),
    ([1.0, 2.0], (-1,), "from 0 to 1"),
])
def test_recall_refuses_what_it_cannot_rank(importance, evidence, message):
    with pytest.raises(ValueError, match=message):
        recall_at(importance, evidence, 0.5)
