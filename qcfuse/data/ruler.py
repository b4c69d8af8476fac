"""What RULER's tasks share: seeded streams, and a context filled with haystack up to its last token (NVIDIA/RULER)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qcfuse.data.base import Dataset
from qcfuse.data.chunking import Span
from qcfuse.data.haystack import SPLITS, Haystack, largest_fitting, scatter
from qcfuse.data.segments import encode_content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Ruler(Dataset):
    """A generated task. split: `eval` or `profile`; they share no random stream, no prose and no key words."""

    haystack: Haystack
    split: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_samples is None:
            raise ValueError(f"{self.name}: num_samples=None, but samples are generated; say how many")
        if self.split not in SPLITS:
            raise ValueError(f"{self.name}: split={self.split!r} is unknown; use one of {', '.join(SPLITS)}")

    def stream(self, purpose: str | int) -> random.Random:
        """The random stream of one sample (or other purpose), the same on every machine and Python."""
        return random.Random(f"{self.split}/{self.name}/{self.seed}/{purpose}")

    def fill_context(
        self,
        tokenizer: PreTrainedTokenizerBase,
        inserts: Sequence[str],
        depths: Sequence[float],
        start_frac: float,
    ) -> tuple[str, tuple[Span, ...]]:
        """The most haystack that keeps the context within chunk_tokens * num_chunks tokens, inserts in place.

        Returns the text and the characters of each insert. Raises ValueError where the inserts alone do not fit.
        """

        def lay_out(num_units: int) -> tuple[str, tuple[Span, ...]]:
            sentences = self.haystack.take(self.split, num_units, start_frac)
            return scatter(sentences, inserts, depths, self.haystack.separator)

        def num_tokens(num_units: int) -> int:
            return len(encode_content(tokenizer, lay_out(num_units)[0]))

        # A unit has at least one token, so the context holds no more units than tokens.
        num_units = largest_fitting(num_tokens, self.max_context_tokens, self.max_context_tokens)
        if num_units == 0:
            raise ValueError(f"{self.name}: {self.num_chunks} chunks of {self.chunk_tokens} tokens cannot hold the "
                             f"{len(inserts)} sentences to find; raise scale.num_chunks or scale.chunk_tokens")
        return lay_out(num_units)
