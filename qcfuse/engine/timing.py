"""From a finished timeline to what runners keep of a timed request."""

from __future__ import annotations

from qcfuse.engine.base import Arm, Timing
from qcfuse.engine.planned_bytes import planned_bytes
from qcfuse.fusion.fuse import Fusion
from qcfuse.fusion.linked import LinkedSource
from qcfuse.fusion.schedule import schedule_bound_s
from qcfuse.store.config import GB
from qcfuse.store.geometry import KVGeometry
from qcfuse.types import Selection


def timing_of(
    fusion: Fusion, arm: Arm, selection: Selection, ttft_s: float, geometry: KVGeometry, *, gb_per_s: float | None,
    latency_s: float,
) -> Timing:  # fmt: skip
    """gb_per_s, latency_s: settings of the link. Bytes are those that were read, or planned where nothing was."""
    timeline, source = fusion.timeline, fusion.source
    efficiency = None
    if isinstance(source, LinkedSource):
        source.add_spans()
        read = source.bytes()
        if gb_per_s is not None:
            bound_s = schedule_bound_s(timeline.program, bytes_per_s=gb_per_s * GB, latency_s=latency_s)
            efficiency = bound_s / ttft_s
    else:
        read = planned_bytes(geometry, source, fusion.spec(arm.selector), selection.selected.cpu().numpy())
    return Timing(
        ttft_s=ttft_s,
        decode_s=None,
        stages_s=timeline.stages_s(),
        bytes=read,
        trace=timeline.chrome_trace(
            ttft_s=ttft_s, gb_per_s=gb_per_s, selector=arm.selector.name, rho=arm.rho,
            sample_id=fusion.layout.request.sample_id, num_context_tokens=fusion.layout.num_context,
        ),
        program=timeline.program,
        pipeline_efficiency=efficiency,
    )  # fmt: skip
