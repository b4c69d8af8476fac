"""Chunk caches by content: what is not there, damaged or foreign is None, counted and logged, never fatal."""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from qcfuse.store import chunk_file, file_io
from qcfuse.store.chunk_file import ChunkError, ChunkHeader, ChunkIdentity, Stored
from qcfuse.store.config import StoreConfig, check_key
from qcfuse.store.geometry import KVGeometry
from qcfuse.store.index import ChunkIndex
from qcfuse.store.ram import RamTier
from qcfuse.store.sources import FileSource, MemorySource, Source
from qcfuse.types import ChunkCache, PrefixCache

log = logging.getLogger(__name__)

PREFIX_KEY = "prefix"
T = TypeVar("T")


def content_key(ids: Sequence[int]) -> str:
    """sha256 of token ids, the same on every machine and in every process."""
    return hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()


class ChunkStore:
    """The chunk and prefix caches of one model under one anchor rule.

    counters: hits, missing, truncated, corrupt, foreign (gets that a caller must answer by recomputing), puts,
    put_failed, evicted (from disk), ram_evicted, index_failed, over_capacity.
    Threads may share a store, processes may share its root.
    """

    def __init__(self, config: StoreConfig, *, model_key: str, anchor_key: str, geometry: KVGeometry) -> None:
        self.config = config
        self.geometry = geometry
        self.model_key = check_key("model_key", model_key)
        self.anchor_key = check_key("anchor_key", anchor_key)
        if anchor_key == PREFIX_KEY:
            raise ValueError(f"anchor_key={anchor_key!r} is taken by the prefix caches; choose another")
        self.counters: Counter[str] = Counter()
        self._ram = RamTier(config.ram_bytes) if config.uses_ram else None
        self._index = ChunkIndex(config.root_path) if config.uses_disk else None

    def get(self, ids: Sequence[int]) -> ChunkCache | None:
        """The PIC cache of a chunk, every row verified. Its tensors are shared: never write into them."""
        found = self._load(self._identity(ids), len(ids))
        if found is None:
            return None
        k, v, order = chunk_file.decode(found)
        return ChunkCache(k=k, v=v, order=order)

    def put(self, ids: Sequence[int], cache: ChunkCache) -> bool:
        """Stores a chunk's cache; False, a log line and a counter where it could not be kept.

        Raises ValueError where the cache does not fit ids or the geometry of this store.
        """
        return self._save(self._identity(ids), len(ids), cache.k, cache.v, cache.order)

    def get_prefix(self, ids: Sequence[int]) -> PrefixCache | None:
        """The exact KV of a prefix, rows in token order; shared like those of get."""
        found = self._load(self._prefix_identity(ids), len(ids))
        return None if found is None else PrefixCache(**dict(zip("kv", chunk_file.decode(found), strict=False)))

    def put_prefix(self, ids: Sequence[int], cache: PrefixCache) -> bool:
        return self._save(self._prefix_identity(ids), len(ids), cache.k, cache.v, torch.arange(cache.num_tokens))

    def contains(self, ids: Sequence[int]) -> bool:
        """Whether a file of this chunk is there with a sound header and full length; rows are not read."""
        return self._is_sound(self._identity(ids), len(ids))

    def contains_prefix(self, ids: Sequence[int]) -> bool:
        return self._is_sound(self._prefix_identity(ids), len(ids))

    def open(self, ids: Sequence[int]) -> Source | None:
        """A chunk for planned reads (its header is verified, its rows by whoever reads them); the caller closes it.
        direct reads, where the file system has them, bypass the page cache."""
        return self._open(self._identity(ids), len(ids))

    def open_prefix(self, ids: Sequence[int]) -> Source | None:
        return self._open(self._prefix_identity(ids), len(ids))

    def hold(self, ids: Sequence[int], cache: ChunkCache) -> Source:
        """A cache as a source that reads from memory, whether or not the store could keep it."""
        stored = chunk_file.encode(cache.k, cache.v, cache.order, self.geometry, self.config.rows_per_block,
                                   self._identity(ids))
        return MemorySource(stored)

    def hold_prefix(self, ids: Sequence[int], cache: PrefixCache) -> Source:
        order = torch.arange(cache.num_tokens)
        return MemorySource(chunk_file.encode(cache.k, cache.v, order, self.geometry, self.config.rows_per_block,
                                              self._prefix_identity(ids)))

    def reject(self, ids: Sequence[int], err: ChunkError, *, prefix: bool = False) -> None:
        """A link found rows of an open chunk or prefix damaged: counts and logs it, and removes the file."""
        self.counters["hits"] -= 1
        self._count_miss(self._path(self._prefix_identity(ids) if prefix else self._identity(ids)), err)

    @contextmanager
    def pin(self, *chunks: Sequence[int]) -> Iterator[None]:
        """Keeps chunks, present or not, from eviction in every process while the block runs."""
        paths = [self._path(self._identity(ids)) for ids in chunks]
        token = None
        if self._ram:
            self._ram.pin(paths)
        try:
            token = self._indexed(lambda index: index.pin(paths))
            yield
        finally:
            if token is not None:
                self._indexed(lambda index: index.unpin(token))
            if self._ram:
                self._ram.unpin(paths)

    def num_bytes(self) -> dict[str, int]:
        """Bytes held per tier; the disk's are those of all models under the root."""
        held = {"ram": self._ram.num_bytes() if self._ram else 0}
        return held | {"disk": self._indexed(lambda index: index.num_bytes()) or 0}

    def close(self) -> None:
        if self._index:
            self._index.close()

    def _identity(self, ids: Sequence[int]) -> ChunkIdentity:
        return ChunkIdentity(kind="chunk", model_key=self.model_key, anchor_key=self.anchor_key,
                             content=content_key(ids))

    def _prefix_identity(self, ids: Sequence[int]) -> ChunkIdentity:
        return ChunkIdentity(kind="prefix", model_key=self.model_key, anchor_key=PREFIX_KEY, content=content_key(ids))

    @staticmethod
    def _path(identity: ChunkIdentity) -> str:
        sha = identity.content
        return f"{identity.model_key}/{identity.anchor_key}/{sha[:2]}/{sha}.safetensors"

    def _open(self, identity: ChunkIdentity, num_tokens: int) -> Source | None:
        path = self._path(identity)
        stored = self._ram.get(path) if self._ram else None
        try:
            source = MemorySource(stored) if stored else self._open_file(path, identity, num_tokens)
        except ChunkError as err:
            self._count_miss(path, err)
            return None
        self.counters["hits"] += 1
        return source

    def _load(self, identity: ChunkIdentity, num_tokens: int) -> Stored | None:
        path = self._path(identity)
        stored = self._ram.get(path) if self._ram else None
        try:
            stored = stored or self._read_disk(path, identity, num_tokens)
        except ChunkError as err:
            self._count_miss(path, err)
            return None
        self.counters["hits"] += 1
        return stored

    def _read_disk(self, path: str, identity: ChunkIdentity, num_tokens: int) -> Stored:
        with self._opened(path, identity, num_tokens) as (fd, header):
            stored = Stored(file_io.read_image(fd), header)
        if stored.image.numel() != header.file_bytes:
            raise ChunkError("truncated", f"{stored.image.numel()} bytes, and it changed while it was read")
        chunk_file.verify_all(stored)
        self._indexed(lambda index: index.touch(path, header.file_bytes))
        if self._ram:
            self.counters["ram_evicted"] += self._ram.put(path, stored)
        return stored

    def _open_file(self, path: str, identity: ChunkIdentity, num_tokens: int) -> FileSource:
        with self._opened(path, identity, num_tokens) as (_, header):
            source = FileSource(self.config.root_path / path, header, direct=self.config.link.direct == "auto")
        self._indexed(lambda index: index.touch(path, header.file_bytes))
        return source

    @contextmanager
    def _opened(self, path: str, identity: ChunkIdentity, num_tokens: int) -> Iterator[tuple[int, ChunkHeader]]:
        """A descriptor and the verified header; any failure to read becomes a ChunkError."""
        if self._index is None:
            raise ChunkError("missing", "not in memory")
        fd = file_io.open_file(self.config.root_path / path)
        try:
            yield fd, chunk_file.parse_header(file_io.file_reader(fd), num_tokens, self.geometry,
                                              self.config.rows_per_block, identity)
        except OSError as err:
            raise ChunkError("corrupt", f"the file cannot be read: {err.strerror}") from None
        finally:
            os.close(fd)

    def _count_miss(self, path: str, err: ChunkError) -> None:
        self.counters[err.reason] += 1
        log.log(logging.INFO if err.reason == "missing" else logging.WARNING, "chunk not used, %s (%s)", err, path)
        if err.reason in ("truncated", "corrupt"):
            self.discard(path)

    def discard(self, path: str) -> None:
        """Removes a damaged file, so that nobody meets it again and `contains` says so."""
        if self._ram:
            self._ram.drop(path)
        if self._index:
            (self.config.root_path / path).unlink(missing_ok=True)
            self._indexed(lambda index: index.forget(path))

    def _save(self, identity: ChunkIdentity, num_tokens: int, k: torch.Tensor, v: torch.Tensor,
              order: torch.Tensor) -> bool:  # fmt: skip
        if order.shape[-1] != num_tokens:
            raise ValueError(f"a cache of {order.shape[-1]} rows was given for {num_tokens} token ids")
        path = self._path(identity)
        stored = chunk_file.encode(k, v, order, self.geometry, self.config.rows_per_block, identity)
        if self._index:
            try:
                file_io.write_atomically(self.config.root_path / path, stored.image)
            except OSError as err:
                self.counters["put_failed"] += 1
                log.warning("chunk not stored, %s (%s)", err, path)
                return False
            self._indexed(lambda index: index.touch(path, stored.image.numel()))
            self._enforce_capacity()
        if self._ram:
            self.counters["ram_evicted"] += self._ram.put(path, stored)
        self.counters["puts"] += 1
        return True

    def _enforce_capacity(self) -> None:
        evicted, excess = self._indexed(lambda index: index.evict(self.config.disk_bytes)) or ([], 0)
        self.counters["evicted"] += len(evicted)
        for path in evicted if self._ram else ():
            self._ram.drop(path)
        if excess:
            self.counters["over_capacity"] += 1
            log.warning("the store is %d bytes above disk_gb=%s: the rest is pinned", excess, self.config.disk_gb)

    def _is_sound(self, identity: ChunkIdentity, num_tokens: int) -> bool:
        path = self._path(identity)
        if self._ram and self._ram.get(path):
            return True
        try:
            with self._opened(path, identity, num_tokens):
                return True
        except ChunkError:
            return False

    def _indexed(self, act: Callable[[ChunkIndex], T]) -> T | None:
        """A broken index must not stop a request: it only costs the order of eviction."""
        if self._index is None:
            return None
        try:
            return act(self._index)
        except (sqlite3.Error, OSError) as err:
            self.counters["index_failed"] += 1
            log.warning("chunk index %s: %s", self._index.path, err)
            return None
