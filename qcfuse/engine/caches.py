"""The stored caches of an engine's requests: made where they are missing, kept at hand for the latest request."""

from __future__ import annotations

from collections.abc import Callable

from qcfuse.anchors.base import AnchorRule
from qcfuse.decoder.base import Decoder
from qcfuse.fusion.prepare import prepare_chunk, prepare_prefix
from qcfuse.store.opened import Makers
from qcfuse.store.store import ChunkStore
from qcfuse.types import ChunkCache, PrefixCache, Request


class Caches:
    """Chunk and prefix caches of one model under one anchor rule, backed by a store."""

    def __init__(
        self, decoder: Decoder, anchors: AnchorRule, store: ChunkStore, encode: Callable[[str], list[int]]
    ) -> None:
        self._store = store
        self._latest: tuple[str, PrefixCache, list[ChunkCache]] | None = None
        self.makers = Makers(
            chunk=lambda ids: prepare_chunk(decoder, ids, anchors, encode),
            prefix=lambda ids: prepare_prefix(decoder, ids),
        )

    def prepare(self, request: Request) -> int:
        """Puts what the store lacks into it; returns how many caches were made."""
        made = 0
        if request.num_prefix_tokens and not self._store.contains_prefix(request.prefix_ids):
            self._store.put_prefix(request.prefix_ids, self.makers.prefix(request.prefix_ids))
            made += 1
        for ids in dict.fromkeys(request.chunk_ids):
            if not self._store.contains(ids):
                self._store.put(ids, self.makers.chunk(ids))
                made += 1
        return made

    def in_memory(self, request: Request) -> tuple[PrefixCache, list[ChunkCache]]:
        """The request's caches in its order; what is missing or damaged in the store is computed again."""
        if self._latest is None or self._latest[0] != request.prompt_sha256:
            self.prepare(request)
            prefix = self._store.get_prefix(request.prefix_ids) if request.prefix_ids else None
            chunks = {ids: self._store.get(ids) or self.makers.chunk(ids) for ids in dict.fromkeys(request.chunk_ids)}
            self._latest = (
                request.prompt_sha256,
                prefix or self.makers.prefix(request.prefix_ids),
                [chunks[ids] for ids in request.chunk_ids],
            )
        return self._latest[1:]
