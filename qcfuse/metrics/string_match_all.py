"""RULER's score for its needle and tracking tasks."""

from __future__ import annotations

from collections.abc import Sequence

from qcfuse.metrics.postprocess import clean_prediction


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the references that occur in the prediction as substrings, case ignored; in [0, 1].

    RULER reports the mean over samples times 100. Raises ValueError without references.
    """
    if not answers:
        raise ValueError("string_match_all needs at least one reference, got none")
    text = clean_prediction(prediction).lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)
