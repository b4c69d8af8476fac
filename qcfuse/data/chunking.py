"""Chunks are cut by token count; spans of characters become token indices."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]
"""[start, end) in characters."""


def cut(ids: Sequence[int], chunk_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Cut ids into chunks of chunk_tokens; the last one takes what is left (one token at the least)."""
    return tuple(tuple(ids[start : start + chunk_tokens]) for start in range(0, len(ids), chunk_tokens))


def tokens_overlapping(offsets: Sequence[Span], spans: Sequence[Span]) -> tuple[int, ...]:
    """Indices of the tokens that share at least one character with a span; sorted, unique.

    offsets: [start, end) of each token in the same text (a fast tokenizer's offset_mapping). A token that carries the
    space before a word counts, as does each byte token of a character. Empty tokens never count.
    """
    return tuple(index for index, (start, end) in enumerate(offsets)
                 if any(max(start, span_start) < min(end, span_end) for span_start, span_end in spans))


def any_cut_by_seam(offsets: Sequence[Span], spans: Sequence[Span], chunk_tokens: int) -> bool:
    """Whether the tokens of any one span lie in more than one chunk."""
    touched = (tokens_overlapping(offsets, [span]) for span in spans)
    return any(tokens and tokens[0] // chunk_tokens != tokens[-1] // chunk_tokens for tokens in touched)
