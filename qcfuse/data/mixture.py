"""Several datasets in turn, as one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qcfuse.data.base import Dataset, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Mixture(Dataset):
    """Sample i is sample i // k of part i % k, for k parts. Parts share the metric and the chunking."""

    parts: Sequence[Dataset]

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{self.name}: parts need names of their own, at least one; got {names}")
        for part in self.parts:
            if (part.metric, part.chunk_tokens, part.num_chunks) != (self.metric, self.chunk_tokens, self.num_chunks):
                raise ValueError(f"{self.name}: part {part.name} has another metric or chunking than the mixture")
            if len(part) * len(names) < len(self):
                raise ValueError(f"{self.name}: {len(self)} samples need {-(-len(self) // len(names))} of each part, "
                                 f"{part.name} has {len(part)}")

    @property
    def prompt_sha256(self) -> str:
        return hashlib.sha256(" ".join(part.prompt_sha256 for part in self.parts).encode()).hexdigest()

    def sample(self, index: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
        """The part's own sample, under the part's sample id."""
        return self.parts[index % len(self.parts)].sample(index // len(self.parts), tokenizer)
