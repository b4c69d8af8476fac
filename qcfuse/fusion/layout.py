"""Where the tokens of a request stand: the index arithmetic of prefix ++ chunks ++ suffix, done once."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from qcfuse.types import Request


class Layout:
    """Ids and positions of one request as tensors on a device. Context index = position - len(prefix)."""

    def __init__(self, request: Request, device: torch.device | str) -> None:
        self.request = request
        self.device = torch.device(device)
        self.num_prefix = request.num_prefix_tokens
        self.num_context = request.num_context_tokens
        self.num_tokens = request.num_tokens
        self.context_end = self.num_prefix + self.num_context
        self.ids = torch.tensor(request.input_ids, dtype=torch.int64, device=device)
        self.positions = torch.arange(self.num_tokens, device=device)
        self.chunk_lengths = tuple(map(len, request.chunk_ids))
        self.chunk_starts = tuple(accumulate(self.chunk_lengths, initial=0))[:-1]

    @property
    def question(self) -> tuple[int, int]:
        """[start, end) of the question span, as positions."""
        start, end = self.request.question_span
        return self.context_end + start, self.context_end + end

    @cached_property
    def suffix_positions(self) -> Tensor:
        return self.positions[self.context_end :]

    @cached_property
    def chunk_of(self) -> Tensor:
        """[N] int64: the chunk that each context token belongs to."""
        lengths = torch.tensor(self.chunk_lengths, device=self.device)
        return torch.repeat_interleave(torch.arange(len(self.chunk_lengths), device=self.device), lengths)
