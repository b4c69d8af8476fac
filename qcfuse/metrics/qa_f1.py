"""Word F1 of question answering, as LongBench scores it."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from qcfuse.metrics.postprocess import clean_prediction

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa_f1(prediction: str, answers: Sequence[str]) -> float:
    """Largest F1 over the answers of the words shared, counted with multiplicity; in [0, 1].

    Words are what SQuAD's normalisation leaves. Raises ValueError without answers.
    """
    if not answers:
        raise ValueError("qa_f1 needs at least one answer, got none")
    words = normalise(clean_prediction(prediction))
    return max(_word_f1(words, normalise(answer)) for answer in answers)


def normalise(text: str) -> list[str]:
    """Words in lower case without ASCII punctuation and the articles a, an, the (SQuAD's order of steps)."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _word_f1(prediction: list[str], answer: list[str]) -> float:
    num_shared = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * num_shared / (len(prediction) + len(answer)) if num_shared else 0.0
