"""Needle keys: adjective-noun pairs from word lists whose halves share no word."""

from __future__ import annotations

import random
from functools import lru_cache
from importlib import resources


@lru_cache
def words(part_of_speech: str, split: str) -> tuple[str, ...]:
    """The words of words/<split>_<part_of_speech>.txt; split is `eval` or `profile`."""
    name = f"{split}_{part_of_speech}.txt"
    return tuple(resources.files(__package__).joinpath("words", name).read_text(encoding="utf-8").split())


def draw_keys(rng: random.Random, split: str, num_keys: int) -> list[str]:
    """num_keys different adjective-noun keys of the split."""
    adjectives, nouns = words("adjectives", split), words("nouns", split)
    pairs = rng.sample(range(len(adjectives) * len(nouns)), num_keys)
    return [f"{adjectives[pair // len(nouns)]}-{nouns[pair % len(nouns)]}" for pair in pairs]


def draw_numbers(rng: random.Random, num_digits: int, count: int) -> list[str]:
    """`count` different numbers of num_digits digits, none with a leading zero."""
    return [str(number) for number in rng.sample(range(10 ** (num_digits - 1), 10**num_digits), count)]


def draw_names(rng: random.Random, num_letters: int, count: int) -> list[str]:
    """`count` different upper-case names, none of them the keyword VAR."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=num_letters))
        if name != "VAR":
            names[name] = None
    return list(names)
