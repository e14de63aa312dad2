"""Placement of experts: which rank holds which expert, and which experts lie on several ranks.

Given how often each expert of a layer was chosen, the heaviest rank's load is made as small as the
slots allow. A replica carries its expert's load divided by the number of replicas; a rank holds at
most one replica of an expert. Where loads are equal to a thousandth, the placement whose weights
lie closest to where they were (the same rank, then the same group: socket, node) is taken.

`greedy` is the public method (replicate the heaviest, then pack heaviest first into the lightest
rank), written anew and kept to one replica a rank; `place` is never heavier than it.
`passes.placement_bounds` says how far from the optimum a placement can be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from metainfer.ir.errors import CapacityError, PlanError
from metainfer.passes.placement_search import (
    Problem,
    improve,
    pack,
    recount,
    replicate,
    thresholds,
)

Array = np.ndarray[Any, np.dtype[Any]]
EMPTY = -1  # a slot without an expert
_EQUAL = 1.001  # loads closer than this count as equal
_STARTS = 12  # packings that are improved


@dataclass(frozen=True)
class Placement:
    """Where the experts of one layer lie.

    Attributes:
        num_experts: logical experts.
        slots: expert of each slot, by rank; `EMPTY` for a slot without one.

    Raises: PlanError if an expert lies nowhere, or twice on a rank.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check the slots."""
        placed: set[int] = set()
        for rank, row in enumerate(self.slots):
            held = [e for e in row if e != EMPTY]
            if len(row) != len(self.slots[0]):
                raise PlanError(f"rank {rank} has {len(row)} slots, rank 0 {len(self.slots[0])}")
            if len(set(held)) != len(held):
                raise PlanError(f"rank {rank} holds an expert twice: {held}")
            placed.update(held)
        if placed != set(range(self.num_experts)):
            wrong = sorted(placed.symmetric_difference(range(self.num_experts)))
            raise PlanError(f"experts placed nowhere, or unknown: {wrong}")

    @property
    def num_ranks(self) -> int:
        """Ranks that hold experts."""
        return len(self.slots)

    @property
    def slots_per_rank(self) -> int:
        """Experts that fit on a rank."""
        return len(self.slots[0])

    def array(self) -> Array:
        """The slots. Shapes: -> int64 [ranks, slots]."""
        return np.array(self.slots, np.int64).reshape(self.num_ranks, self.slots_per_rank)

    def replicas(self) -> Array:
        """How many ranks hold each expert. Shapes: -> int64 [experts]."""
        held = self.array()
        return np.bincount(held[held != EMPTY], minlength=self.num_experts)

    def loads(self, counts: Array) -> Array:
        """Load of each rank. Shapes: counts [experts] -> float64 [ranks]."""
        pieces = np.append(np.asarray(counts, np.float64) / self.replicas(), 0.0)
        return pieces[self.array()].sum(axis=1)


@dataclass(frozen=True)
class Moves:
    """Weights that a placement wants elsewhere than another has them.

    Attributes:
        within: experts a rank must get from another rank of its group.
        across: experts a rank must get from another group.
    """

    within: int
    across: int


def in_order(num_experts: int, ranks: int, slots_per_rank: int) -> Placement:
    """Experts as the checkpoint numbers them, each rank a run of them, without replicas."""
    parts = np.array_split(np.arange(num_experts), ranks)
    rows = (part.tolist() + [EMPTY] * (slots_per_rank - len(part)) for part in parts)
    return Placement(num_experts, tuple(map(tuple, rows)))


def place(
    counts: Array,
    ranks: int,
    slots_per_rank: int,
    *,
    replicas: int | None = None,
    groups: Sequence[int] | None = None,
    before: Sequence[Placement] | None = None,
) -> tuple[Placement, ...]:
    """Place the experts of each layer so that the heaviest rank is as light as can be found.

    Args:
        counts: how often each expert was chosen.
        ranks: ranks that share the experts.
        slots_per_rank: experts that fit on one.
        replicas: copies allowed beside the first of each expert; None: as many as there are slots.
        groups: the group (socket, node) of each rank; None: all in one.
        before: where weights lie now, layer by layer; None: experts in order.

    Shapes: counts [layers, experts] or [experts].
    Raises: CapacityError if the experts do not fit; PlanError for counts that are none.
    """
    rows, budget = _checked(counts, ranks, slots_per_rank, replicas)
    group_of = np.zeros(ranks, np.int64) if groups is None else np.asarray(groups, np.int64)
    if group_of.shape != (ranks,):
        raise PlanError(f"{ranks} ranks are given {group_of.size} groups", advice="one for each")
    start = before or [in_order(rows.shape[1], ranks, slots_per_rank)] * len(rows)
    if len(start) != len(rows):
        raise PlanError(f"{len(rows)} layers are given {len(start)} placements to start from")
    return tuple(
        _place_layer(Problem(row, ranks, slots_per_rank, budget), group_of, old)
        for row, old in zip(rows, start, strict=True)
    )


def greedy(
    counts: Array, ranks: int, slots_per_rank: int, *, replicas: int | None = None
) -> tuple[Placement, ...]:
    """The public method: replicate the heaviest, pack heaviest first into the lightest rank.

    Shapes: counts [layers, experts] or [experts].
    Raises: as `place`.
    """
    rows, budget = _checked(counts, ranks, slots_per_rank, replicas)
    problems = (Problem(row, ranks, slots_per_rank, budget) for row in rows)
    return tuple(_placement(p, pack(p, replicate(p))) for p in problems)


def count_moves(before: Placement, after: Placement, groups: Sequence[int]) -> Moves:
    """Weights that must move to get from one placement to another."""
    group_of = np.asarray(groups, np.int64)
    old, new = _held(before), _held(after)
    near = _by_group(old, group_of)[group_of]
    across = int((new & ~near).sum())
    return Moves(int((new & ~old).sum()) - across, across)


def _checked(
    counts: Array, ranks: int, slots_per_rank: int, replicas: int | None
) -> tuple[Array, int]:
    """Counts as float64 [layers, experts], and how many copies of experts may be placed."""
    rows = np.atleast_2d(np.asarray(counts, np.float64))
    if rows.ndim != 2 or rows.size == 0 or not np.isfinite(rows).all() or (rows < 0).any():
        raise PlanError(
            f"counts of shape {list(np.shape(counts))} are none of experts",
            advice="give [experts] or [layers, experts], each a number of at least 0",
        )
    experts, room = rows.shape[1], ranks * slots_per_rank
    if ranks < 1 or experts > room:
        raise CapacityError(
            f"{experts} experts do not fit on {ranks} ranks of {slots_per_rank} slots",
            advice=f"give each rank {-(-experts // max(ranks, 1))} slots",
        )
    if replicas is not None and replicas < 0:
        raise PlanError(f"{replicas} replicas of experts", advice="give 0 for none")
    # Experts of a layer that was never reached are balanced by number.
    rows = np.where(rows.sum(axis=1, keepdims=True) > 0, rows, 1.0)
    return rows, room if replicas is None else min(room, experts + replicas)


def _place_layer(problem: Problem, group_of: Array, before: Placement) -> Placement:
    """The lightest of several starts, each improved; greedy's is among them."""
    counts = replicate(problem)
    first = pack(problem, counts)
    limit = float(problem.loads(first).max())
    enough = problem.floor(counts) * _EQUAL
    found: list[tuple[float, Array]] = [(limit, first)]
    for slots in (*_starts(problem, before), *_packed(problem, counts, limit, first)):
        found.append(improve(problem, slots, enough))
        # Starts come in order of promise; one that is as good as can be ends the search.
        if found[-1][0] <= min(enough, limit):
            break
    least, lightest = min(found, key=lambda pair: pair[0])
    if least > enough * _EQUAL:
        found.append(recount(problem, lightest, enough))
        least = min(least, found[-1][0])
    equal = [slots for load, slots in found if load <= min(least * _EQUAL, limit)]
    settled = [_settle(problem, slots, group_of, before) for slots in equal]
    return min(settled, key=lambda placed: _distance(before, placed, group_of))


def _starts(problem: Problem, before: Placement) -> list[Array]:
    """Where the weights lie now, if it obeys the problem's limits."""
    fits = before.num_experts == problem.num_experts and before.array().shape == problem.shape
    return [before.array()] if fits and before.replicas().sum() <= problem.budget else []


def _packed(problem: Problem, counts: Array, limit: float, first: Array) -> list[Array]:
    """Packings with several largest pieces, lightest first.

    The fewest pieces of a given size often pack better than the smallest pieces that can be had:
    two pieces of 0.7 of a rank's share fill two ranks, and the rest is too small to be of use.
    """
    packed = [first, *(pack(problem, each) for each in thresholds(problem, counts, limit))]
    return sorted(packed, key=lambda slots: float(problem.loads(slots).max()))[:_STARTS]


def _placement(problem: Problem, slots: Array) -> Placement:
    return Placement(problem.num_experts, tuple(map(tuple, slots.tolist())))


def _distance(before: Placement, after: Placement, group_of: Array) -> tuple[int, int]:
    if before.num_experts != after.num_experts or before.num_ranks != after.num_ranks:
        return (0, 0)
    moves = count_moves(before, after, group_of.tolist())
    return (moves.across, moves.within)


def _settle(problem: Problem, slots: Array, group_of: Array, before: Placement) -> Placement:
    """Number the ranks so that the fewest weights cross groups, then the fewest move at all.

    Ranks have equal room, so which bin goes to which rank changes no load.
    """
    if before.num_experts != problem.num_experts or before.num_ranks != problem.ranks:
        return _placement(problem, np.sort(slots, axis=1)[:, ::-1])
    new, old = _held(_placement(problem, slots)).astype(np.int64), _held(before)
    near = _by_group(old, group_of)[group_of]
    kept, kept_near = new @ old.T.astype(np.int64), new @ near.T.astype(np.int64)
    weight = slots.size + 1  # one weight across groups is worse than any number within
    cost = -(kept_near * weight + kept)
    bins, places = linear_sum_assignment(cost)
    ordered = np.empty_like(slots)
    ordered[places] = slots[bins]
    rows = (_in_place(row, old) for row, old in zip(ordered.tolist(), before.slots, strict=True))
    return Placement(problem.num_experts, tuple(rows))


def _in_place(row: list[int], before: Sequence[int]) -> tuple[int, ...]:
    """The experts of a rank, those it held already in the slots they had."""
    slots = [e if e in row else EMPTY for e in before][: len(row)]
    slots += [EMPTY] * (len(row) - len(slots))
    fresh = iter(sorted(set(row) - set(slots) - {EMPTY}))
    return tuple(next(fresh, EMPTY) if e == EMPTY else e for e in slots)


def _held(placement: Placement) -> Array:
    """Whether a rank holds an expert. Shapes: -> bool [ranks, experts]."""
    held = np.zeros((placement.num_ranks, placement.num_experts + 1), bool)
    held[np.arange(placement.num_ranks)[:, None], placement.array()] = True
    return held[:, :-1]


def _by_group(held: Array, group_of: Array) -> Array:
    """Whether a group holds an expert. Shapes: bool [ranks, experts] -> [groups, experts]."""
    groups = int(group_of.max()) + 1
    return np.array([held[group_of == g].any(axis=0) for g in range(groups)])
