"""A control: uniformly random tokens, the same for a prompt and seed whatever the order of requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse.fusion.layout import Layout
from qcfuse.selectors.base import Selector
from qcfuse.types import budget


@dataclass(frozen=True, kw_only=True)
class Random(Selector):
    """Uniform without replacement, seeded by the prompt's hash and the run's seed; nested over rho."""

    name = "random"
    signal = "none (uniform)"
    uses_query = "none"
    pipeline_compatible = True

    def pick(self, layout: Layout, rho: float, importance: Tensor | None, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(int(layout.request.prompt_sha256[:12], 16) ^ seed)
        order = torch.randperm(layout.num_context, generator=generator)
        return order[: budget(rho, layout.num_context)].sort().values.to(layout.device)
