"""Greedy decoding of several fused caches of one prompt as a batch."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from kernels.place_kv import rotate
from qcfuse.decoder.base import Decoder
from qcfuse.engine.branches import Branches


def extend(decoder: Decoder, ids: Tensor, caches: Branches, start: int, num_before: int = 0) -> Tensor:
    """Runs the same positions of C sequences; returns logits [C, n, vocab] float32.

    ids: [C, n] int64 at positions start + num_before and on, where start is the prompt's length. Their K and V go into
    the caches behind num_before earlier new rows; what stood there before is overwritten.
    """
    num_seqs, num_new = ids.shape
    first = start + num_before
    positions = torch.arange(first, first + num_new, device=ids.device)
    cos, sin = (table.repeat(num_seqs, 1) for table in decoder.rotary(positions))
    hidden = decoder.embed(ids.flatten())
    for layer in range(decoder.num_layers):
        q, k, v = decoder.project(layer, hidden)
        q, k, v = (x.unflatten(0, (num_seqs, num_new)) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        hidden = decoder.finish(layer, hidden, caches.attend(layer, q, k, v, num_before).flatten(0, 1))
    return decoder.logits(hidden).unflatten(0, (num_seqs, num_new))


def greedy(
    decoder: Decoder, first_logits: Tensor, caches: Branches, start: int, max_new: int, stop_ids: Collection[int]
) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy continuation of C sequences from first_logits [C, vocab]; the caches need room for max_new - 1 rows.

    Returns each sequence's ids (without the stop token) and, per step, the logits [C, vocab] that chose its token (as
    long as all sequences run). Sequences that stop are dropped once they are a fifth of the batch (dropping copies).
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
            caches.keep(alive)
            tokens, running = tokens[alive], [running[row] for row in alive]
        logits = extend(decoder, tokens[:, None], caches, start, step)[:, 0]
    return outputs, steps
