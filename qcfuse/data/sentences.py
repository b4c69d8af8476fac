"""Sentence boundaries by rule, so that generating data needs no downloaded model."""

from __future__ import annotations

import re

_ABBREVIATIONS = frozenset("mr mrs ms dr prof st jr sr vs etc e.g i.e cf vol fig al".split())
_BOUNDARY = re.compile(r"""[.!?]+["'”’)\]]*\s+(?=["'“‘(\[]*[A-Z0-9])""")


def split_sentences(text: str) -> list[str]:
    """Sentences of `text`, in order, without the whitespace between them.

    A sentence ends at . ! or ? (and closing quotes or brackets) before whitespace and a capital or a digit, unless the
    full stop belongs to a known abbreviation or a single initial.
    """
    sentences, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        if not _ends_in_abbreviation(text[start : boundary.start() + 1]):
            sentences.append(text[start : boundary.end()].strip())
            start = boundary.end()
    return [sentence for sentence in (*sentences, text[start:].strip()) if sentence]


def _ends_in_abbreviation(text: str) -> bool:
    words = text.split()
    if not words or not text.endswith("."):
        return False
    word = words[-1].strip("\"'“‘([").removesuffix(".")
    return word.lower() in _ABBREVIATIONS or bool(re.fullmatch(r"[A-Z]", word) and word != "I")
