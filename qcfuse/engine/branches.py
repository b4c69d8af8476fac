"""KV of several sequences of one prompt that share most rows: the stitched cache once, each one's own rows beside it.

Decoding is bound by reading KV. Arms of a sample differ in their recomputed rows and the suffix only, so the rest is
read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse.fusion.cache import KVCache


@dataclass(frozen=True, kw_only=True)
class Branch:
    """rows: [R] int64, the positions that a sequence sees in its own version. k, v: [L, Hkv, R, D], k rotated."""

    rows: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, cache: KVCache, rows: Tensor) -> Branch:
        """Copies the rows out of a fused cache, which may then be reused."""
        k, v = (x[:, rows].transpose(1, 2).contiguous() for x in (cache.k, cache.v))
        return cls(rows=rows, k=k, v=v)


@dataclass(kw_only=True)
class _Group:
    """Sequences with equally many own rows. index: [Cg] places in the batch. k, v: [L, Cg, Hkv, R + room, D]."""

    index: Tensor
    num_own: int
    k: Tensor
    v: Tensor


class Branches:
    """The batch that decodes. shared: [S] rows of one fused cache in which a sequence sees all that it does not own."""

    def __init__(self, shared: KVCache, num_shared: int, branches: Sequence[Branch], room: int) -> None:
        self.k = shared.k[:, :num_shared].transpose(1, 2).contiguous()
        self.v = shared.v[:, :num_shared].transpose(1, 2).contiguous()
        self.hidden = torch.zeros(len(branches), num_shared, dtype=torch.bool, device=self.k.device)
        for place, branch in enumerate(branches):
            self.hidden[place, branch.rows[branch.rows < num_shared]] = True
        lengths = [branch.rows.shape[0] for branch in branches]
        self.groups = [_grouped(branches, [i for i, n in enumerate(lengths) if n == length], room)
                       for length in dict.fromkeys(lengths)]  # fmt: skip

    @property
    def num_sequences(self) -> int:
        return self.hidden.shape[0]

    def keep(self, places: Sequence[int]) -> None:
        """Drops all sequences but these, which move up in order."""
        self.hidden = self.hidden[list(places)]
        moved = {old: new for new, old in enumerate(places)}
        kept = []
        for group in self.groups:
            stay = [i for i, old in enumerate(group.index.tolist()) if old in moved]
            if stay:
                index = torch.tensor([moved[int(group.index[i])] for i in stay], device=self.k.device)
                kept.append(_Group(index=index, num_own=group.num_own, k=group.k[:, stay], v=group.v[:, stay]))
        self.groups = kept

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, num_before: int) -> Tensor:
        """Appends new rows behind `num_before` earlier new ones and attends over everything up to each.

        q: [C, n, Hq, D]; k, v: [C, n, Hkv, D] (k rotated). Softmax in float32 over shared and own rows together.
        Returns [C, n, Hq, D].
        """
        num_seqs, num_new, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[2]
        packed = (q * head_dim**-0.5).unflatten(2, (num_kv_heads, -1)).permute(2, 0, 3, 1, 4)
        shared = torch.matmul(packed.flatten(1, 3), self.k[layer].transpose(1, 2)).unflatten(1, packed.shape[1:4])
        shared = shared.float().masked_fill_(self.hidden[:, None, None], -torch.inf)
        weights = torch.empty_like(shared)
        own_out = torch.empty_like(packed)
        for group in self.groups:
            end = group.num_own + num_before + num_new
            group.k[layer, :, :, end - num_new : end] = k[group.index].transpose(1, 2)
            group.v[layer, :, :, end - num_new : end] = v[group.index].transpose(1, 2)
            mine = packed[:, group.index].transpose(0, 1)
            own = torch.matmul(mine.flatten(2, 3), group.k[layer, :, :, :end].transpose(2, 3)).float()
            own = own.unflatten(2, mine.shape[2:4])
            if num_new > 1:
                later = torch.ones(num_new, num_new, dtype=torch.bool, device=q.device).triu_(1)
                own[..., end - num_new :].masked_fill_(later, -torch.inf)
            both = torch.cat([shared[:, group.index].transpose(0, 1), own], -1).softmax(-1).to(q.dtype)
            split = both.shape[-1] - end
            weights[:, group.index] = both[..., :split].transpose(0, 1).to(weights.dtype)
            out = torch.matmul(both[..., split:].flatten(2, 3), group.v[layer, :, :, :end])
            own_out[:, group.index] = out.unflatten(2, mine.shape[2:4]).transpose(0, 1)
        out = torch.matmul(weights.to(q.dtype).flatten(1, 3), self.v[layer]).unflatten(1, packed.shape[1:4])
        return (out + own_out).permute(1, 3, 0, 2, 4).reshape(num_seqs, num_new, num_heads, head_dim)


def _grouped(branches: Sequence[Branch], places: Sequence[int], room: int) -> _Group:
    num_own = branches[places[0]].rows.shape[0]
    num_layers, num_kv_heads, _, head_dim = branches[places[0]].k.shape
    shape = (num_layers, len(places), num_kv_heads, num_own + room, head_dim)
    k, v = branches[0].k.new_empty(shape), branches[0].k.new_empty(shape)
    for i, place in enumerate(places):
        k[:, i, :, :num_own], v[:, i, :, :num_own] = branches[place].k, branches[place].v
    return _Group(index=torch.tensor(places, device=k.device), num_own=num_own, k=k, v=v)
