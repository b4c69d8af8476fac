"""RULER's needle in a haystack: multi-query, multi-value, single (NVIDIA/RULER, niah)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qcfuse.data.base import Sample
from qcfuse.data.prompt import TaskPrompt, load_prompt
from qcfuse.data.ruler import Ruler
from qcfuse.data.vocabulary import draw_keys, draw_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Niah(Ruler):
    """num_keys keys with num_values numbers each; the first num_queries keys are asked for.

    num_depths: needles stand at depths drawn without replacement from so many even steps of 0 to 100%.
    """

    num_keys: int
    num_values: int
    num_queries: int
    num_digits: int
    num_depths: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_queries <= self.num_keys or self.num_values < 1:
            raise ValueError(f"{self.name}: {self.num_queries} queries of {self.num_keys} keys with {self.num_values} "
                             f"values; at least one of each, and no more queries than keys")
        if not self.num_keys * self.num_values <= self.num_depths or self.num_depths < 2:
            raise ValueError(f"{self.name}: {self.num_keys * self.num_values} needles need as many of the "
                             f"num_depths={self.num_depths} depths (at least 2)")
        if not 1 <= self.num_digits <= 15:
            raise ValueError(f"{self.name}: num_digits={self.num_digits} is outside 1 to 15; RULER has 7")

    @property
    def prompt(self) -> TaskPrompt:
        """RULER says it in the singular where one value of one key is asked for."""
        return load_prompt("niah_singular" if self.num_queries * self.num_values == 1 else "niah_plural")

    @property
    def prompt_sha256(self) -> str:
        return self.prompt.sha256

    def sample(self, index: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
        """A haystack with its needles in a drawn order; evidence is the numbers of the queried keys."""
        rng, prompt = self.stream(index), self.prompt
        keys = draw_keys(rng, self.split, self.num_keys)
        numbers = draw_numbers(rng, self.num_digits, self.num_keys * self.num_values)
        needles = [(key, number) for i, key in enumerate(keys)
                   for number in numbers[i * self.num_values : (i + 1) * self.num_values]]
        asked = keys[: self.num_queries]
        answers = tuple(number for key, number in needles if key in asked)
        rng.shuffle(needles)
        lines = [prompt.write_item(key=key, value=number) for key, number in needles]
        context, spans = self.fill_context(tokenizer, lines, self._depths(rng, len(lines)), rng.random())
        return Sample(
            sample_id=f"{self.name}-{index:04d}",
            context=context,
            prompt=prompt.fill(query=join_queries(asked)),
            answers=answers,
            evidence_spans=tuple(_find(context, number, span)
                                 for (key, number), span in zip(needles, spans, strict=True) if key in asked),
            line_spans=spans,
        )

    def _depths(self, rng: random.Random, count: int) -> list[float]:
        steps = self.num_depths - 1
        return [round(100 * step / steps) / 100 for step in sorted(rng.sample(range(self.num_depths), count))]


def join_queries(keys: Sequence[str]) -> str:
    """'a, b, c, and d', as RULER lists what it asks for."""
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def _find(text: str, word: str, span: tuple[int, int]) -> tuple[int, int]:
    start = text.rindex(word, *span)
    return start, start + len(word)
