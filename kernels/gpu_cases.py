"""Numeric checks of the Triton ops on a CUDA device, against plain torch; the gpu tests and gpu_check share them.

Tolerance rule of flash-attention's tests: the error against float32 may be at most twice that of plain torch in the
same dtype, plus a rounding-sized constant. No pytest here: the machine that runs gpu_check may not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.place_kv import kernel as place_kernels
from kernels.place_kv import ref as place_ref
from kernels.recompute_attention import kernel as attention_kernels
from kernels.recompute_attention import ref as attention_ref
from kernels.score import kernel as score_kernels
from kernels.score import ref as score_ref

DEVICE = "cuda"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Attention heads of a model."""

    heads: int
    heads_kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.heads // self.heads_kv


SHAPES = {
    "qwen3_8b": Shape(heads=32, heads_kv=8, dim=128), "smollm2": Shape(heads=9, heads_kv=3, dim=64),
    "dim_80": Shape(heads=6, heads_kv=2, dim=80), "dim_96": Shape(heads=4, heads_kv=4, dim=96),
    "dim_256": Shape(heads=8, heads_kv=1, dim=256),
}  # fmt: skip


def assert_as_accurate(actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, atol: float) -> None:
    """Raises AssertionError where max |actual - exact| > 2 max |plain - exact| + atol, NaN included."""
    error, allowed = ((x.float() - exact).abs().max().item() for x in (actual, plain))
    allowed = 2 * allowed + atol
    if not error <= allowed:
        raise AssertionError(f"error {error:.3e} against float32, at most {allowed:.3e} allowed")


def random_rows(num_rows: int, num_keys: int, shape: Shape, dtype: torch.dtype, seed: int = 0):
    """q, k, v and sorted last visible keys, with repetitions where rows outnumber keys."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, shape.dim, generator=generator, device=DEVICE).to(dtype)

    last_key = torch.randint(0, num_keys, (num_rows,), generator=generator, device=DEVICE).sort().values
    return normal(num_rows, shape.heads), normal(num_keys, shape.heads_kv), normal(num_keys, shape.heads_kv), last_key


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Every step in the inputs' dtype: what plain torch would do. visible: [R, S] bool."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("rhd,shd->hrs", q * q.shape[-1] ** -0.5, keys)
    probs = logits.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hrs,shd->rhd", probs, values)


def causal(last_key: torch.Tensor, num_keys: int, window: int | None = None) -> torch.Tensor:
    """[R, S] bool: keys that each row sees."""
    distance = last_key[:, None] - torch.arange(num_keys, device=last_key.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def check_attention(
    shape: Shape, dtype: torch.dtype, num_rows: int, num_keys: int, window: int | None = None,
    num_splits: int | None = None,
) -> None:
    q, k, v, last_key = random_rows(num_rows, num_keys, shape, dtype)
    out = torch.full_like(q, float("nan"))
    attention_kernels.recompute_attention(q, k, v, last_key, window=window, out=out, num_splits=num_splits)
    exact = attention_ref.recompute_attention(q.float(), k.float(), v.float(), last_key, window=window)
    assert_as_accurate(out, plain_attention(q, k, v, causal(last_key, num_keys, window)), exact, atol=1e-5)


ROWS, KEYS = (300, 0, 1, 129), (2300, 64, 1, 129)


def check_batch(shape: Shape, dtype: torch.dtype, page: int | None, num_splits: int | None = None) -> None:
    """A ragged batch with an empty request; with `page`, keys in shuffled pages among pages of NaN."""
    parts = [random_rows(r, n, shape, dtype, seed) for seed, (r, n) in enumerate(zip(ROWS, KEYS, strict=True))]
    q, k, v, last_key = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    cu_rows, cu_keys = (torch.tensor([0, *torch.tensor(x).cumsum(0)], device=DEVICE) for x in (ROWS, KEYS))
    out = torch.full_like(q, float("nan"))
    if page is None:
        attention_kernels.recompute_attention_ragged(
            q, k, v, last_key, cu_rows, cu_keys, out=out, num_splits=num_splits
        )
    else:
        caches, table = paged(k, v, cu_keys.tolist(), page)
        attention_kernels.recompute_attention_paged(
            q, *caches, last_key, cu_rows.int(), table, out=out, num_splits=num_splits
        )
    exact = attention_ref.recompute_attention_ragged(q.float(), k.float(), v.float(), last_key, cu_rows, cu_keys)
    plain = [plain_attention(*part[:3], causal(part[3], part[1].shape[0])) for part in parts]
    assert_as_accurate(out, torch.cat(plain), exact, atol=1e-5)


def paged(k: torch.Tensor, v: torch.Tensor, cu_keys: list[int], page: int):
    """((k_cache, v_cache), block table [B, max_blocks]) of a ragged batch."""
    lengths = [b - a for a, b in zip(cu_keys, cu_keys[1:], strict=False)]
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 5, generator=torch.Generator().manual_seed(0)).to(k.device)
    caches = torch.full((2, len(order), page, *k.shape[1:]), float("nan"), dtype=k.dtype, device=k.device)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=k.device)
    for request, (start, n, count) in enumerate(zip(cu_keys, lengths, counts, strict=False)):
        pages, order = order[:count], order[count:]
        table[request, :count] = pages
        at = torch.arange(n, device=k.device)
        for cache, x in zip(caches, (k, v), strict=True):
            cache[pages[at // page], at % page] = x[start : start + n]
    return tuple(caches), table


def check_score(shape: Shape, dtype: torch.dtype, reduce: str, as_list: bool, num_keys: int = 2300) -> None:
    num_layers, num_rows = 3, 50
    layers = [random_rows(num_rows, num_keys, shape, dtype, seed) for seed in range(num_layers)]
    q, k = (torch.stack([layer[i] for layer in layers]) for i in (0, 1))
    last_key = torch.arange(num_keys - num_rows, num_keys, device=DEVICE)
    context = (17, num_keys - num_rows)
    actual = score_kernels.score(q, list(k) if as_list else k, last_key, context, reduce)
    exact = score_ref.score(q.float(), k.float(), last_key, context, reduce)
    plain = torch.stack([plain_score(*layer[:2], causal(last_key, num_keys), context, reduce) for layer in layers])
    assert_as_accurate(actual, plain, exact, atol=1e-6)


def plain_score(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, context: tuple[int, int], reduce: str):
    """The whole matrix of one layer, logits and probabilities in the inputs' dtype: [N]."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("thd,shd->hts", q * q.shape[-1] ** -0.5, keys)
    probs = logits.masked_fill(~visible, float("-inf")).softmax(-1)[..., slice(*context)]
    return probs.amax((0, 1)) if reduce == "max" else probs.float().mean((0, 1))


def check_place(shape: Shape, dtype: torch.dtype, num_rows: int) -> None:
    _, k, v, _ = random_rows(1, num_rows, shape, dtype)
    generator = torch.Generator(DEVICE).manual_seed(1)
    angles = torch.rand(num_rows, shape.dim // 2, generator=generator, device=DEVICE) * 1000
    rows = torch.randperm(num_rows, generator=generator, device=DEVICE)
    slots = torch.randperm(num_rows + 100, generator=generator, device=DEVICE)[:num_rows]
    k_out, v_out = (torch.full((num_rows + 100, *k.shape[1:]), float("nan"), dtype=dtype, device=DEVICE) for _ in "kv")
    place_kernels.place_kv(k, v, angles.cos(), angles.sin(), slots, k_out, v_out, rows)
    exact = place_ref.rotate(k[rows].float(), angles.cos(), angles.sin())
    assert_as_accurate(k_out[slots], place_ref.rotate(k[rows], angles.cos(), angles.sin()), exact, atol=1e-5)
    if not torch.equal(v_out[slots], v[rows]):
        raise AssertionError("values are moved, not computed, and must be equal bit by bit")
    written = torch.zeros(num_rows + 100, dtype=torch.bool, device=DEVICE)
    written[slots] = True
    if not k_out[~written].isnan().all() or not v_out[~written].isnan().all():
        raise AssertionError("a slot that was not named has been written")


def check_large_offsets() -> None:
    """Slots and pages whose element offsets pass 2^31: 32-bit arithmetic would read and write elsewhere (10 GB)."""
    shape, dtype, page = SHAPES["qwen3_8b"], torch.bfloat16, 16
    num_blocks = 2**31 // (page * shape.heads_kv * shape.dim) + 64
    caches = [torch.zeros(num_blocks, page, shape.heads_kv, shape.dim, dtype=dtype, device=DEVICE) for _ in "kv"]
    q, k, v, last_key = random_rows(64, 512, shape, dtype)
    table = torch.arange(num_blocks - 512 // page, num_blocks, device=DEVICE, dtype=torch.int32)[None]
    slots = table[0].long().repeat_interleave(page) * page + torch.arange(page, device=DEVICE).repeat(512 // page)
    ones = torch.ones(512, shape.dim // 2, device=DEVICE)
    place_kernels.place_kv(k, v, ones, torch.zeros_like(ones), slots, *(cache.flatten(0, 1) for cache in caches))
    cu_rows = torch.tensor([0, 64], device=DEVICE)
    actual = attention_kernels.recompute_attention_paged(q, *caches, last_key, cu_rows, table)
    exact = attention_ref.recompute_attention(q.float(), k.float(), v.float(), last_key)
    assert_as_accurate(actual, plain_attention(q, k, v, causal(last_key, 512)), exact, atol=1e-5)


def attention_cases() -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {}
    bf16 = torch.bfloat16
    for name, shape in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float16):
            for rows, keys in ((1, 1), (1, 129), (63, 2300), (129, 129), (1024, 2300)):
                cases[f"attention {name} {dtype} {rows}x{keys}"] = (
                    lambda s=shape, t=dtype, r=rows, n=keys: check_attention(s, t, r, n)
                )
    for name in ("qwen3_8b", "smollm2"):
        shape = SHAPES[name]
        cases |= {
            f"attention {name} float32": lambda s=shape: check_attention(s, torch.float32, 129, 600),
            f"attention {name} window": lambda s=shape: check_attention(s, bf16, 300, 2300, window=500),
            f"attention {name} five splits": lambda s=shape: check_attention(s, bf16, 300, 2300, num_splits=5),
            f"attention {name} ragged": lambda s=shape: check_batch(s, bf16, None),
            f"attention {name} paged": lambda s=shape: check_batch(s, bf16, 16, num_splits=1),
            f"attention {name} paged, split": lambda s=shape: check_batch(s, bf16, 16, num_splits=3),
            f"attention {name} large pages": lambda s=shape: check_batch(s, bf16, 256),
        }
    if torch.cuda.get_device_properties(0).total_memory > 16e9:
        cases["attention large offsets"] = check_large_offsets
    return cases


def score_cases() -> dict[str, Callable[[], None]]:
    return {
        f"score {name} {reduce} {'list' if as_list else 'stacked'}": (
            lambda s=shape, r=reduce, a=as_list: check_score(s, torch.bfloat16, r, a)
        )
        for name, shape in SHAPES.items() for reduce in ("max", "mean") for as_list in (False, True)
    }  # fmt: skip


def place_cases() -> dict[str, Callable[[], None]]:
    return {
        f"place_kv {name} {rows}": lambda s=shape, n=rows: check_place(s, torch.bfloat16, n)
        for name, shape in SHAPES.items() for rows in (1, 63, 5000)
    }  # fmt: skip
