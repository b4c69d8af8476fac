"""What a selector is: an optional probe (shared code), then a pick of exactly |P| context tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qcfuse.fusion.layout import Layout
from qcfuse.fusion.narrow import NarrowingRule
from qcfuse.fusion.probe import ProbeSpec
from qcfuse.types import budget


@dataclass(frozen=True, kw_only=True)
class Selector(ABC):
    """A method. The class variables declare what the paper's Table 2 tabulates.

    fixed_rho: the one rho of a method that does not depend on it (full prefill: 1, direct reuse: 0).
    """

    name: ClassVar[str]
    signal: ClassVar[str]
    uses_query: ClassVar[Literal["none", "partial", "yes"]]
    pipeline_compatible: ClassVar[bool]
    fixed_rho: ClassVar[float | None] = None

    def probe_spec(self, num_layers: int, critical: Mapping[str, Sequence[int]]) -> ProbeSpec | None:
        """What has to be probed before `pick`, or None. critical: the model's named lists of critical layers.

        Raises ValueError where the selector asks for layers that the model does not have or no one has published.
        """
        return None

    def narrowing(self, layout: Layout, rho: float, num_layers: int) -> NarrowingRule | None:
        """How `pick`'s tokens are narrowed layer by layer, None for methods that fix them before fusion."""
        return None

    @abstractmethod
    def pick(self, layout: Layout, rho: float, importance: Tensor | None, seed: int) -> Tensor:
        """[floor(rho * N)] int64 context indices, sorted, unique. importance: [N] float64, with a probe."""


@dataclass(frozen=True, kw_only=True)
class ProbeSelector(Selector):
    """Top |P| by the attention that question states pay to the context, summed over the scored layers (eq. for I(t)).

    layers: a named list of the model's critical layers, `all`, `first`, `middle`, `final`, or layer numbers.
    top_k: how many of a named list, best first.
    """

    anchor_ratio: float
    layers: str | Sequence[int]
    top_k: int
    reduce: Literal["max", "mean"]
    score_rope: Literal["request", "chunk_local"]

    def __post_init__(self) -> None:
        if not 0 <= self.anchor_ratio <= 1:
            raise ValueError(f"selector.anchor_ratio={self.anchor_ratio} is outside [0, 1]")
        if self.top_k < 1:
            raise ValueError(f"selector.top_k={self.top_k} must be at least 1")
        if self.reduce not in ("max", "mean"):
            raise ValueError(f"reduce={self.reduce!r} is unknown; choose max or mean")
        if self.score_rope not in ("request", "chunk_local"):
            raise ValueError(f"selector.score_rope={self.score_rope!r} is unknown; choose request or chunk_local")

    def probe_spec(self, num_layers: int, critical: Mapping[str, Sequence[int]]) -> ProbeSpec:
        layers = resolve_layers(self.layers, self.top_k, num_layers, critical)
        return ProbeSpec(anchor_ratio=self.anchor_ratio, layers=layers, reduce=self.reduce, score_rope=self.score_rope)

    def pick(self, layout: Layout, rho: float, importance: Tensor | None, seed: int) -> Tensor:
        assert importance is not None, "a probe selector needs its probe"
        return top_indices(importance, budget(rho, layout.num_context))


def top_indices(importance: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest values, ascending; equal values are taken from the lowest index on."""
    order = torch.sort(importance, descending=True, stable=True).indices
    return order[:count].sort().values


def resolve_layers(
    layers: str | Sequence[int], top_k: int, num_layers: int, critical: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Layer numbers, ascending and unique, for what a selector asks for. Raises ValueError where that is impossible."""
    places = {"all": range(num_layers), "first": [0], "middle": [num_layers // 2], "final": [num_layers - 1]}
    if not isinstance(layers, str):
        chosen = [int(layer) for layer in layers]
    elif layers in places:
        chosen = list(places[layers])
    elif critical.get(layers):
        chosen = list(dict.fromkeys(critical[layers]))[:top_k]
    else:
        known = ", ".join([*places, *(name for name, value in critical.items() if value)])
        raise ValueError(
            f"selector.layers={layers} is not known for this model; choose one of {known}, give numbers "
            f"(selector.layers=[3,5,7]) or measure them (python run.py runner=profile)"
        )
    if not chosen:
        raise ValueError("selector.layers is empty; give at least one layer")
    missing = [layer for layer in chosen if not 0 <= layer < num_layers]
    if missing:
        raise ValueError(
            f"selector.layers={list(chosen)}: the model has layers 0 to {num_layers - 1}, not {missing}; "
            f"give layers of its own (selector.layers=[...])"
        )
    return tuple(sorted(set(chosen)))
