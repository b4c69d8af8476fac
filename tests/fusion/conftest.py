"""Requests over random ids and a rig that fuses them on a small model; the slow reference is transformers itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from qcfuse.anchors.base import AnchorRule
from qcfuse.anchors.sink import Sink
from qcfuse.decoder.hf import HFDecoder
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.fuse import Fusion, full_prefill
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.prepare import prepare_chunk, prepare_prefix
from qcfuse.fusion.source import MemorySource
from qcfuse.fusion.timeline import Timeline
from qcfuse.types import Request

CRITICAL = {"default": (1, 2)}


def encode(text: str) -> list[int]:
    return [3 + ord(c) % 400 for c in text]


def make_request(
    chunks: Sequence[int] = (7, 12, 1, 20), prefix: int = 5, suffix: int = 6, question: tuple[int, int] = (1, 4), seed=0
) -> Request:
    generator = torch.Generator().manual_seed(seed)
    lengths = (prefix, *chunks, suffix)
    parts = [tuple(torch.randint(20, 500, (n,), generator=generator).tolist()) for n in lengths]
    return Request(
        sample_id="r", prefix_ids=parts[0], chunk_ids=tuple(parts[1:-1]), suffix_ids=parts[-1],
        question_span=question, answers=("x",), max_new_tokens=4,
    )  # fmt: skip


class Rig:
    """A decoder, a request and its caches."""

    def __init__(self, model: torch.nn.Module, request: Request, rule: AnchorRule | None = None) -> None:
        rule = rule or Sink(scope="chunk", num_sinks=0, layer_reduce="mean")
        self.model, self.request, self.decoder = model, request, HFDecoder(model)
        self.layout = Layout(request, "cpu")
        self.prefix = prepare_prefix(self.decoder, request.prefix_ids)
        self.chunks = [prepare_chunk(self.decoder, ids, rule, encode) for ids in request.chunk_ids]

    def fusion(self) -> Fusion:
        cache = KVCache.empty(self.decoder, self.layout.num_tokens)
        for tensor in (cache.k, cache.v):
            tensor.fill_(torch.nan)
        source = MemorySource(self.layout, self.prefix, self.chunks)
        return Fusion(
            decoder=self.decoder, layout=self.layout, source=source, cache=cache, timeline=Timeline(), critical=CRITICAL
        )

    def fuse(self, selector, rho: float, seed: int = 0):
        fusion = self.fusion()
        selection = fusion.select(selector, rho, seed, fusion.probe(fusion.spec(selector)))
        logits, selection = fusion.finish(selector, rho, selection)
        return logits, selection, fusion.cache

    def full_by_transformers(self) -> tuple[torch.Tensor, list]:
        """Logits [1, vocab] of the last token and the KV cache layers."""
        with torch.no_grad():
            out = self.model(torch.tensor([self.request.input_ids]), use_cache=True, logits_to_keep=1)
        return out.logits[0], out.past_key_values.layers

    def full_by_loop(self) -> tuple[torch.Tensor, KVCache]:
        cache = KVCache.empty(self.decoder, self.layout.num_tokens)
        return full_prefill(self.decoder, self.layout, cache, Timeline()), cache


@pytest.fixture
def rig(tiny) -> Rig:
    return Rig(tiny, make_request())
