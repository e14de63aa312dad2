"""The search behind `passes.placement`: packings of one layer, and moves that make one lighter.

Slots are an array [ranks, slots] of experts, -1 where empty. Everything is deterministic: the same
counts give the same placement on every rank and machine.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_GRID = 24  # sizes of the largest piece that are tried
_MOST_MOVES = 400  # per start; the searches of the benchmark's table end below
_RECOUNTED_SLOTS = 3072  # slots packed anew, over all tries
_LESS = 1.0 - 1e-9  # a move must gain more than rounding


@dataclass(frozen=True)
class Problem:
    """One layer.

    Attributes:
        counts: load of each expert, float64 [experts], not all zero.
        ranks: ranks that share them.
        slots: experts that fit on a rank.
        budget: replicas of all experts together that may be placed.
    """

    counts: Array
    ranks: int
    slots: int
    budget: int

    @property
    def num_experts(self) -> int:
        """Logical experts."""
        return len(self.counts)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the slots."""
        return (self.ranks, self.slots)

    def loads(self, slots: Array) -> Array:
        """Load of each rank. Shapes: int [ranks, slots] -> float64 [ranks]."""
        counts = np.bincount(slots[slots >= 0], minlength=self.num_experts)
        return np.append(self.counts / np.maximum(counts, 1), 0.0)[slots].sum(axis=1)

    def floor(self, replicas: Array) -> float:
        """No placement is lighter: the mean, and the largest piece of the smallest pieces."""
        return max(float(self.counts.sum()) / self.ranks, float((self.counts / replicas).max()))


def replicate(problem: Problem) -> Array:
    """Replicas that make the largest piece smallest: the heaviest piece is cut again and again.

    Shapes: -> int64 [experts].
    """
    replicas = np.ones(problem.num_experts, np.int64)
    pieces = problem.counts.copy()
    for _ in range(problem.budget - problem.num_experts):
        e = int(np.argmax(pieces))
        if pieces[e] <= 0 or replicas[e] == problem.ranks:
            # A piece on every rank stays the largest: no cut helps any more.
            break
        replicas[e] += 1
        pieces[e] = problem.counts[e] / replicas[e]
    return replicas


def thresholds(problem: Problem, replicas: Array, limit: float) -> list[Array]:
    """The fewest replicas whose pieces stay below a size, for sizes up to ``limit``.

    Shapes: replicas int [experts] -> int [experts] each.
    """
    smallest = float((problem.counts / replicas).max())
    found: dict[bytes, Array] = {}
    for size in np.geomspace(smallest, max(limit, smallest), _GRID):
        wanted = np.ceil(problem.counts / size - 1e-9).astype(np.int64)
        wanted = np.clip(wanted, 1, problem.ranks)
        if wanted.sum() <= problem.budget:
            found.setdefault(wanted.tobytes(), wanted)
    return list(found.values())


def pack(problem: Problem, replicas: Array) -> Array:
    """Heaviest pieces first, each into the lightest rank with a free slot.

    Where fewer ranks are free than an expert has replicas, it gets that many.

    Shapes: int [experts] -> int64 [ranks, slots].
    """
    free = [(0.0, rank) for rank in range(problem.ranks)]
    rows: list[list[int]] = [[] for _ in range(problem.ranks)]
    order = np.argsort(-problem.counts / replicas, kind="stable").tolist()
    wanted, loads = replicas.tolist(), problem.counts.tolist()
    for expert in order:
        copies = min(wanted[expert], len(free))
        for load, rank in [heapq.heappop(free) for _ in range(copies)]:
            rows[rank].append(expert)
            if len(rows[rank]) < problem.slots:
                heapq.heappush(free, (load + loads[expert] / copies, rank))
    slots = np.full(problem.shape, -1, np.int64)
    for rank, row in enumerate(rows):
        slots[rank, : len(row)] = row
    return slots


def improve(problem: Problem, slots: Array, enough: float) -> tuple[float, Array]:
    """Lighten the heaviest rank, move by move, until none helps or the load is ``enough``.

    Each move leaves every rank that it touches lighter than the heaviest was.
    """
    state = _State(problem, slots)
    for _ in range(_MOST_MOVES):
        if state.top <= enough or not (state.swap() or state.add() or state.drop()):
            break
    return state.top, state.slots


def recount(problem: Problem, slots: Array, enough: float) -> tuple[float, Array]:
    """Give one expert a replica more, or one a replica less, or both; pack and improve anew.

    Small layers are searched longer: there one replica is much, and a packing is soon made.
    """
    load, best = float(problem.loads(slots).max()), slots
    tries = min(max(_RECOUNTED_SLOTS // slots.size, 8), 48)
    tried: set[bytes] = set()
    while tries > 0 and load > enough:
        held = np.bincount(best[best >= 0], minlength=problem.num_experts)
        fresh = [each for each in _neighbours(problem, held) if each.tobytes() not in tried]
        for replicas in fresh[:tries]:
            tries -= 1
            tried.add(replicas.tobytes())
            found = improve(problem, pack(problem, replicas), enough)
            if found[0] < load * _LESS:
                load, best = found
                break
        else:
            break
    return load, best


def _neighbours(problem: Problem, replicas: Array) -> list[Array]:
    """Counts that differ in one or two experts: more for large pieces, less where it adds least."""
    pieces = problem.counts / replicas
    grown = [e for e in np.argsort(-pieces, kind="stable") if replicas[e] < problem.ranks][:8]
    merged = np.where(replicas > 1, problem.counts / np.maximum(replicas - 1, 1), np.inf)
    shrunk = [e for e in np.argsort(merged, kind="stable") if replicas[e] > 1][:8]
    spare = problem.budget > replicas.sum()
    changes: list[tuple[tuple[int, int], ...]] = [((e, 1),) for e in grown if spare]
    for f in shrunk:
        changes.append(((f, -1),))
        changes += [((f, -1), (e, 1)) for e in grown if e != f]
    found: list[Array] = []
    for change in changes:
        changed = replicas.copy()
        for expert, by in change:
            changed[expert] += by
        found.append(changed)
    return found


class _State:
    """Slots while they are improved, with what moves ask of them."""

    def __init__(self, problem: Problem, slots: Array) -> None:
        self.problem = problem
        self.slots = slots.copy()
        self._refresh()

    @property
    def top(self) -> float:
        """Load of the heaviest rank."""
        return float(self.loads.max())

    def _refresh(self) -> None:
        counts, (ranks, _) = self.problem.counts, self.problem.shape
        held = self.slots[self.slots >= 0]
        self.replicas = np.bincount(held, minlength=len(counts))
        self.pieces = np.append(counts / self.replicas, 0.0)[self.slots]
        self.loads = self.pieces.sum(axis=1)
        # The last column is that of empty slots, which any rank may hold several of.
        self.held = np.zeros((ranks, len(counts) + 1), bool)
        self.held[np.arange(ranks)[:, None], self.slots] = True
        self.held[:, -1] = False

    def swap(self) -> bool:
        """Exchange an expert of the heaviest rank for one of another rank, or for a free slot."""
        a, top = int(np.argmax(self.loads)), self.top
        less = self.pieces[a][:, None, None] - self.pieces[None]
        after = np.maximum(top - less, self.loads[None, :, None] + less)
        after[self.held[:, self.slots[a]].T] = np.inf
        after[:, self.held[a][self.slots]] = np.inf
        after[:, a] = np.inf
        i, b, j = np.unravel_index(int(np.argmin(after)), after.shape)
        if not after[i, b, j] < top * _LESS:
            return False
        mine, other = self.slots[a, i], self.slots[b, j]
        self.slots[a, i], self.slots[b, j] = other, mine
        self.pieces[a, i], self.pieces[b, j] = self.pieces[b, j], self.pieces[a, i]
        self.held[a, mine] = self.held[b, other] = False
        self.held[a, other], self.held[b, mine] = True, True
        self.held[:, -1] = False
        for rank in (a, b):
            self.loads[rank] = self.pieces[rank].sum()
        return True

    def add(self) -> bool:
        """Put one more replica of an expert of the heaviest rank where another's replica is."""
        a, top, ranks = int(np.argmax(self.loads)), self.top, self.problem.ranks
        counts, replicas = self.problem.counts, self.replicas
        mine = np.unique(self.slots[a][self.slots[a] >= 0])
        mine = mine[replicas[mine] < ranks]
        if mine.size == 0:
            return False
        # Whoever else holds the expert that gives way gets its share.
        share = np.where(
            replicas > 1, counts / np.maximum(replicas - 1, 1) - counts / replicas, np.inf
        )
        holders = np.where(self.held[:, :-1], self.loads[:, None], 0.0).max(axis=0) + share
        spare = self.problem.budget > replicas.sum()
        yields = np.append(holders, 0.0 if spare else np.inf)[self.slots]
        added = (counts / (replicas + 1))[mine]
        relieved = top - (counts / replicas)[mine] + added
        after = self.loads[None, :, None] + added[:, None, None] - self.pieces[None]
        after = np.maximum(np.maximum(after, yields[None]), relieved[:, None, None])
        after[self.held[:, mine].T] = np.inf
        i, b, j = np.unravel_index(int(np.argmin(after)), after.shape)
        if not after[i, b, j] < top * _LESS:
            return False
        self.slots[b, j] = mine[i]
        self._refresh()
        return True

    def drop(self) -> bool:
        """Take a replica off the heaviest rank; the other holders carry its share."""
        a, top = int(np.argmax(self.loads)), self.top
        at = np.flatnonzero((self.slots[a] >= 0) & (self.replicas[self.slots[a]] > 1))
        if at.size == 0:
            return False
        mine = self.slots[a, at]
        others = np.where(self.held[:, mine], self.loads[:, None], 0.0)
        others[a] = 0.0
        count, have = self.problem.counts[mine], self.replicas[mine]
        after = others.max(axis=0) + count / (have - 1) - count / have
        after = np.maximum(after, top - count / have)
        i = int(np.argmin(after))
        if not after[i] < top * _LESS:
            return False
        self.slots[a, at[i]] = -1
        self._refresh()
        return True
