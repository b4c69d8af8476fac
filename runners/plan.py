"""runner=plan: which storage device is worth its price, from measured compute and the devices' speeds.

CacheBlend's controller (EuroSys '25, section 5): the cheapest device whose load the recompute of a given share hides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcfuse.engine.cost import FLOOR_RHO, CostModel, Shape
from qcfuse.fusion.probe import ProbeSpec
from runners.calibrate import cost_model
from runners.cell import Cell
from runners.cell_dir import write_atomic
from runners.dispatch import Engines, build_requests
from runners.link_speed import scaled_speed


@dataclass(frozen=True, kw_only=True)
class Device:
    """A storage device: read bandwidth in GB/s, price per GB and month in any currency."""

    name: str
    gb_per_s: float
    price_per_gb_month: float

    def __post_init__(self) -> None:
        if not self.gb_per_s > 0 or not self.price_per_gb_month >= 0:
            raise ValueError(f"device {self.name}: gb_per_s={self.gb_per_s} must be above 0 and price_per_gb_month="
                             f"{self.price_per_gb_month} not below 0")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a request costs on a device. load_s: after the selection; hidden: not longer than the recompute. rho_auto:
    the ratio that the device's load hides. price_per_month: of a request's chunks."""

    device: Device
    load_s: float
    recompute_s: float
    hidden: bool
    ttft_s: float
    rho_auto: float
    price_per_month: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """devices: what to compare, cheapest wins among those whose load is hidden at the cell's rho (auto: the floor)."""

    devices: Sequence[Any]

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("runner.devices is empty; give at least one {name, gb_per_s, price_per_gb_month}")
        names = [Device(**device).name for device in self.devices]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"runner.devices names {', '.join(sorted(twice))} more than once")

    def run(self, cells: Sequence[Cell]) -> None:
        engines = Engines()
        for cell in cells:
            engine = engines.of(cell)
            request = build_requests(cell, engine)[0]
            spec = cell.selector.probe_spec(engine.decoder.num_layers, engine.critical)
            directory = Path(cell.output_dir, "calibration")
            gb_per_s = {d["name"]: scaled_speed(cell, engine, request, d["gb_per_s"]) for d in self.devices}
            fastest = max(speed.gb_per_s for speed in gb_per_s.values())
            model = cost_model(engine, cell.selector, cell.seed, request, fastest, directory)
            rho = FLOOR_RHO if cell.rho == "auto" else cell.rho
            shape, row_bytes = Shape.of(request), engine.geometry.row_bytes
            estimates = [
                estimate(model, Device(**d), shape, spec, rho, row_bytes, gb_per_s[d["name"]].gb_per_s,
                         engine.kv_bytes(request.num_context_tokens))
                for d in self.devices
            ]  # fmt: skip
            path = Path(cell.output_dir, "plan", f"{cell.choices['model']}-{cell.selector.name}.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            links = {name: speed.description for name, speed in gb_per_s.items()}
            found = {"rho": rho, "context_tokens": request.num_context_tokens, "links": links,
                     "estimates": [asdict(e) for e in estimates], "chosen": chosen(estimates)}  # fmt: skip
            write_atomic(path, json.dumps(found, indent=1) + "\n")
            print(table(estimates, cell, rho, request.num_context_tokens))
            print(f"wrote {path}")


def estimate(
    model: CostModel, device: Device, shape: Shape, spec: ProbeSpec | None, rho: float, row_bytes: int, gb_per_s: float,
    kv_bytes: int,
) -> Estimate:  # fmt: skip
    """gb_per_s: of the link here, which is the device's own unless storage.match scales it."""
    load_s = model.load_s(shape, spec, rho, row_bytes, gb_per_s)
    recompute_s = model.recompute_s(shape, spec, rho)
    return Estimate(
        device=device,
        load_s=load_s,
        recompute_s=recompute_s,
        hidden=load_s <= recompute_s,
        ttft_s=model.ttft_s(shape, spec, rho, row_bytes=row_bytes, gb_per_s=gb_per_s),
        rho_auto=model.hiding_rho(shape, spec, row_bytes=row_bytes, gb_per_s=gb_per_s),
        price_per_month=device.price_per_gb_month * kv_bytes / 1e9,
    )


def chosen(estimates: Sequence[Estimate]) -> str | None:
    """The cheapest device whose load is hidden (equal prices: the faster one); None where none is."""
    hidden = [e for e in estimates if e.hidden]
    if not hidden:
        return None
    return min(hidden, key=lambda e: (e.device.price_per_gb_month, -e.device.gb_per_s)).device.name


def table(estimates: Sequence[Estimate], cell: Cell, rho: float, num_context_tokens: int) -> str:
    """Every device with its estimate, and the verdict in one line."""
    head = f"{'device':<16} {'GB/s':>8} {'price':>8} {'load s':>8} {'recompute s':>12} {'hidden':>7} {'TTFT s':>8}"
    head += f" {'auto rho':>9}"
    rows = [
        f"{e.device.name:<16} {e.device.gb_per_s:>8g} {e.device.price_per_gb_month:>8g} {e.load_s:>8.3f} "
        f"{e.recompute_s:>12.3f} {'yes' if e.hidden else 'no':>7} {e.ttft_s:>8.3f} {e.rho_auto:>9.2f}"
        for e in estimates
    ]
    name = chosen(estimates)
    verdict = f"cheapest whose load is hidden: {name}" if name else "no device's load is hidden at this rho"
    title = f"{cell.choices['model']}, {cell.selector.name}, rho {rho:g}, {num_context_tokens} context tokens"
    return "\n".join([title, head, *rows, verdict])
