"""The text that needles are hidden in, and how much of it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import cycle, islice
from pathlib import Path

from qcfuse.data.chunking import Span
from qcfuse.data.sentences import split_sentences

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's noise unit."""

KINDS = ("noise", "prose", "file")
SPLITS = ("eval", "profile")


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """Where filler comes from.

    kind: `noise` repeats one line; `prose` is text shipped with the package, another one for each split; `file` is a
    text file of the user's at `path`. Prose and file are used from a sentence drawn for each sample on
    (random_start) or always from the first (RULER), and start over where they end.
    """

    kind: str
    path: str | None
    random_start: bool

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"haystack kind {self.kind!r} is unknown; use one of {', '.join(KINDS)}")
        if (self.kind == "file") != (self.path is not None):
            raise ValueError(f"haystack kind {self.kind!r} with path={self.path!r}: a path goes with kind 'file' only, "
                             f"and kind 'file' needs one")
        if self.kind == "file" and not Path(str(self.path)).is_file():
            raise ValueError(f"haystack file {self.path!r} does not exist; give the path of a text file")

    @property
    def separator(self) -> str:
        """What stands between sentences: noise is a list of lines, prose runs on."""
        return "\n" if self.kind == "noise" else " "

    def take(self, split: str, num_units: int, start_frac: float) -> list[str]:
        """`num_units` units as a list of sentences; a unit is a noise line or a word (the last sentence may be cut).

        start_frac: in [0, 1), where in the text to begin if random_start.
        """
        if self.kind == "noise":
            return [NOISE] * num_units
        source = _read_file(str(self.path)) if self.kind == "file" else _read_prose(split)
        start = int(start_frac * len(source)) if self.random_start else 0
        sentences: list[str] = []
        for sentence in cycle(source[start:] + source[:start]):
            words = list(islice(sentence.split(), num_units))
            if words:
                sentences.append(" ".join(words))
            num_units -= len(words)
            if num_units == 0:
                return sentences
        raise AssertionError("an endless cycle ended")


def scatter(
    sentences: Sequence[str], inserts: Sequence[str], depths: Sequence[float], separator: str
) -> tuple[str, tuple[Span, ...]]:
    """Place inserts[i] before sentence int(depths[i] * n), in the order given, and join everything.

    depths: non-decreasing, in [0, 1]; 1 is after the last sentence. Returns the text and the characters of each insert.
    """
    places = [int(depth * len(sentences)) for depth in depths]
    assert places == sorted(places) and len(places) == len(inserts), "one depth an insert, in order"
    pieces, spans, length, done = [], [], 0, 0
    for place, insert in zip((*places, len(sentences)), (*inserts, None), strict=True):
        for piece in (*sentences[done:place], *(() if insert is None else (insert,))):
            pieces.append(piece)
            length += len(piece) + len(separator)
        if insert is not None:
            spans.append((length - len(separator) - len(insert), length - len(separator)))
        done = place
    return separator.join(pieces), tuple(spans)


def largest_fitting(num_tokens: Callable[[int], int], budget: int, upper: int) -> int:
    """Largest n in 1..upper with num_tokens(n) <= budget; 0 where there is none. Only a counted n is returned.

    Tokens grow almost evenly with units, so each step goes where the average length of a unit points, within the
    bracket known so far: about five counts where bisection takes ten, and none far above the budget.
    """
    fits, exceeds = 0, upper + 1
    empty, n = num_tokens(0), max(1, upper // 64)
    while exceeds - fits > 1:
        count = num_tokens(n)
        if count <= budget:
            fits = n
        else:
            exceeds = n
        guess = n + (budget - count) * n // max(1, count - empty)
        n = min(max(guess, fits + 1), exceeds - 1)
    return fits


@lru_cache
def _read_prose(split: str) -> tuple[str, ...]:
    text = resources.files(__package__).joinpath("texts", f"prose_{split}.txt").read_text(encoding="utf-8")
    return tuple(split_sentences(" ".join(text.split())))


@lru_cache
def _read_file(path: str) -> tuple[str, ...]:
    sentences = tuple(split_sentences(" ".join(Path(path).read_text(encoding="utf-8").split())))
    if not sentences:
        raise ValueError(f"haystack file {path!r} holds no words; give a text file")
    return sentences
