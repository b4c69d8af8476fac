"""Greedy decoding of several fused caches of one prompt as a batch."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.place_kv import rotate
from qcfuse.decoder.base import Decoder


def extend(decoder: Decoder, ids: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Runs the same positions of C sequences over their caches; returns logits [C, n, vocab] float32.

    ids: [C, n] int64 at positions start..start+n-1. k, v: [L, C, S, Hkv, D], rows start.. are written in place.
    """
    num_seqs, num_new = ids.shape
    positions = torch.arange(start, start + num_new, device=ids.device)
    cos, sin = (table.repeat(num_seqs, 1) for table in decoder.rotary(positions))
    mask = _causal_mask(num_new, start, decoder.num_heads // decoder.num_kv_heads, ids.device)
    hidden = decoder.embed(ids.flatten())
    for layer in range(decoder.num_layers):
        q, k_new, v_new = decoder.project(layer, hidden)
        k[layer, :, start : start + num_new] = rotate(k_new, cos, sin).unflatten(0, (num_seqs, num_new))
        v[layer, :, start : start + num_new] = v_new.unflatten(0, (num_seqs, num_new))
        q = rotate(q, cos, sin).unflatten(0, (num_seqs, num_new))
        attn = _attend(q, k[layer, :, : start + num_new], v[layer, :, : start + num_new], mask)
        hidden = decoder.finish(layer, hidden, attn.flatten(0, 1))
    return decoder.logits(hidden).unflatten(0, (num_seqs, num_new))


def greedy(
    decoder: Decoder, first_logits: Tensor, k: Tensor, v: Tensor, start: int, max_new: int, stop_ids: Collection[int]
) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy continuation of C sequences. first_logits: [C, vocab]; k, v: [L, C, S, Hkv, D], S >= start + max_new - 1.

    Returns each sequence's ids (without the stop token) and, per step, the logits [C, vocab] that chose its token (as
    long as all sequences run). Sequences that stop are dropped from the batch once they are a fifth of it (dropping copies the caches).
    """
    outputs: list[list[int]] = [[] for _ in range(first_logits.shape[0])]
    running = list(range(len(outputs)))
    logits, steps, stops = first_logits, [], set(stop_ids)
    done: set[int] = set()
    for step in range(max_new):
        if len(running) == len(outputs):
            steps.append(logits)
        tokens = logits.argmax(-1)
        for index, token in zip(running, tokens.tolist(), strict=True):
            if index not in done:
                done.update([index] if token in stops else [])
                outputs[index].extend([] if token in stops else [token])
        if len(done) == len(outputs) or step == max_new - 1:
            break
        alive = [row for row, index in enumerate(running) if index not in done]
        if 5 * len(alive) <= 4 * len(running):
            k, v, tokens = k[:, alive], v[:, alive], tokens[alive]
            running = [running[row] for row in alive]
        logits = extend(decoder, tokens[:, None], k, v, start + step)[:, 0]
    return outputs, steps


def _causal_mask(num_new: int, start: int, group: int, device: torch.device) -> Tensor | None:
    """[group * n, start + n] bool for contiguous new rows; None for a single one, which sees everything."""
    if num_new == 1:
        return None
    keys = torch.arange(start + num_new, device=device)
    rows = torch.arange(start, start + num_new, device=device)
    return (keys[None] <= rows[:, None]).repeat(group, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [C, n, Hq, D], k, v [C, S, Hkv, D] -> [C, n, Hq, D]; the queries of a kv head are packed as rows."""
    num_seqs, num_new, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    packed = q.view(num_seqs, num_new, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(packed, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.unflatten(2, (-1, num_new)).permute(0, 3, 1, 2, 4).reshape(num_seqs, num_new, num_heads, head_dim)
