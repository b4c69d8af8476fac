"""The stored caches of one request, open for planned reads; what the store lacks is made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from qcfuse.store.chunk_file import ChunkError
from qcfuse.store.context import ContextRows
from qcfuse.store.sources import Source
from qcfuse.store.store import ChunkStore
from qcfuse.types import ChunkCache, PrefixCache, Request

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Makers:
    """How caches are computed where they are missing or damaged."""

    chunk: Callable[[Ids], ChunkCache]
    prefix: Callable[[Ids], PrefixCache]


class OpenedRequest:
    """chunks, prefix: sources, one per distinct chunk (prefix: None where there is none), open until `close`."""

    def __init__(self, store: ChunkStore, request: Request, makers: Makers) -> None:
        self._store, self._makers = store, makers
        self.chunk_ids: tuple[Ids, ...] = tuple(dict.fromkeys(request.chunk_ids))
        self.prefix_ids = request.prefix_ids
        self.chunks: list[Source] = []
        self.prefix: Source | None = None
        try:
            self.chunks.extend(map(self._chunk, self.chunk_ids))
            self.prefix = self._prefix() if request.prefix_ids else None
        except BaseException:
            self.close()
            raise
        orders = dict(zip(self.chunk_ids, (source.header.order for source in self.chunks), strict=True))
        self.rows = ContextRows.of(store.geometry, request.chunk_ids, [orders[ids] for ids in request.chunk_ids],
                                   store.config.rows_per_block)

    @cached_property
    def prefix_rows(self) -> ContextRows | None:
        """The prefix as a context of one chunk, None where there is none."""
        if self.prefix is None:
            return None
        return ContextRows.of(self._store.geometry, [self.prefix_ids], [self.prefix.header.order],
                              self._store.config.rows_per_block)

    def remake(self, chunk: int, err: ChunkError) -> ChunkCache:
        """A distinct chunk whose rows turned out damaged: reported to the store, and computed again."""
        self._store.reject(self.chunk_ids[chunk], err)
        return self._kept(self.chunk_ids[chunk])

    def remake_prefix(self, err: ChunkError) -> PrefixCache:
        self._store.reject(self.prefix_ids, err, prefix=True)
        cache = self._makers.prefix(self.prefix_ids)
        self._store.put_prefix(self.prefix_ids, cache)
        return cache

    def close(self) -> None:
        for source in (*self.chunks, *([self.prefix] if self.prefix else [])):
            source.close()

    def _chunk(self, ids: Ids) -> Source:
        return self._store.open(ids) or self._store.hold(ids, self._kept(ids))

    def _prefix(self) -> Source:
        found = self._store.open_prefix(self.prefix_ids)
        if found is None:
            cache = self._makers.prefix(self.prefix_ids)
            self._store.put_prefix(self.prefix_ids, cache)
            found = self._store.hold_prefix(self.prefix_ids, cache)
        return found

    def _kept(self, ids: Ids) -> ChunkCache:
        cache = self._makers.chunk(ids)
        self._store.put(ids, cache)
        return cache
