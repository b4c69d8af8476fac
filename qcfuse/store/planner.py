"""What to read, in which order, each byte at most once per request (design: reading).

Pure bookkeeping over block masks: no file is opened and no clock is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qcfuse.store.context import ContextRows


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a selector reads before P is known: the leading (anchor) rows of K and V of anchor_layers, all K rows of
    key_layers. Layer 0 is computed, never read."""

    anchor_layers: tuple[int, ...]
    key_layers: tuple[int, ...]

    @classmethod
    def scoring(cls, layers: Sequence[int]) -> Needs:
        """Scoring `layers`: the probe attends in the layers below the deepest one, whose query states need no more."""
        return cls(anchor_layers=tuple(range(1, max(layers, default=0))),
                   key_layers=tuple(sorted(layer for layer in set(layers) if layer > 0)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One wait of the pipeline: reads of one layer, in order.

    phase: view (what the probe attends to), keys (what is scored), rest or speculate.
    runs: [R, 3] int64 (part, first block, end block), each within one chunk.
    requested_bytes: what is wanted, in whole blocks; fill_bytes: gaps that are read through.
    """

    phase: str
    layer: int
    runs: np.ndarray
    requested_bytes: int
    fill_bytes: int


def runs_of(mask: np.ndarray, block_chunk: np.ndarray) -> np.ndarray:
    """Maximal runs of a bool [2, num_blocks] mask that stay within a part and a chunk, as [R, 3] rows."""
    chunk_starts = np.ones_like(block_chunk, dtype=bool)
    chunk_starts[1:] = block_chunk[1:] != block_chunk[:-1]
    before = np.zeros_like(mask)
    before[:, 1:] = mask[:, :-1]
    after = np.zeros_like(mask)
    after[:, :-1] = mask[:, 1:] & ~chunk_starts[1:]
    part, first = np.nonzero(mask & (~before | chunk_starts))
    end = np.nonzero(mask & ~after)[1] + 1
    return np.stack([part, first, end], axis=1)


def coalesce(runs: np.ndarray, gap: int, block_chunk: np.ndarray, closed: np.ndarray) -> np.ndarray:
    """Joins neighbours of one part and chunk that lie fewer than `gap` blocks apart, unless a block between them is
    closed (bool [2, num_blocks]: read before, and no byte is read twice)."""
    if gap < 2 or len(runs) < 2:
        return runs
    left, right = runs[:-1], runs[1:]
    closed_before = np.cumsum(np.pad(closed, ((0, 0), (1, 0))), axis=1)
    joins = (left[:, 0] == right[:, 0]) & (block_chunk[left[:, 1]] == block_chunk[right[:, 1]])
    joins &= right[:, 1] - left[:, 2] < gap
    joins &= closed_before[left[:, 0], left[:, 2]] == closed_before[left[:, 0], np.maximum(right[:, 1], left[:, 2])]
    firsts = np.concatenate([[True], ~joins])
    lasts = np.concatenate([~joins, [True]])
    return np.column_stack([runs[firsts, 0], runs[firsts, 1], runs[lasts, 2]])


class ReadPlan:
    """The reads of one request. gap, in blocks, is a setting of the storage; it grows with latency x bandwidth.

    Steps of `select` and `rest` are decided when they are made; a speculative step counts once it is committed.
    Layers whose decisions so far were the same share them: planning costs once what differs, not once a layer.
    """

    def __init__(self, rows: ContextRows, *, gap: int) -> None:
        if gap < 0:
            raise ValueError(f"gap={gap} blocks; 0 reads only what is wanted, larger values read through gaps")
        self.rows = rows
        self.gap = gap
        self._row_bytes = rows.geometry.row_bytes
        self._upto_bytes = np.concatenate([[0], np.cumsum(rows.block_rows * self._row_bytes)])
        # A state is a set of blocks that has been planned; layers point at theirs.
        self._covered = [np.zeros((2, rows.num_blocks), bool)]
        self._state = [0] * rows.geometry.num_layers
        self._memo: dict[tuple[int, object], tuple[Step, int]] = {}
        self._speculated: dict[int, np.ndarray] = {}
        self._requested = dict.fromkeys(("view", "keys", "rest", "speculate"), 0)
        self._fill_bytes = 0
        self._wanted: list[np.ndarray] = []

    def select(self, needs: Needs, num_anchors: Sequence[int]) -> list[Step]:
        """Phase 1, layer by layer as the probe goes. num_anchors: rows of each distinct chunk that the probe sees."""
        anchors = self.rows.leading_rows(num_anchors)
        everything, nothing = np.ones(self.rows.num_rows, bool), np.zeros(self.rows.num_rows, bool)
        steps = [self._decide("view", layer, "view", lambda: (anchors, anchors)) for layer in needs.anchor_layers]
        steps += [self._decide("keys", layer, "keys", lambda: (everything, nothing)) for layer in needs.key_layers]
        return [step for step in steps if len(step.runs)]

    def rest(self, layer: int, wanted: np.ndarray) -> Step:
        """Phase 2 of one layer: the rows of the wanted context tokens (bool [N], for most methods all but P).

        Give the same array for layers that want the same; it must not change afterwards.
        """
        if not any(wanted is known for known in self._wanted):
            self._wanted.append(wanted)  # keeps its id its own
        key = (id(wanted), layer if self.rows.has_layer_orders else 0)

        def rows() -> tuple[np.ndarray, np.ndarray]:
            return (self.rows.rows_for(wanted, layer),) * 2

        return self._decide("rest", layer, key, rows)

    def speculate(self, share: float, unit_bytes: int) -> Iterator[Step]:
        """Reads for a link that would idle while P is unknown: layer by layer, lowest anchor ranks first.

        share: how much of each chunk to take, from its low end; unit_bytes: size of a step, which is run or dropped
        as a whole. Commit a step when it runs.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share} of each chunk; give a value from 0 to 1")
        blocks = self._blocks(self.rows.trailing_rows(share))
        units: dict[int, list[Step]] = {}
        for layer in range(1, self.rows.geometry.num_layers):
            state = self._state[layer]
            if state not in units:
                units[state] = [self._step("speculate", layer, runs, self._run_bytes(runs))
                                for runs in self._units(blocks, self._covered[state], unit_bytes)]  # fmt: skip
            for unit in units[state]:
                if self._state[layer] == state or not self._is_covered(layer, unit.runs):
                    yield replace(unit, layer=layer)

    def commit(self, step: Step) -> None:
        """A speculative step runs: its blocks are not read again."""
        assert step.phase == "speculate"
        blocks = self._mask(step.runs)
        self._state[step.layer] = self._after(self._state[step.layer], blocks)
        self._count(step)
        self._speculated[step.layer] = self._speculated.get(step.layer, False) | blocks

    def wasted_bytes(self, recomputed: np.ndarray, layer: int) -> int:
        """Speculated bytes of a layer that served nobody: no token outside `recomputed` (bool [N]) uses them."""
        if layer not in self._speculated:
            return 0
        used = self.rows.rows_for(~recomputed, layer)
        exists = self.rows.rows_for(np.ones_like(recomputed), layer)
        per_block = (exists & ~used).reshape(self.rows.num_blocks, -1).sum(1)
        return int((self._speculated[layer] * per_block).sum()) * self._row_bytes

    def bytes(self) -> dict[str, int]:
        """total_kv (context, all L layers, as the record wants it), before_recompute, requested, fill."""
        before = self._requested["view"] + self._requested["keys"] + self._requested["speculate"]
        return {"total_kv": self.rows.geometry.kv_bytes(self.rows.num_context_tokens), "before_recompute": before,
                "requested": before + self._requested["rest"], "fill": self._fill_bytes}

    def _blocks(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(self.rows.num_blocks, self.rows.rows_per_block).any(1) & (self.rows.block_rows > 0)

    def _units(self, blocks: np.ndarray, covered: np.ndarray, unit_bytes: int) -> Iterator[np.ndarray]:
        """Runs of at most unit_bytes together, the end of every chunk first."""
        runs = runs_of(np.stack([blocks, blocks]) & ~covered, self.rows.block_chunk)
        size = max(1, unit_bytes // (self.rows.rows_per_block * self._row_bytes))
        pieces = [
            (part, max(first, stop - size), stop)
            for part, first, end in sorted(runs.tolist(), key=lambda run: (-run[2], run[0]))
            for stop in range(end, first, -size)
        ]
        unit: list[tuple[int, int, int]] = []
        for piece in pieces:
            if unit and sum(end - first for _, first, end in [*unit, piece]) > size:
                yield np.array(sorted(unit))
                unit = []
            unit.append(piece)
        if unit:
            yield np.array(sorted(unit))

    def _decide(
        self, phase: str, layer: int, key: object, rows: Callable[[], tuple[np.ndarray, np.ndarray]]
    ) -> Step:
        """key: equal for equal rows (k, v: bool [num_rows]) of a phase."""
        memo = (self._state[layer], (phase, key))
        if memo not in self._memo:
            closed = self._covered[self._state[layer]]
            wanted = np.stack([self._blocks(part) for part in rows()]) & ~closed
            exact = runs_of(wanted, self.rows.block_chunk)
            runs = coalesce(exact, self.gap, self.rows.block_chunk, closed)
            step = self._step(phase, layer, runs, self._run_bytes(exact))
            self._memo[memo] = (step, self._after(self._state[layer], self._mask(runs)))
        step, self._state[layer] = self._memo[memo]
        self._count(step)
        return step if step.layer == layer else replace(step, layer=layer)

    def _step(self, phase: str, layer: int, runs: np.ndarray, requested_bytes: int) -> Step:
        return Step(phase=phase, layer=layer, runs=runs, requested_bytes=requested_bytes,
                    fill_bytes=self._run_bytes(runs) - requested_bytes)

    def _run_bytes(self, runs: np.ndarray) -> int:
        return int((self._upto_bytes[runs[:, 2]] - self._upto_bytes[runs[:, 1]]).sum())

    def _mask(self, runs: np.ndarray) -> np.ndarray:
        """bool [2, num_blocks] of runs."""
        edges = np.zeros((2, self.rows.num_blocks + 1), np.int32)
        np.add.at(edges, (runs[:, 0], runs[:, 1]), 1)
        np.add.at(edges, (runs[:, 0], runs[:, 2]), -1)
        return np.cumsum(edges, axis=1)[:, :-1] > 0

    def _is_covered(self, layer: int, runs: np.ndarray) -> bool:
        return bool((self._covered[self._state[layer]] & self._mask(runs)).any())

    def _after(self, state: int, blocks: np.ndarray) -> int:
        """The state that follows when these blocks are planned as well."""
        assert not (blocks & self._covered[state]).any(), "a block would be read twice"
        if not blocks.any():
            return state
        self._covered.append(self._covered[state] | blocks)
        return len(self._covered) - 1

    def _count(self, step: Step) -> None:
        self._requested[step.phase] += step.requested_bytes
        self._fill_bytes += step.fill_bytes
