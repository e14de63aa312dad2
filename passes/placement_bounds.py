"""Lower bounds on the heaviest rank of a placement: what no placement can be lighter than.

Three bounds, each proven by a finished argument, from cheap to dear:

1. `simple_bound`: the mean over ranks, the largest piece that replicas leave, and, without
   replicas, the heaviest expert beside the lightest that must share its rank.
2. `pattern_bound`: is a load L possible? A rank holds one pattern: a set of pieces (an expert, cut
   into k replicas) that fits its slots and weighs at most L. A linear program (HiGHS) covers all
   experts with the fewest patterns, of which the useful ones are found one by one by a knapsack
   over its duals. Needs it more patterns than there are ranks, L is impossible. A relaxation:
   ranks and cuts may be fractions, and pieces are rounded down to 1/400 of L.
3. `optimum`: the mixed-integer program of the whole, for small layers; proven if HiGHS ends in
   time.

Source: Gilmore & Gomory 1961 (patterns); Farley 1990 (bound from unfinished duals).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix

from metainfer.passes.placement_search import Array, Problem, replicate

_GRID = 400  # weights of pieces are counted in this fraction of the load in question
_DAMPING = 0.7  # part of the best duals so far in the next
_STEP = 8  # of weights from which further patterns are read
_TINY = 1e-9
Pattern = tuple[tuple[int, int], ...]  # (expert, replicas of it) on one rank


@dataclass(frozen=True)
class Bound:
    """A load below which no placement is.

    Attributes:
        load: of the heaviest rank, in the unit of the counts.
        kind: how it was found: "mean", "piece", "full", "patterns" or "optimum".
        proven: whether it is the load of the best placement, not only of a relaxation.
    """

    load: float
    kind: str
    proven: bool = False


def simple_bound(problem: Problem) -> Bound:
    """The largest of the bounds that need no search."""
    counts, ranks = problem.counts, problem.ranks
    found = [
        Bound(float(counts.sum()) / ranks, "mean"),
        Bound(float((counts / replicate(problem)).max()), "piece"),
    ]
    beside = problem.num_experts - (ranks - 1) * problem.slots - 1
    if problem.budget == problem.num_experts and beside > 0:
        found.append(Bound(float(counts.max() + np.sort(counts)[:beside].sum()), "full"))
    return max(found, key=lambda bound: bound.load)


def pattern_bound(
    problem: Problem,
    upper: float,
    seconds: float,
    *,
    known: Sequence[Array] = (),
    close: float = 1.005,
) -> Bound:
    """Narrow the interval between the simple bound and a load that is possible.

    Args:
        problem: the layer.
        upper: load of a placement.
        seconds: search no longer; the bound found so far holds.
        known: slots of placements, whose ranks are the first patterns.
        close: stop when the bound is this close to what the relaxation allows.
    """
    best, high, until = simple_bound(problem), upper, time.monotonic() + seconds
    # Where the placement is as good as can be, one answer settles it.
    load = upper / close
    pool = [pattern for slots in known for pattern in _patterns_of(problem, slots)]
    while high > best.load * close and time.monotonic() < until:
        possible = _Cover(problem, load, pool).possible(until)
        if possible is None:
            break
        if possible:
            high = load
        else:
            best = Bound(load, "patterns")
        load = math.sqrt(best.load * high)
    return best


def _patterns_of(problem: Problem, slots: Array) -> list[Pattern]:
    replicas = np.bincount(slots[slots >= 0], minlength=problem.num_experts)
    return [tuple((int(e), int(replicas[e])) for e in row if e >= 0) for row in slots]


class _Cover:
    """Whether patterns of at most ``load`` cover all experts with as many ranks as there are."""

    def __init__(self, problem: Problem, load: float, pool: Sequence[Pattern]) -> None:
        self._problem = problem
        self._cuts = [self._cuts_of(count / load) for count in problem.counts.tolist()]
        self._patterns: dict[Pattern, None] = {}
        if all(self._cuts):
            alone = [((e, min(cuts)),) for e, cuts in enumerate(self._cuts)]
            self._patterns = dict.fromkeys([*alone, *filter(self._fits, pool)])

    def _cuts_of(self, share: float) -> dict[int, int]:
        """Replicas of an expert -> weight of a piece; of equal weights the fewest replicas."""
        most = min(self._problem.ranks, self._problem.budget - self._problem.num_experts + 1)
        weights: dict[int, int] = {}
        for replicas in range(1, most + 1):
            if share / replicas <= 1 + _TINY:
                weight = math.floor(share / replicas * _GRID + _TINY)
                weights.setdefault(weight, replicas)
                if weight == 0:
                    break
        return {replicas: weight for weight, replicas in weights.items()}

    def _fits(self, pattern: Pattern) -> bool:
        if not all(k in self._cuts[e] for e, k in pattern):
            return False
        return sum(self._cuts[e][k] for e, k in pattern) <= _GRID

    def possible(self, until: float) -> bool | None:
        """The answer; None if time ran out."""
        if not all(self._cuts):
            return False
        ranks, steady, most = self._problem.ranks, None, 0.0
        while time.monotonic() < until:
            used, duals = self._cheapest()
            if used <= ranks + 1e-6:
                return True
            # Duals leap from program to program; steps from the best so far towards them find
            # patterns that last.
            asked = duals if steady is None else _DAMPING * steady + (1 - _DAMPING) * duals
            is_grown = False
            for prices in (asked, duals):
                best, patterns = self._most_valuable(prices)
                # Duals divided by the most valuable pattern's worth obey every pattern.
                least = (prices[:-1].sum() - prices[-1] * self._problem.budget) / max(best, 1.0)
                if least > ranks * (1 + 1e-7):
                    return False
                if least > most:
                    steady, most = prices / max(best, 1.0), least
                known = len(self._patterns)
                self._patterns.update(dict.fromkeys(patterns))
                is_grown = len(self._patterns) > known
                if is_grown:
                    break
            if not is_grown:
                return None
        return None

    def _cheapest(self) -> tuple[float, Array]:
        """Ranks that the known patterns need; what each expert, and last a placed piece, is worth.

        A piece more than the budget costs as much as all ranks, so that the program has a solution.
        """
        experts, number = self._problem.num_experts, len(self._patterns)
        rows, columns, values = [experts], [number], [-1.0]
        for column, pattern in enumerate(self._patterns):
            for expert, replicas in pattern:
                rows.append(expert)
                columns.append(column)
                values.append(-1.0 / replicas)
            rows.append(experts)
            columns.append(column)
            values.append(len(pattern))
        matrix = coo_matrix((values, (rows, columns)), shape=(experts + 1, number + 1))
        costs = np.append(np.ones(number), float(self._problem.ranks))
        limits = np.append(-np.ones(experts), float(self._problem.budget))
        found = linprog(costs, A_ub=matrix.tocsr(), b_ub=limits, method="highs")
        return float(found.fun), -found.ineqlin.marginals

    def _most_valuable(self, duals: Array) -> tuple[float, list[Pattern]]:
        """The knapsack: best sum of worths within slots and weight, and its pattern.

        Patterns of less weight that are worth more than a rank too: fewer programs to solve.
        """
        slots = self._problem.slots
        best = np.zeros((slots + 1, _GRID + 1))
        steps: list[tuple[int, Array]] = []
        for expert, cuts in enumerate(self._cuts):
            gains = [(k, w, duals[expert] / k - duals[-1]) for k, w in cuts.items()]
            gains = [gain for gain in gains if gain[2] > _TINY]
            if not gains:
                continue
            before, chosen = best, np.zeros(best.shape, np.int16)
            best = before.copy()
            for replicas, weight, gain in gains:
                tried = before[:-1, : _GRID + 1 - weight] + gain
                better = tried > best[1:, weight:] + 1e-12
                best[1:, weight:][better] = tried[better]
                chosen[1:, weight:][better] = replicas
            steps.append((expert, chosen))
        rooms = [room for room in range(_GRID, 0, -_STEP) if best[slots, room] > 1 + 1e-6]
        traced = [self._trace(steps, room) for room in rooms or [_GRID]]
        return float(best[slots, _GRID]), traced

    def _trace(self, steps: Sequence[tuple[int, Array]], room: int) -> Pattern:
        slots, pattern = self._problem.slots, []
        for expert, chosen in reversed(steps):
            replicas = int(chosen[slots, room])
            if replicas:
                pattern.append((expert, replicas))
                slots, room = slots - 1, room - self._cuts[expert][replicas]
        return tuple(pattern)


def optimum(problem: Problem, seconds: float) -> Bound:
    """The best load by a mixed-integer program, or the bound that HiGHS reached in time.

    Variables: on[e,k,r], expert e is cut in k and rank r holds a piece; cut[e,k]; the load.
    """
    experts, ranks = problem.num_experts, problem.ranks
    most = min(ranks, problem.budget - experts + 1)
    on = np.arange(experts * most * ranks).reshape(experts, most, ranks)
    cut = on.size + np.arange(experts * most).reshape(experts, most)
    load, width = on.size + cut.size, on.size + cut.size + 1
    numbers = np.arange(1, most + 1)
    share = problem.counts[:, None] / numbers
    rows = _Rows(width)
    for e in range(experts):
        rows.add(dict.fromkeys(cut[e].tolist(), 1.0), 1.0, 1.0)
        for k in range(most):
            held = dict.fromkeys(on[e, k].tolist(), 1.0)
            rows.add({**held, int(cut[e, k]): -float(k + 1)}, 0.0, 0.0)
            for r in range(ranks):
                rows.add({int(on[e, k, r]): 1.0, int(cut[e, k]): -1.0}, -np.inf, 0.0)
    for r in range(ranks):
        weights = {int(on[e, k, r]): share[e, k] for e in range(experts) for k in range(most)}
        rows.add({**weights, load: -1.0}, -np.inf, 0.0)
        rows.add(dict.fromkeys(on[:, :, r].ravel().tolist(), 1.0), 0.0, float(problem.slots))
    placed = {int(cut[e, k]): k + 1.0 for e in range(experts) for k in range(most)}
    rows.add(placed, 0.0, float(problem.budget))
    whole = np.append(np.ones(load), 0)
    upper: Any = np.append(np.ones(load), np.inf)
    found = milp(
        np.append(np.zeros(load), 1.0), integrality=whole, bounds=Bounds(0, upper),
        constraints=rows.constraint(), options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )  # fmt: skip
    simple = simple_bound(problem)
    if found.mip_dual_bound is None or found.mip_dual_bound < simple.load * (1 - 1e-6):
        return simple
    return Bound(float(found.mip_dual_bound), "optimum", proven=found.status == 0)


class _Rows:
    """Constraints of a program, row by row."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[tuple[float, float]] = []

    def add(self, row: dict[int, float], low: float, high: float) -> None:
        """One constraint: column -> coefficient, and its limits."""
        number = len(self._limits)
        self._entries += [(number, column, value) for column, value in row.items()]
        self._limits.append((low, high))

    def constraint(self) -> Any:
        """All rows as one sparse constraint."""
        rows, columns, values = zip(*self._entries, strict=True)
        shape = (len(self._limits), self._width)
        matrix = coo_matrix((values, (rows, columns)), shape=shape).tocsr()
        limits: Any = np.array(self._limits)
        return LinearConstraint(matrix, limits[:, 0], limits[:, 1])
