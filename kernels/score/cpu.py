"""CPU `score`: one kv head group at a time as matrix products into a bounded block, softmax in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BLOCK_ELEMENTS = 1 << 22
"""Logits held at once (16 MiB of float32), unless a single row has more."""


def score(
    q: torch.Tensor,
    k: torch.Tensor | Sequence[torch.Tensor],
    q_last_key: torch.Tensor,
    context: tuple[int, int],
    reduce: str = "max",
    scale: float | None = None,
) -> torch.Tensor:
    """Shapes as in the public op."""
    num_layers, num_rows, num_heads, head_dim = q.shape
    start, stop = context
    result = torch.zeros(num_layers, stop - start)
    first, last = (int(x) for x in q_last_key.aminmax())
    seen = max(start, min(stop, last + 1))
    step = max(1, _BLOCK_ELEMENTS // (num_heads * (last + 1)))
    scaled = q.float() * (head_dim**-0.5 if scale is None else scale)
    hidden = torch.arange(first + 1, last + 1) > q_last_key[:, None]
    for layer in range(num_layers):
        for rows in torch.arange(num_rows).split(step):
            block = slice(int(rows[0]), int(rows[-1]) + 1)
            probs = _probabilities(scaled[layer, block], k[layer][: last + 1], hidden[block])[..., start:seen]
            if reduce == "max":
                torch.maximum(result[layer, : seen - start], probs.amax((0, 1)), out=result[layer, : seen - start])
            else:
                result[layer, : seen - start] += probs.sum((0, 1))
    return result if reduce == "max" else result.div_(num_rows * num_heads)


def _probabilities(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """q: [T, Hq, D] scaled float32; k: [S, Hkv, D]; hidden: [T, n], of the last n keys. Returns [Hkv, G T, S]."""
    num_kv_heads, num_rows = k.shape[1], q.shape[0]
    packed = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    logits = torch.bmm(packed, k.float().permute(1, 2, 0))
    if hidden.shape[1]:
        tail = logits.unflatten(1, (-1, num_rows))[..., -hidden.shape[1] :]
        tail.masked_fill_(hidden, float("-inf"))
    return torch.softmax(logits, -1, out=logits)
