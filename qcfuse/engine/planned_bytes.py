"""What a request would have to read from storage, by the read planner, where the caches already lie in memory."""

from __future__ import annotations

import numpy as np

from qcfuse.fusion.probe import ProbeSpec
from qcfuse.fusion.source import MemorySource, anchor_count
from qcfuse.store.context import ContextRows
from qcfuse.store.geometry import KVGeometry
from qcfuse.store.planner import Needs, ReadPlan


def planned_bytes(
    geometry: KVGeometry, source: MemorySource, spec: ProbeSpec | None, selected: np.ndarray
) -> dict[str, int | None]:
    """The byte fields of a record for one selection: blocks of one row, no gaps read through, nothing speculated.

    device is None and wasted 0: no device was read.
    """
    request = source.layout.request
    orders = [chunk.order.cpu().numpy() for chunk in source.chunks]
    rows = ContextRows.of(geometry, request.chunk_ids, orders, rows_per_block=1)
    plan = ReadPlan(rows, gap=0)
    if spec is not None:
        plan.select(Needs.scoring(spec.layers), [anchor_count(spec.anchor_ratio, n) for n in rows.num_tokens])
    wanted = np.ones(request.num_context_tokens, bool)
    wanted[selected] = False
    for layer in range(1, geometry.num_layers):
        plan.rest(layer, wanted)
    planned = plan.bytes()
    return {
        "total_kv": planned["total_kv"],
        "prefix": geometry.kv_bytes(request.num_prefix_tokens) * (geometry.num_layers - 1) // geometry.num_layers,
        "before_recompute": planned["before_recompute"],
        "requested": planned["requested"],
        "device": None,
        "wasted": 0,
    }


def no_bytes(geometry: KVGeometry, num_context_tokens: int) -> dict[str, int | None]:
    """Full prefill reads nothing."""
    names = ("prefix", "before_recompute", "requested", "device", "wasted")
    return {"total_kv": geometry.kv_bytes(num_context_tokens), **dict.fromkeys(names, 0)}
