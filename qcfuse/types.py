"""Words that every other module uses: requests, chunk caches, selections, stage times, records.

Positions of a request are counted over prefix ++ chunks ++ suffix; a *context index* is a position minus the
length of the prefix. Nothing here imports torch at run time, so that data and analysis code stay light.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from decimal import ROUND_FLOOR, Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STAGES = (
    "queue", "engine", "wait_prefix", "probe", "wait_select", "score", "select", "wait_layer", "recompute", "place",
    "suffix", "first_token",
)  # fmt: skip
"""The names that partition TTFT (design: pipeline). Unnamed time is at most 2% of TTFT."""


def budget(rho: float | str | Decimal, num_context_tokens: int) -> int:
    """|P| = floor(rho * N) in decimal arithmetic: 0.35 x 180 is 63, which binary floats turn into 62.

    Raises ValueError where rho is not a number in [0, 1].
    """
    try:
        ratio = Decimal(str(rho))
    except ArithmeticError:
        raise ValueError(f"rho={rho!r} is not a number; give a value from 0 to 1") from None
    if not ratio.is_finite() or not 0 <= ratio <= 1:
        raise ValueError(f"rho={rho} is outside [0, 1]; 0 is direct reuse, 1 equals full prefill")
    return int((ratio * num_context_tokens).to_integral_value(rounding=ROUND_FLOOR))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as token ids: prefix ++ chunk_1 ... chunk_m ++ suffix, each segment tokenised on its own.

    question_span: [start, end) of the user's question within the suffix.
    evidence: context indices of gold answer-span tokens (needle values); sorted, may be empty.
    evidence_cut_by_seam: whether a needle sentence or VT line lies across two chunks.
    """

    sample_id: str
    prefix_ids: tuple[int, ...]
    chunk_ids: tuple[tuple[int, ...], ...]
    suffix_ids: tuple[int, ...]
    question_span: tuple[int, int]
    answers: tuple[str, ...] = ()
    max_new_tokens: int = 1
    evidence: tuple[int, ...] = ()
    evidence_cut_by_seam: bool = False

    def __post_init__(self) -> None:
        start, end = self.question_span
        if not self.chunk_ids or any(not chunk for chunk in self.chunk_ids):
            raise ValueError(f"{self.sample_id}: a request needs chunks of at least one token, got lengths "
                             f"{[len(chunk) for chunk in self.chunk_ids]}")
        if not 0 <= start < end <= len(self.suffix_ids):
            raise ValueError(f"{self.sample_id}: the question is empty or outside the suffix (span {start}..{end} of "
                             f"{len(self.suffix_ids)} suffix tokens); give a question of at least one token")

    @property
    def num_prefix_tokens(self) -> int:
        return len(self.prefix_ids)

    @cached_property
    def num_context_tokens(self) -> int:
        return sum(map(len, self.chunk_ids))

    @property
    def num_suffix_tokens(self) -> int:
        return len(self.suffix_ids)

    @cached_property
    def num_tokens(self) -> int:
        return len(self.prefix_ids) + self.num_context_tokens + len(self.suffix_ids)

    @cached_property
    def input_ids(self) -> tuple[int, ...]:
        return self.prefix_ids + tuple(i for chunk in self.chunk_ids for i in chunk) + self.suffix_ids

    @cached_property
    def segment_lengths(self) -> tuple[int, ...]:
        """Lengths of the prefix, each chunk, the suffix."""
        return (len(self.prefix_ids), *map(len, self.chunk_ids), len(self.suffix_ids))

    @cached_property
    def prompt_sha256(self) -> str:
        """Hash of ids and segmentation: two prompts that differ in a seam are different prompts."""
        text = " ".join(map(str, self.input_ids)) + "|" + " ".join(map(str, self.segment_lengths))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ChunkCache:
    """The PIC cache of one chunk, prefilled alone from position 0.

    Rows stand in descending anchor rank: row i belongs to chunk token order[i], and any anchor ratio is a prefix.
    k, v: [L - 1, n, Hkv, D], layers 1 and up (layer 0 depends on embeddings alone and is recomputed);
    k is un-rotated (after QK-norm, before RoPE). order: [n] int64, a permutation of 0..n-1, or one per stored layer,
    [L - 1, n] (row i of layer l then belongs to token order[l - 1, i]).
    """

    k: torch.Tensor
    v: torch.Tensor
    order: torch.Tensor

    def __post_init__(self) -> None:
        assert self.k.shape == self.v.shape and self.k.shape[1] == self.order.shape[-1], "k, v, order disagree"

    @property
    def num_tokens(self) -> int:
        return self.order.shape[-1]

    @property
    def num_bytes(self) -> int:
        return self.k.numel() * self.k.element_size() * 2


@dataclass(frozen=True, kw_only=True)
class PrefixCache:
    """Exact KV of a prefix at its own positions from 0. k (un-rotated), v: [L - 1, n, Hkv, D], rows in token order."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The tokens to recompute and what led to them; all indices are context indices.

    selected: [|P|] int64, sorted, unique. importance: [N] float64, None where the rule scores nothing.
    anchors: [A] int64 sorted, what the probe saw. layers: the layers that were scored.
    recomputed_frac: recomputed token-layers over (L - 1) N, None where the same tokens were recomputed at every layer.
    """

    selected: torch.Tensor
    importance: torch.Tensor | None = None
    anchors: torch.Tensor | None = None
    layers: tuple[int, ...] = ()
    recomputed_frac: float | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of records.jsonl (the order of the fields is the order in the file).

    ttft_s to bytes are of the timed pass, None or empty where the sample was not timed. arms_ttft_s: full prefill by
    the engine's own path and by the fusion loop.
    """

    sample_id: str
    prompt_sha256: str
    prediction: str | None = None
    answers: tuple[str, ...] = ()
    score: float = 0.0
    first_token_kl: float | None = None
    top1_agrees: bool | None = None
    answer_kl: float | None = None
    answer_agreement_frac: float | None = None
    num_context_tokens: int | None = None
    num_selected: int | None = None
    effective_recompute_frac: float | None = None
    num_output_tokens: int | None = None
    ttft_s: float | None = None
    decode_s: float | None = None
    e2e_s: float | None = None
    stages_s: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int | None] = field(default_factory=dict)
    pipeline_efficiency: float | None = None
    arms_ttft_s: dict[str, float] = field(default_factory=dict)
    evidence_cut_by_seam: bool | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)
