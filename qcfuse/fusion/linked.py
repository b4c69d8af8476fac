"""Stored rows that come over a storage link while the request is computed: the pipeline's reading half.

The read planner says what is read, the link reads it on its threads, and the compute thread waits layer by layer.
Nothing is read twice: what the probe used stands in the fused cache from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qcfuse.fusion.layout import Layout
from qcfuse.fusion.probe import ProbeSpec
from qcfuse.fusion.source import Source, Subset, anchor_count, anchor_mask, gather_rows, rank_order
from qcfuse.fusion.timeline import Span, Timeline
from qcfuse.store.buffers import BufferPool, LayerBuffer
from qcfuse.store.chunk_file import ChunkError
from qcfuse.store.context import ContextRows
from qcfuse.store.link import Link, Transfer
from qcfuse.store.opened import OpenedRequest
from qcfuse.store.planner import Needs, ReadPlan, Step
from qcfuse.store.sources import Source as StoredChunk
from qcfuse.types import ChunkCache, PrefixCache

SPECULATION_BYTES = 1 << 20
"""Size of a speculative step: what a decision may have to wait for behind a step that has begun."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """gap: blocks that are read through (see ReadPlan). speculate: share of each chunk, from its low ranks up, that the
    link may read while P is unknown; 0 for none."""

    gap: int
    speculate: float


class _Rows:
    """Buffers of one numbering of rows (the context, or the prefix), one per layer while somebody needs it.

    On CUDA rows are uploaded whole, on a stream of their own, when they are asked for (or one layer earlier).
    """

    def __init__(
        self, rows: ContextRows, pool: BufferPool, sources: Sequence[StoredChunk], device: torch.device
    ) -> None:
        self.rows, self.pool, self.sources, self.device = rows, pool, sources, device
        self.buffers: dict[int, LayerBuffer] = {}
        self.latest: Transfer | None = None
        self._users: dict[int, int] = {}
        self._uploads: dict[int, tuple[Tensor, Tensor, torch.cuda.Event]] = {}
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, layer: int) -> LayerBuffer | None:
        """The layer's buffer with one more user; None where the limit leaves no room."""
        if layer not in self.buffers:
            buffer = LayerBuffer.when_free(self.pool, self.rows)
            if buffer is None:
                return None
            self.buffers[layer] = buffer
        self._users[layer] = self._users.get(layer, 0) + 1
        return self.buffers[layer]

    def give(self, layer: int, count: int) -> None:
        """`count` users are done with the layer; the last one frees its buffer."""
        self._users[layer] -= count
        assert self._users[layer] >= 0
        if count and not self._users[layer]:
            self._uploads.pop(layer, None)
            self.buffers.pop(layer).release()

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """k, v [num_rows, Hkv, D] of a layer on the device; rows that were not read are undefined."""
        buffer = self.buffers[layer]
        if self._copies is None:
            return buffer.k, buffer.v
        if layer not in self._uploads:
            self.upload(layer)
        k, v, uploaded = self._uploads[layer]
        torch.cuda.current_stream(self.device).wait_event(uploaded)
        return k, v

    def upload(self, layer: int) -> None:
        """Starts the copy of what a layer's buffer holds now; nothing to do on the CPU."""
        if self._copies is None or layer not in self.buffers:
            return
        with torch.cuda.stream(self._copies):
            buffer = self.buffers[layer]
            k, v = (x.to(self.device, non_blocking=True) for x in (buffer.k, buffer.v))
            self._uploads[layer] = (k, v, self._copies.record_event())
        for tensor in (k, v):
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def release_all(self) -> None:
        for buffer in self.buffers.values():
            buffer.release()
        self.buffers.clear()
        self._users.clear()
        self._uploads.clear()


class LinkedSource(Source):
    """Rows of an opened request over a link. Close it when the request is done.

    Reads go in the order in which compute needs them, as far ahead as the buffers' limit allows. A chunk whose rows do
    not match their checksums is computed again and replaced in every buffer that still holds it.
    """

    def __init__(
        self, layout: Layout, opened: OpenedRequest, link: Link, pool: BufferPool, timeline: Timeline, reading: Reading
    ) -> None:
        self.layout, self.opened, self.link, self.timeline, self.reading = layout, opened, link, timeline, reading
        rows, prefix_rows = opened.rows, opened.prefix_rows
        self._context = _Rows(rows, pool, opened.chunks, layout.device)
        self._prefix = None if prefix_rows is None else _Rows(prefix_rows, pool, [opened.prefix], layout.device)
        self.per_layer_order = any(order.ndim == 2 for order in rows.orders)
        self.num_layers = rows.geometry.num_layers
        self.plan = ReadPlan(rows, gap=reading.gap)
        self._prefix_plan = None if prefix_rows is None else ReadPlan(prefix_rows, gap=0)
        self._orders = [torch.from_numpy(rows.orders[i]).to(layout.device) for i in rows.occurrences]
        self._queue: deque[tuple[str, int, Callable[[], Step]]] = deque()
        self._transfers: dict[tuple[str, int], list[Transfer]] = {}
        self._finished: list[tuple[str, Transfer]] = []
        self._ids: dict[Transfer, int] = {}
        self._held_keys: frozenset[int] = frozenset()
        self._remade: dict[int, ChunkCache] = {}
        self._remade_prefix: PrefixCache | None = None
        self._scratch: dict[str, Tensor] = {}
        self._none = torch.empty(0, rows.geometry.num_kv_heads, rows.geometry.head_dim, device=layout.device,
                                 dtype=getattr(torch, rows.geometry.dtype))
        self._selected: np.ndarray | None = None

    def anchor_mask(self, anchor_ratio: float, layer: int) -> Tensor:
        return anchor_mask(self.layout, [rank_order(order, layer) for order in self._orders], anchor_ratio)

    def subset(self, keep: Tensor, layer: int = 1) -> Subset:
        positions = keep.nonzero()[:, 0]
        num_prefix = self.layout.num_prefix
        in_prefix = positions[positions < num_prefix]
        tokens = positions[in_prefix.shape[0] :] - num_prefix
        row_of_token = torch.from_numpy(self._context.rows.row_of_token(max(layer, 1))).to(self.layout.device)
        return Subset(positions=positions, parts=((None, in_prefix), (0, row_of_token[tokens])))

    def keys(self, layer: int, subset: Subset) -> Tensor:
        return self._gather("k", layer, subset)

    def values(self, layer: int, subset: Subset) -> Tensor:
        return self._gather("v", layer, subset)

    def begin(self, spec: ProbeSpec | None) -> None:
        """Queues the prefix and what the probe needs, in the order of its use, and speculation behind it."""
        self.timeline.to("engine")
        steps: list[Step] = []
        if spec is not None:
            counts = [anchor_count(spec.anchor_ratio, n) for n in self._context.rows.num_tokens]
            steps = self.plan.select(Needs.scoring(spec.layers), counts)
            if spec.score_rope == "chunk_local":
                self._held_keys = frozenset(spec.layers)  # scored un-rotated, so the buffer must keep what it got
        prefix_upto = 0
        for step in steps:
            prefix_upto = self._queue_prefix(prefix_upto, step.layer)
            self._queue.append((step.phase, step.layer, lambda step=step: step))
        self._queue_prefix(prefix_upto, self.num_layers - 1)
        self._pump()
        if spec is not None and self.reading.speculate and not self._queue:
            self._speculate()

    def decide(self, selected: Tensor, first: int = 1, last: int | None = None) -> None:
        """Queues the rest of these layers; speculation of which nothing has been read is dropped."""
        with self.timeline.during("engine"):
            self._decide(selected, first, last)

    def _decide(self, selected: Tensor, first: int, last: int | None) -> None:
        self._settle_speculation()
        self._selected = np.zeros(self.layout.num_context, bool)
        self._selected[selected.cpu().numpy()] = True
        wanted = ~self._selected
        for layer in range(first, self.num_layers if last is None else last + 1):
            self._queue.append(("rest", layer, lambda layer=layer: self.plan.rest(layer, wanted)))
        self._pump()

    def await_view(self, layer: int) -> None:
        if layer:
            self._await_prefix(layer)
            self._await("wait_select", "view", layer)

    def await_keys(self, layer: int) -> None:
        if layer:
            self._await_prefix(layer)
            self._await("wait_select", "keys", layer)

    def await_rest(self, layer: int) -> None:
        if layer:
            self._await_prefix(layer)
            self._await("wait_layer", "rest", layer)
            self._await("wait_layer", "speculate", layer)

    def release(self, phase: str, layer: int) -> None:
        """Frees buffers whose last use this was, and reads on with them."""
        if not layer or (phase == "view" and layer in self._held_keys):
            return
        done = ["rest", "speculate"] if phase == "rest" else [phase]
        if phase == "keys" and layer in self._held_keys:
            done.append("view")
        self._free(self._context, done, layer)
        if self._prefix is not None and phase != "keys":  # the deepest layer's values are placed with the rest
            self._free(self._prefix, ["prefix"], layer)
        self._pump()

    def close(self) -> None:
        """Waits for what is still being read (the buffers are its target) and frees everything."""
        self._queue.clear()
        self.link.drop_speculation()
        for transfers in self._transfers.values():
            for transfer in transfers:
                transfer.wait()
        self._context.release_all()
        if self._prefix is not None:
            self._prefix.release_all()
        self.opened.close()

    def bytes(self) -> dict[str, int | None]:
        """The byte fields of a record, of the context; `prefix` apart. Raises where rows are still to be read."""
        assert not self._queue, "bytes are known when everything has been read"
        wasted = 0
        if self._selected is not None:
            wasted = sum(self.plan.wasted_bytes(self._selected, layer) for layer in range(1, self.num_layers))
        planned = self.plan.bytes()
        by_prefix = [[t for phase, t in self._finished if (phase == "prefix") is prefix] for prefix in (False, True)]
        return {
            "total_kv": planned["total_kv"],
            "prefix": sum(t.requested_bytes for t in by_prefix[True]),
            "before_recompute": planned["before_recompute"],
            "requested": planned["requested"],
            "device": sum(t.device_bytes for t in by_prefix[False]),
            "wasted": wasted,
        }

    def add_spans(self) -> None:
        """Puts what the link did on the timeline, once everything has been used."""
        for phase, transfer in self._finished:
            if transfer.start_s is not None:
                self.timeline.spans.append(Span(phase, transfer.start_s, transfer.end_s, transfer.step.layer,
                                                transfer.device_bytes, "link"))

    def _queue_prefix(self, first: int, last: int) -> int:
        """Queues the prefix of layers first + 1 to last; returns the last layer that has been queued."""
        if self._prefix_plan is not None:
            everything = np.ones(self._prefix.rows.num_context_tokens, bool)
            for layer in range(first + 1, last + 1):
                self._queue.append(("prefix", layer,
                                    lambda layer=layer: self._prefix_plan.rest(layer, everything)))
        return max(first, last)

    def _pump(self) -> None:
        """Submits what is queued while buffers last, so that the link never waits for compute."""
        if self._queue:
            with self.timeline.during("engine"):
                while self._queue and self._submit_next():
                    pass

    def _submit_next(self) -> bool:
        phase, layer, plan = self._queue[0]
        owner = self._prefix if phase == "prefix" else self._context
        buffer = owner.take(layer)
        if buffer is None:
            return False
        self._queue.popleft()
        step = plan()
        if len(step.runs):
            self._submit(phase, step, owner, buffer)
        else:
            owner.give(layer, 1)
        return True

    def _submit(self, phase: str, step: Step, owner: _Rows, buffer: LayerBuffer) -> None:
        transfer = owner.latest = self.link.submit(step, owner.rows, owner.sources, buffer, like=owner.latest)
        self._transfers.setdefault((phase, step.layer), []).append(transfer)
        self._ids[transfer] = len(self._ids)
        self.timeline.submitted(self._ids[transfer], transfer.device_bytes)

    def _speculate(self) -> None:
        for step in self.plan.speculate(self.reading.speculate, SPECULATION_BYTES):
            buffer = self._context.take(step.layer)
            if buffer is None:
                return
            self._submit("speculate", step, self._context, buffer)

    def _settle_speculation(self) -> None:
        """What has begun counts and is not read again; the rest is forgotten."""
        self.link.drop_speculation()
        for key in [key for key in self._transfers if key[0] == "speculate"]:
            for transfer in self._transfers[key]:
                if transfer.is_cancelled:
                    self._context.give(key[1], 1)
                    self.timeline.withdrawn(self._ids[transfer])
                else:
                    self.plan.commit(transfer.step)
            self._transfers[key] = [t for t in self._transfers[key] if not t.is_cancelled]

    def _await_prefix(self, layer: int) -> None:
        if self._prefix is not None:
            self._await("wait_prefix", "prefix", layer)

    def _await(self, stage: str, phase: str, layer: int) -> None:
        if any(name == phase and at == layer for name, at, _ in self._queue):
            self._pump()
        owner = self._prefix if phase == "prefix" else self._context
        for transfer in self._transfers.get((phase, layer), ()):
            self.timeline.needed(self._ids[transfer])
            if not transfer.is_done:
                self.timeline.to(stage, layer)
            for chunk, err in transfer.wait().items():
                self._remake(owner, chunk, err)
        if layer in owner.buffers:
            self._mend(owner, layer)
            owner.upload(layer)
            if phase == "rest" and self._is_read("rest", layer + 1):
                owner.upload(layer + 1)

    def _is_read(self, phase: str, layer: int) -> bool:
        return all(t.is_done and not t.failed for t in self._transfers.get((phase, layer), ()))

    def _remake(self, owner: _Rows, chunk: int, err: ChunkError) -> None:
        if owner is self._prefix and self._remade_prefix is None:
            self._remade_prefix = self.opened.remake_prefix(err)
        elif owner is self._context and chunk not in self._remade:
            self._remade[chunk] = self.opened.remake(chunk, err)

    def _mend(self, owner: _Rows, layer: int) -> None:
        """Rows of chunks that were computed again replace whatever was read of them."""
        remade = self._remade if owner is self._context else {0: self._remade_prefix} if self._remade_prefix else {}
        for chunk, cache in remade.items():
            base = int(owner.rows.row_base[chunk])
            rows = slice(base, base + cache.num_tokens)
            owner.buffers[layer].k[rows] = cache.k[layer - 1]
            owner.buffers[layer].v[rows] = cache.v[layer - 1]

    def _free(self, owner: _Rows, phases: list[str], layer: int) -> None:
        for phase in phases:
            done = self._transfers.pop((phase, layer), [])
            self._finished += [(phase, transfer) for transfer in done]
            if done:
                owner.give(layer, len(done))

    def _gather(self, name: str, layer: int, subset: Subset) -> Tensor:
        assert layer >= 1, "layer 0 is computed, not stored"
        tensors = []
        for part, rows in subset.parts:
            owner = self._prefix if part is None else self._context
            tensors.append(owner.tensors(layer)["kv".index(name)] if rows.shape[0] else self._none)
        return gather_rows(tensors, subset, self._scratch, name)
