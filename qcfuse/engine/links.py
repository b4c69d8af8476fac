"""Requests read over storage links: one link per bandwidth, buffers shared and reused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from qcfuse.fusion.layout import Layout
from qcfuse.fusion.linked import LinkedSource, Reading
from qcfuse.fusion.timeline import Timeline
from qcfuse.store.buffers import BufferPool, LayerBuffer
from qcfuse.store.link import Link, LinkReport
from qcfuse.store.opened import Makers, OpenedRequest
from qcfuse.store.store import ChunkStore
from qcfuse.types import Request


class Links:
    """The links of one engine. Threads of a link start with its first read and end with `close`.

    config: how requests are read (gap, speculate, buffers, link); the store's own unless it is replaced.
    """

    def __init__(self, store: ChunkStore, makers: Makers, *, pinned: bool) -> None:
        self._store, self._makers = store, makers
        self.config = store.config
        self._pool = BufferPool(store.config.buffer_bytes, pinned=pinned)
        self._links: dict[float | None, Link] = {}

    def link(self, gb_per_s: float | None) -> Link:
        """gb_per_s: GB of 1e9 bytes a second, None for as fast as the device goes."""
        if gb_per_s not in self._links:
            self._links[gb_per_s] = Link(replace(self.config.link, bandwidth_gb_per_s=gb_per_s))
        return self._links[gb_per_s]

    @contextmanager
    def source(
        self, request: Request, layout: Layout, timeline: Timeline, *, gb_per_s: float | None, rho: float
    ) -> Iterator[LinkedSource]:
        """The request's stored rows, its chunks pinned while they are in use.

        Raises ValueError where storage.buffer_gb cannot hold the rows of two layers.
        """
        config = self.config
        with self._store.pin(*request.chunk_ids):
            opened = OpenedRequest(self._store, request, self._makers)
            need = 2 * (LayerBuffer.size(opened.rows)
                        + (LayerBuffer.size(opened.prefix_rows) if opened.prefix_rows else 0))  # fmt: skip
            if need > config.buffer_bytes:
                opened.close()
                raise ValueError(f"storage.buffer_gb={config.buffer_gb} is too small for this request; two layers of "
                                 f"its rows take {need / 1e9:.3f} GB")
            reading = Reading(gap=config.gap, speculate=1 - rho if config.speculate else 0.0)
            source = LinkedSource(layout, opened, self.link(gb_per_s), self._pool, timeline, reading)
            try:
                yield source
            finally:
                source.close()

    def report(self, gb_per_s: float | None) -> LinkReport:
        """What a link has moved; logs a warning where the device did not reach the setting."""
        return self.link(gb_per_s).report()

    def close(self) -> None:
        """Ends the threads; links that did not reach their setting say so."""
        for link in self._links.values():
            link.report()
            link.close()
        self._links.clear()
