"""The offline part: a chunk's PIC cache with its anchor ranking, a prefix's exact cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from qcfuse.anchors.base import AnchorRule, PrefilledChunk
from qcfuse.decoder.base import Decoder
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.prefill import KVRecorder, prefill
from qcfuse.types import ChunkCache, PrefixCache


def prepare_chunk(
    decoder: Decoder, ids: Sequence[int], rule: AnchorRule, encode: Callable[[str], list[int]]
) -> ChunkCache:
    """Prefills a chunk alone from position 0 and ranks its tokens; rows of the result stand in descending rank."""
    tokens = torch.tensor(ids, dtype=torch.int64, device=decoder.device)
    num_tokens = len(ids)
    cache = KVCache.empty(decoder, num_tokens + rule.room(num_tokens, encode))
    recorder = KVRecorder(decoder, num_tokens)
    prefill(decoder, tokens, cache, observe=recorder)
    order = rule.order(decoder, PrefilledChunk(ids=tokens, cache=cache, k=recorder.k), encode)
    if order.dim() == 1:
        return ChunkCache(k=recorder.k[1:, order], v=recorder.v[1:, order], order=order)
    order = order[1:]
    rows = order[:, :, None, None].expand_as(recorder.k[1:])
    return ChunkCache(k=recorder.k[1:].gather(1, rows), v=recorder.v[1:].gather(1, rows), order=order)


def prepare_prefix(decoder: Decoder, ids: Sequence[int]) -> PrefixCache:
    """The exact cache of a prefix at its own positions; an empty prefix has an empty cache."""
    tokens = torch.tensor(ids, dtype=torch.int64, device=decoder.device)
    recorder = KVRecorder(decoder, len(ids))
    if len(ids):
        prefill(decoder, tokens, KVCache.empty(decoder, len(ids)), observe=recorder)
    return PrefixCache(k=recorder.k[1:].clone(), v=recorder.v[1:].clone())
