"""RULER's variable tracking: chains of assignments among filler lines (NVIDIA/RULER, variable_tracking)."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from qcfuse.data.base import Sample
from qcfuse.data.chunking import Span
from qcfuse.data.haystack import largest_fitting, scatter
from qcfuse.data.prompt import TaskPrompt, load_prompt
from qcfuse.data.ruler import Ruler
from qcfuse.data.segments import encode_content
from qcfuse.data.vocabulary import draw_names, draw_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class VariableTracking(Ruler):
    """num_chains chains of num_hops + 1 variables; all variables of the first chain are asked for by its value.

    example_tokens, example_letters: length (at most) and name length of the one in-context example, which stands
    before the instruction and is the same for every sample, so that all requests share their prefix.
    """

    num_chains: int
    num_hops: int
    num_letters: int
    num_digits: int
    example_tokens: int
    example_letters: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("num_chains", "num_hops", "num_digits"):
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field}={getattr(self, field)} must be at least 1")
        for field in ("num_letters", "example_letters"):
            if getattr(self, field) < 3:
                raise ValueError(f"{self.name}: {field}={getattr(self, field)} leaves too few names; use 3 or more")

    @property
    def prompt(self) -> TaskPrompt:
        return load_prompt("variable_tracking")

    @property
    def prompt_sha256(self) -> str:
        return self.prompt.sha256

    def sample(self, index: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
        """Filler with the lines of each chain in order; evidence is the first chain's names and its value."""
        rng = self.stream(index)
        chains, depths = self.draw_chains(rng, self.num_letters)
        lines, places = _interleave(chains, depths)
        context, spans = self.fill_context(tokenizer, lines, places, rng.random())
        asked = set(chains[0])
        return Sample(
            sample_id=f"{self.name}-{index:04d}",
            context=context,
            prompt=self.ask(chains[0], example=write_example(self, tokenizer) + "\n\n"),
            answers=_names(chains[0]),
            evidence_spans=tuple(part for line, span in zip(lines, spans, strict=True) if line in asked
                                 for part in _operands(line, span[0])),
            line_spans=spans,
        )

    def ask(self, chain: list[str], example: str) -> TaskPrompt:
        return self.prompt.fill(example=example, query=chain[0].split()[-1], num_variables=len(chain))

    def draw_chains(self, rng: random.Random, num_letters: int) -> tuple[list[list[str]], list[list[float]]]:
        """Lines of each chain ("VAR A = 12345", then "VAR B = VAR A") and a depth for each line."""
        length = self.num_hops + 1
        names = draw_names(rng, num_letters, self.num_chains * length)
        values = draw_numbers(rng, self.num_digits, self.num_chains)
        chains = []
        for i, value in enumerate(values):
            own = names[i * length : (i + 1) * length]
            sources = [value, *(f"VAR {name}" for name in own)]
            chains.append([f"VAR {name} = {source}" for name, source in zip(own, sources, strict=False)])
        return chains, [sorted(rng.random() for _ in chain) for chain in chains]


@lru_cache(maxsize=8)
def write_example(task: VariableTracking, tokenizer: PreTrainedTokenizerBase) -> str:
    """A solved task of at most example_tokens tokens, filled with noise. Raises ValueError if none fits."""
    rng = task.stream("example")
    chains, depths = task.draw_chains(rng, task.example_letters)
    lines, places = _interleave(chains, depths)
    prompt = task.ask(chains[0], example="")
    noise = replace(task.haystack, kind="noise", path=None)

    def write(num_units: int) -> str:
        context, _ = scatter(noise.take(task.split, num_units, 0.0), lines, places, noise.separator)
        return (f"{prompt.instruction}{context}{prompt.before_question}{prompt.question}{prompt.after_question}"
                f"{prompt.answer_prefix} {' '.join(_names(chains[0]))}")

    num_units = largest_fitting(lambda n: len(encode_content(tokenizer, write(n))), task.example_tokens,
                                task.example_tokens)
    if num_units == 0:
        raise ValueError(f"{task.name}: example_tokens={task.example_tokens} cannot hold a solved example; "
                         f"RULER has 500")
    return write(num_units)


def _interleave(chains: list[list[str]], depths: list[list[float]]) -> tuple[list[str], list[float]]:
    """All lines by depth; lines of one chain keep their order since their depths are sorted."""
    placed = sorted(((depth, line) for chain, places in zip(chains, depths, strict=True)
                     for line, depth in zip(chain, places, strict=True)), key=lambda pair: pair[0])
    return [line for _, line in placed], [depth for depth, _ in placed]


def _names(chain: list[str]) -> tuple[str, ...]:
    return tuple(line.split()[1] for line in chain)


def _operands(line: str, start: int) -> list[Span]:
    """Characters of the names and the value of a line that begins at character `start`."""
    return [(start + word.start(), start + word.end()) for word in re.finditer(r"\w+", line) if word[0] != "VAR"]
