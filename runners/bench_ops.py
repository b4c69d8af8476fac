"""The `ops` benchmark: the three kernels against plain torch on the same work, in alternation, checked before timed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.place_kv import place_kv
from kernels.place_kv import ref as place_ref
from kernels.recompute_attention import recompute_attention
from kernels.score import ref as score_ref
from kernels.score import score

# The work that the speed target is stated for: one layer of SmolLM2-135M over a fused cache of 2,300 keys, recompute
# ratios of half, a tenth and all of it, and a question of 32 tokens.
_NUM_KEYS, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _NUM_QUESTION_TOKENS = 2300, 9, 3, 64, 32
_RATIOS = (0.1, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class _Arm:
    """run: the work, returns its result. flop: floating-point operations that it needs, masked ones not counted."""

    run: Callable[[], torch.Tensor]
    flop: float | None = None


def run_ops_bench(out_path: Path | str, repeats: int) -> dict[str, Any]:
    """Time each op `repeats` times and write the design's bench JSON to out_path (folders are made). Returns it.

    Raises ValueError where repeats is below 1, AssertionError where an op disagrees with plain torch.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}; give 1 or more")
    groups = [*map(_attention_arms, _RATIOS), _score_arms(), _place_arms()]
    for group in groups:
        expected, *others = (arm.run() for arm in group.values())
        for actual in others:
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    raw = {name: times for group in groups for name, times in _time(group, repeats).items()}
    arms = {name: arm for group in groups for name, arm in group.items()}
    result = {
        "name": "ops",
        "unit": "s",
        "n": repeats,
        "threads": torch.get_num_threads(),
        "context_tokens": _NUM_KEYS,
        "arms": {name: _summary(raw[name], arms[name].flop) for name in arms},
        "ratios": {
            f"{slow}/{fast}": float(np.median(raw[slow]) / np.median(raw[fast]))
            for group in groups
            for *slower, fast in [list(group)]
            for slow in slower
        },
    }
    path = Path(out_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _time(arms: dict[str, _Arm], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat; the arms take turns, so that a slow spell of the machine hits all of them."""
    raw: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm.run()
            raw[name].append(time.perf_counter() - start)
    return raw


def _summary(times: list[float], flop: float | None) -> dict[str, Any]:
    p20, median, p80 = (float(x) for x in np.percentile(times, [20, 50, 80]))
    rate = flop / median / 1e9 if flop else None
    return {"raw": times, "median": median, "p20": p20, "p80": p80, "gflop_per_s": rate}


def _attention_arms(ratio: float) -> dict[str, _Arm]:
    """Plain arms first, the op last: SDPA under a whole boolean mask, and causal SDPA where every row is recomputed."""
    generator = torch.Generator().manual_seed(0)
    num_rows = round(ratio * _NUM_KEYS)
    last_key = torch.randperm(_NUM_KEYS, generator=generator)[:num_rows].sort().values
    q = torch.randn(num_rows, _NUM_HEADS, _HEAD_DIM, generator=generator)
    k, v = torch.randn(2, _NUM_KEYS, _NUM_KV_HEADS, _HEAD_DIM, generator=generator)
    flop = 4.0 * _NUM_HEADS * _HEAD_DIM * int((last_key + 1).sum())

    def sdpa(**options: Any) -> torch.Tensor:
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(*heads, enable_gqa=True, **options)[0].transpose(0, 1)

    def full_mask() -> torch.Tensor:
        return sdpa(attn_mask=torch.arange(_NUM_KEYS) <= last_key[:, None])

    arms = {f"full_mask@{ratio}": _Arm(run=full_mask, flop=flop)}
    if ratio == 1.0:
        arms[f"causal@{ratio}"] = _Arm(run=lambda: sdpa(is_causal=True), flop=flop)
    arms[f"recompute_attention@{ratio}"] = _Arm(run=lambda: recompute_attention(q, k, v, last_key), flop=flop)
    return arms


def _score_arms() -> dict[str, _Arm]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, _NUM_QUESTION_TOKENS, _NUM_HEADS, _HEAD_DIM, generator=generator)
    k = torch.randn(1, _NUM_KEYS, _NUM_KV_HEADS, _HEAD_DIM, generator=generator)
    last_key = torch.arange(_NUM_KEYS - _NUM_QUESTION_TOKENS, _NUM_KEYS)
    context = (0, _NUM_KEYS - _NUM_QUESTION_TOKENS)
    flop = 2.0 * _NUM_HEADS * _HEAD_DIM * int((last_key + 1).sum())
    return {
        "plain_score": _Arm(run=lambda: score_ref.score(q, k, last_key, context), flop=flop),
        "score": _Arm(run=lambda: score(q, k, last_key, context), flop=flop),
    }


def _place_arms() -> dict[str, _Arm]:
    """All rows of a layer from anchor-rank order to request order."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, _NUM_KEYS, _NUM_KV_HEADS, _HEAD_DIM, generator=generator)
    angle = torch.rand(_NUM_KEYS, _HEAD_DIM // 2, generator=generator)
    cos, sin = angle.cos(), angle.sin()
    rows, slots = torch.randperm(_NUM_KEYS, generator=generator), torch.arange(_NUM_KEYS)

    def run(place: Callable[..., None]) -> torch.Tensor:
        out = torch.empty(2, _NUM_KEYS, _NUM_KV_HEADS, _HEAD_DIM)
        place(k, v, cos, sin, slots, out[0], out[1], rows)
        return out

    return {
        "plain_place_kv": _Arm(run=lambda: run(place_ref.place_kv)),
        "place_kv": _Arm(run=lambda: run(place_kv)),
    }
