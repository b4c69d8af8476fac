"""The contract of every dataset: text samples in, requests out."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qcfuse import metrics
from qcfuse.data.chunking import Span
from qcfuse.data.segments import build_request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qcfuse.data.prompt import ChatTemplate, TaskPrompt
    from qcfuse.types import Request


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question over one context, as text.

    prompt: the task's wording with every slot filled; it holds the question and the answer prefix.
    evidence_spans: characters of the context that hold gold answers (needle values; names and value of a chain).
    line_spans: characters of the units that a chunk seam should not cut (needle sentences, VT lines).
    """

    sample_id: str
    context: str
    prompt: TaskPrompt
    answers: tuple[str, ...]
    evidence_spans: tuple[Span, ...] = ()
    line_spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt.question.strip():
            raise ValueError(f"{self.sample_id}: the question is empty; give at least one word")
        if not self.context.strip():
            raise ValueError(f"{self.sample_id}: the context is empty; give at least one passage of text")
        if not self.answers:
            raise ValueError(f"{self.sample_id}: no reference answers; a score needs at least one")


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """Samples 0 .. len - 1, each a pure function of the settings and its index (and so independent of any limit).

    name: opens every sample id. metric: a name known to qcfuse.metrics. num_samples: how many there are.
    chunk_tokens, num_chunks: chunk length and the most chunks of a context; the last chunk may be shorter.
    """

    name: str
    metric: str
    max_new_tokens: int
    num_samples: int | None
    seed: int
    chunk_tokens: int
    num_chunks: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"dataset name {self.name!r} goes into file names; use letters, digits, '_', '-' and '.'")
        metrics.get(self.metric)
        for field in ("max_new_tokens", "num_samples", "chunk_tokens", "num_chunks"):
            value = getattr(self, field)
            if not (value is None and field == "num_samples") and (type(value) is not int or value < 1):
                raise ValueError(f"{self.name}: {field}={value!r} must be an integer of at least 1")

    def __len__(self) -> int:
        assert self.num_samples is not None, "a dataset whose size is not a setting defines its own __len__"
        return self.num_samples

    @property
    def max_context_tokens(self) -> int:
        return self.chunk_tokens * self.num_chunks

    @property
    @abstractmethod
    def prompt_sha256(self) -> str:
        """Hash of the unfilled task wording."""

    @abstractmethod
    def sample(self, index: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
        """Sample `index` as text; the tokenizer only decides how much haystack fits."""

    def request(self, index: int, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> Request:
        """Request `index` in the model's ids."""
        return build_request(self.sample(index, tokenizer), tokenizer, template, chunk_tokens=self.chunk_tokens,
                             num_chunks=self.num_chunks, max_new_tokens=self.max_new_tokens)

    def requests(
        self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, limit: int | None = None
    ) -> list[Request]:
        """The first `limit` requests (None: all). Raises ValueError where the data holds fewer."""
        return [self.request(index, tokenizer, template) for index in range(self.count(limit))]

    def count(self, limit: int | None) -> int:
        """How many requests `limit` gives (None: all). Raises ValueError where the data holds fewer."""
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"limit={limit!r} must be an integer of at least 1, or null for all samples")
        if limit is not None and limit > len(self):
            raise ValueError(f"limit={limit} is larger than the {len(self)} samples of {self.name}; lower it to "
                             f"at most {len(self)}, or raise num_samples where the data is generated")
        return len(self) if limit is None else limit


def check_fits(request: Request, max_positions: int) -> None:
    """Raise ValueError where the prompt and the tokens to generate exceed the model's window of max_positions."""
    needed = request.num_tokens + request.max_new_tokens
    if needed > max_positions:
        raise ValueError(f"{request.sample_id}: {request.num_tokens} prompt tokens + {request.max_new_tokens} to "
                         f"generate = {needed} exceed the model's window of {max_positions} positions; lower "
                         f"scale.num_chunks or scale.chunk_tokens")
