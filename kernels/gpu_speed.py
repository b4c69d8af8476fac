"""Speed of the Triton ops on a CUDA device beside torch doing the same work; `python -m kernels.gpu_check` runs it.

Rates are TFLOP/s or GB/s, and a share of what a large matrix product and a large copy reach on the same card.
Shapes: Qwen3-8B, bf16, N = 10,240 context tokens, a question of 50 within a suffix of 100.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, HEADS_KV, DIM = 32, 8, 128
NUM_CONTEXT_TOKENS, NUM_SUFFIX_TOKENS, NUM_QUESTION_TOKENS = 10240, 100, 50
PAGE = 16
NUM_KEYS = NUM_CONTEXT_TOKENS + NUM_SUFFIX_TOKENS
RHOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)
DENSE_SHARE_TARGET = 0.8
"""recompute_attention's TFLOP/s over FlashAttention's on dense causal work of the same FLOPs."""


def median_ms(launch: Callable[[], Any]) -> dict[str, float]:
    """Warmed up, the cache cleared before every repetition."""
    from triton.testing import do_bench

    median, p20, p80 = do_bench(launch, warmup=50, rep=200, quantiles=[0.5, 0.2, 0.8])
    return {"median_ms": median, "p20_ms": p20, "p80_ms": p80}


def timed(
    launch: Callable[[], Any], *, ceilings: dict[str, float], flops: float = 0, num_bytes: float = 0
) -> dict[str, Any]:
    """Times an arm; its rate and its share of the ceiling. An arm that torch refuses is recorded as its error."""
    try:
        entry: dict[str, Any] = median_ms(launch)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        torch.cuda.empty_cache()
        return {"error": str(error).splitlines()[0]}
    if flops:
        entry["tflop_per_s"] = flops / entry["median_ms"] / 1e9
        entry["share_of_matmul_frac"] = entry["tflop_per_s"] / ceilings["matmul_tflop_per_s"]
    if num_bytes:
        entry["gb_per_s"] = num_bytes / entry["median_ms"] / 1e6
        entry["share_of_copy_frac"] = entry["gb_per_s"] / ceilings["copy_gb_per_s"]
    return entry


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def measure_ceilings() -> dict[str, float]:
    """What this card reaches: a bf16 product of 8,192^3 and a copy of 1 GB (read and written)."""
    size = 8192
    a, b = normal(size, size), normal(size, size)
    source = torch.zeros(10**9, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {
        "matmul_tflop_per_s": 2 * size**3 / median_ms(lambda: a @ b)["median_ms"] / 1e9,
        "copy_gb_per_s": 2 * source.numel() / median_ms(lambda: target.copy_(source))["median_ms"] / 1e6,
    }


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> Callable[[], torch.Tensor]:
    """FlashAttention through SDPA; q, k, v [rows, heads, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))

    def launch() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    return launch


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last_key: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The same rows in torch: SDPA with a boolean mask, K and V repeated over the group beforehand (not timed)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    mask = torch.arange(k.shape[2], device=q.device) <= last_key[:, None]
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def selected_rows(rho: float) -> torch.Tensor:
    """Last visible keys of a fused prefill: floor(rho * N) context rows at random, then the whole suffix."""
    count = int(rho * NUM_CONTEXT_TOKENS)
    generator = torch.Generator("cuda").manual_seed(0)
    chosen = torch.randperm(NUM_CONTEXT_TOKENS, generator=generator, device="cuda")[:count].sort().values
    return torch.cat((chosen, torch.arange(NUM_CONTEXT_TOKENS, NUM_KEYS, device="cuda")))


def measure_attention(ceilings: dict[str, float]) -> dict[str, Any]:
    """Per rho: ours over contiguous and paged keys, FlashAttention on dense causal work of as many FLOPs, a mask."""
    k, v = (normal(NUM_KEYS // PAGE * PAGE + PAGE, HEADS_KV, DIM) for _ in "kv")
    order = torch.randperm(k.shape[0] // PAGE, device="cuda")
    caches = [x.view(-1, PAGE, HEADS_KV, DIM)[order].contiguous() for x in (k, v)]
    table = order.argsort().int()[None]
    return {f"rho={rho}": attention_arms(selected_rows(rho), k, v, caches, table, ceilings) for rho in RHOS}


def attention_arms(
    last_key: torch.Tensor, k: torch.Tensor, v: torch.Tensor, caches: list[torch.Tensor], table: torch.Tensor,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    """The arms of one selection; k and v lie in `caches` too, page by page as `table` says."""
    from kernels.recompute_attention.kernel import recompute_attention, recompute_attention_paged

    q = normal(last_key.shape[0], HEADS, DIM)
    cu_rows = torch.tensor([0, q.shape[0]], device="cuda", dtype=torch.int32)
    pairs = int((last_key + 1).sum())
    # T (T + 1) / 2 pairs of a dense causal prefill.
    dense_rows = round((math.sqrt(1 + 8 * pairs) - 1) / 2)
    dense = [normal(dense_rows, heads, DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]
    work = {
        "contiguous": (pairs, lambda: recompute_attention(q, k, v, last_key)),
        "paged": (pairs, lambda: recompute_attention_paged(q, *caches, last_key, cu_rows, table)),
        "flash_dense_causal": (dense_rows * (dense_rows + 1) // 2, flash(*dense, is_causal=True)),
        "sdpa_boolean_mask": (pairs, masked(q, k[:NUM_KEYS], v[:NUM_KEYS], last_key)),
    }  # fmt: skip
    arms = {
        name: timed(launch, flops=4 * HEADS * DIM * count, ceilings=ceilings) for name, (count, launch) in work.items()
    }
    entry: dict[str, Any] = {"num_rows": q.shape[0], "dense_rows": dense_rows, "arms": arms}
    if "tflop_per_s" in arms["flash_dense_causal"] and "tflop_per_s" in arms["contiguous"]:
        share = arms["contiguous"]["tflop_per_s"] / arms["flash_dense_causal"]["tflop_per_s"]
        entry |= {"share_of_flash_frac": share, "meets_target": share >= DENSE_SHARE_TARGET}
    torch.cuda.empty_cache()
    return entry


def measure_score(ceilings: dict[str, float]) -> dict[str, Any]:
    """FLOPs of one Q K^T a layer for every arm (ours computes it twice); full attention of the rows beside it."""
    return {f"layers={count}": score_arms(count, ceilings) for count in (1, 3, 36)}


def score_arms(num_layers: int, ceilings: dict[str, float]) -> dict[str, Any]:
    from kernels.score.kernel import score

    q = normal(num_layers, NUM_QUESTION_TOKENS, HEADS, DIM)
    k = [normal(NUM_KEYS, HEADS_KV, DIM) for _ in range(num_layers)]
    last_key = torch.arange(NUM_KEYS - NUM_QUESTION_TOKENS, NUM_KEYS, device="cuda")
    hidden = torch.arange(NUM_KEYS, device="cuda") > last_key[:, None]
    context = (0, NUM_CONTEXT_TOKENS)

    def whole_matrix() -> None:
        for layer_q, layer_k in zip(q, k, strict=True):
            grouped = layer_q.view(NUM_QUESTION_TOKENS, HEADS_KV, -1, DIM)
            logits = torch.einsum("tkgd,skd->kgts", grouped, layer_k).float() * DIM**-0.5
            logits.masked_fill(hidden, float("-inf")).softmax(-1)[..., : context[1]].amax((0, 1, 2))

    attention = [flash(layer_q, layer_k, layer_k, is_causal=False) for layer_q, layer_k in zip(q, k, strict=True)]
    arms = {
        "score_max": lambda: score(q, k, last_key, context, "max"),
        "score_mean": lambda: score(q, k, last_key, context, "mean"),
        "whole_matrix": whole_matrix,
        "flash_attention_of_the_rows": lambda: [launch() for launch in attention],
    }
    flops = 2 * num_layers * HEADS * DIM * int((last_key + 1).sum())
    num_bytes = num_layers * NUM_KEYS * HEADS_KV * DIM * 2
    return {
        "num_rows": NUM_QUESTION_TOKENS,
        "arms": {
            name: timed(launch, flops=flops, num_bytes=num_bytes, ceilings=ceilings) for name, launch in arms.items()
        },
    }


def measure_place(ceilings: dict[str, float]) -> dict[str, Any]:
    """One layer's context out of rank order to its slots; bytes: K and V read and written, the rotary tables read."""
    from kernels.place_kv.kernel import place_kv
    from kernels.place_kv.ref import place_kv as plain

    k, v = normal(NUM_CONTEXT_TOKENS, HEADS_KV, DIM), normal(NUM_CONTEXT_TOKENS, HEADS_KV, DIM)
    k_out, v_out = normal(NUM_KEYS, HEADS_KV, DIM), normal(NUM_KEYS, HEADS_KV, DIM)
    angles = torch.rand(NUM_CONTEXT_TOKENS, DIM // 2, device="cuda")
    rows, slots = torch.randperm(NUM_CONTEXT_TOKENS, device="cuda"), torch.randperm(NUM_KEYS, device="cuda")
    slots = slots[:NUM_CONTEXT_TOKENS]
    cos, sin = angles.cos(), angles.sin()
    num_bytes = 4 * k.numel() * k.element_size() + 2 * cos.numel() * cos.element_size()
    arguments = (k, v, cos, sin, slots, k_out, v_out, rows)
    return {
        "place_kv": timed(lambda: place_kv(*arguments), num_bytes=num_bytes, ceilings=ceilings),
        "plain_torch": timed(lambda: plain(*arguments), num_bytes=num_bytes, ceilings=ceilings),
    }
