"""Compiles every kernel that a launch of the three ops would start, for GPUs this machine need not have.

Run without TRITON_INTERPRET; prints JSON, one entry per (model, case, kernel, target).
The launchers run on CPU tensors with their kernels replaced by recorders, so that what is compiled is what they launch:
same tile sizes, same specialisation, same options.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.place_kv import kernel as place_kv
from kernels.recompute_attention import kernel as recompute_attention
from kernels.score import kernel as score

KERNELS = {
    recompute_attention: ("attend_kernel", "merge_kernel"), score: ("lse_kernel", "importance_kernel"),
    place_kv: ("place_kernel",),
}  # fmt: skip
POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
CAPABILITIES = (80, 90)
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Recorder:
    """Stands in for a kernel: `recorder[grid](**arguments)` keeps the arguments."""

    kernel: Any
    launches: list[dict[str, Any]] = field(default_factory=list)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda **arguments: self.launches.append(arguments)


def record(launch: Callable[[], Any]) -> list[tuple[Any, dict[str, Any]]]:
    """(kernel, arguments) of every launch that `launch()` makes."""
    originals = [(module, name, getattr(module, name)) for module, names in KERNELS.items() for name in names]
    recorders = [Recorder(kernel) for _, _, kernel in originals]
    try:
        for (module, name, _), recorder in zip(originals, recorders, strict=True):
            setattr(module, name, recorder)
        launch()
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)
    return [(recorder.kernel, arguments) for recorder in recorders for arguments in recorder.launches]


def source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """The kernel specialised as Triton's launcher does: None and 1 constant, multiples of 16 marked."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and specialised):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], multiple = POINTERS[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name], multiple = "fp32", False
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            multiple = value % 16 == 0 and specialised
        if multiple:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack (where spilled registers go), as the cubin's own header states them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", report)[1]), "stack_bytes": int(re.search(r"STACK:(\d+)", report)[1]),
    }  # fmt: skip


def instructions(ptx: str) -> dict[str, Any]:
    """Which matrix unit is used, and the widest load and asynchronous copy: what an unvectorised kernel would lack."""
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)", ptx)
    return {
        "matrix_unit": "wgmma" if "wgmma.mma_async" in ptx else ("mma" if "mma.sync" in ptx else None),
        "load_bits": max((32 * int(n) for n in re.findall(r"ld\.global\.v(\d)\.b32", ptx)), default=32),
        "async_copy_bytes": max((int(n, 16) for n in copies), default=0),
    }


def build(kernel: Any, arguments: dict[str, Any], capability: int) -> dict[str, Any]:
    """Compiles to a cubin and returns what it uses."""
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    compiled = triton.compile(source(kernel, arguments), target=GPUTarget("cuda", capability, 32), options=options)
    cubin = compiled.asm["cubin"]
    return {
        "kernel": kernel.__name__, "capability": capability, "cubin_bytes": len(cubin),
        "shared_bytes": compiled.metadata.shared, "num_warps": compiled.metadata.num_warps,
        **instructions(compiled.asm["ptx"]), **resource_usage(cubin),
    }  # fmt: skip


def cases(heads: int, heads_kv: int, dim: int) -> dict[str, Callable[[], Any]]:
    """One launch per form of the ops for a model's bf16 shapes: 10,240 context tokens, a question of 50 rows."""
    num_rows, num_keys, page = 1024, 10240, 16
    bf16 = {"dtype": torch.bfloat16}
    q, k = torch.zeros(num_rows, heads, dim, **bf16), torch.zeros(num_keys, heads_kv, dim, **bf16)
    last = torch.arange(num_rows) * 10
    cu_rows, cu_keys = torch.tensor([0, 500, num_rows]), torch.tensor([0, 5000, num_keys])
    pages = k.view(-1, page, heads_kv, dim)
    table = torch.zeros(2, num_keys // page, dtype=torch.int32)
    question, layers = torch.zeros(3, 50, heads, dim, **bf16), [k, k.clone(), k.clone()]
    cos = torch.zeros(num_keys, dim // 2)
    attention = recompute_attention
    return {
        "contiguous": lambda: attention.recompute_attention(q, k, k, last, num_splits=1),
        "few_rows": lambda: attention.recompute_attention(q[:4], k, k, last[:4], num_splits=1),
        "split": lambda: attention.recompute_attention(q[:50], k, k, last[:50], num_splits=4),
        "window": lambda: attention.recompute_attention(q, k, k, last, window=4096, num_splits=1),
        "ragged": lambda: attention.recompute_attention_ragged(q, k, k, last, cu_rows, cu_keys, num_splits=1),
        "paged": lambda: attention.recompute_attention_paged(q, pages, pages, last, cu_rows.int(), table, num_splits=1),
        "paged_split": lambda: attention.recompute_attention_paged(
            q[:50], pages, pages, last, torch.tensor([0, 20, 50]).int(), table, num_splits=4),
        "score_max": lambda: score.score(question, torch.stack(layers), last[:50], (40, 10200), "max"),
        "score_mean_list": lambda: score.score(question, layers, last[:50], (40, 10200), "mean"),
        "place": lambda: place_kv.place_kv(k, k, cos, cos, torch.arange(num_keys), k, k, torch.arange(num_keys)),
        "place_keys": lambda: place_kv.place_kv(k, None, cos, cos, torch.arange(num_keys), k, None),
        "rotate": lambda: place_kv.rotate(q, cos[:num_rows], cos[:num_rows]),
    }  # fmt: skip


MODELS = {"qwen3_8b": (32, 8, 128), "smollm2": (9, 3, 64)}
"""Hq, Hkv, D."""

SUBSET = ("contiguous", "paged_split", "score_max", "place")
"""Cases of the second model: each form shares its code with one of these, and a compilation takes seconds."""


def results() -> Iterator[dict[str, Any]]:
    """What each (target, model, case, kernel) uses."""
    original = recompute_attention.device_limits
    for capability in CAPABILITIES:
        recompute_attention.device_limits = lambda device, capability=capability: (108, capability)
        for model, shape in MODELS.items():
            launches = cases(*shape)
            for case in SUBSET if model == "smollm2" else launches:
                for kernel, arguments in record(launches[case]):
                    yield {"model": model, "case": case, **build(kernel, arguments, capability)}
    recompute_attention.device_limits = original


if __name__ == "__main__":
    json.dump({"triton": triton.__version__, "results": list(results())}, sys.stdout)
