"""What runners ask of an engine: prepare, judge quality sample by sample, time request by request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qcfuse.selectors.base import ProbeSelector, Selector
from qcfuse.types import Request, Selection

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What an engine runs on a request: a selector at a recompute ratio."""

    selector: Selector
    rho: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Full prefill's own greedy answer, kept once per prompt.

    answer_ids: [A] int64, its first tokens (A <= 16). logits: [A, vocab] float32, what predicted each of them.
    """

    answer_ids: Tensor
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Untimed outcome of an arm. output_ids: generated ids without the stop token. Fidelity is to full prefill:
    KL in nats, KL(full || arm). first_logits: [vocab] float32."""

    output_ids: list[int]
    first_logits: Tensor
    first_token_kl: float
    top1_agrees: bool
    answer_kl: float
    answer_agreement_frac: float
    selection: Selection
    effective_recompute_frac: float


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Timed outcome of one request alone. stages_s: compute-thread seconds by stage, they add up to ttft_s.

    program: what the request did, for a replay (see Timeline).
    pipeline_efficiency: schedule bound over ttft_s, where a link of a set speed was read.
    arms: ttft_s and stages_s of full prefill by the engine's own path and by the fusion loop; otherwise empty.
    """

    ttft_s: float
    decode_s: float | None
    stages_s: dict[str, float]
    bytes: dict[str, int | None]
    trace: dict[str, Any]
    program: list[tuple[str, Any, Any, int | None]] = field(default_factory=list)
    pipeline_efficiency: float | None = None
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)


class Engine(ABC):
    """Runs every arm on the same ids, weights, dtype, threads and kernels."""

    name: str
    tokenizer: PreTrainedTokenizerFast

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raises ValueError where the request does not fit the model's window."""

    @abstractmethod
    def check_selector(self, selector: Selector) -> None:
        """Raises ValueError where a selector asks for layers that the model does not have."""

    @abstractmethod
    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the KV of all layers."""

    @property
    @abstractmethod
    def reference_key(self) -> str:
        """Names the weights, dtype and settings that full prefill's answers depend on; a directory name."""

    @abstractmethod
    def prepare(self, request: Request) -> int:
        """Makes the stored caches of a request's prefix and chunks where missing; returns how many were made."""

    @abstractmethod
    def reference(self, request: Request) -> Reference:
        """Full prefill's greedy answer and the logits along it."""

    @abstractmethod
    def judge(self, request: Request, arms: Sequence[Arm], reference: Reference) -> list[Quality]:
        """Quality of all arms on one request; probes are shared and arms decode as a batch. Nothing is timed."""

    @abstractmethod
    def layer_importance(self, request: Request, selector: ProbeSelector) -> np.ndarray:
        """[L, N] float64: what every layer alone gives the context tokens, with the selector's view and reduce."""

    @abstractmethod
    def time(self, request: Request, arm: Arm, *, decode: bool, gb_per_s: float | None = None) -> Timing:
        """One request alone, from arrival to first token (and to its last one where decode is set).

        gb_per_s: what the storage link is throttled to. None: caches that lie in memory are used where they are, others
        are read as fast as the device goes.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends what the engine started; it is not used again."""
