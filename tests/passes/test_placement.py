"""Placement of experts: legal, never heavier than the public method, and near the optimum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.ir.errors import CapacityError, PlanError
from metainfer.passes.placement import EMPTY, Placement, count_moves, greedy, in_order, place
from metainfer.passes.placement_bounds import optimum, pattern_bound, simple_bound
from metainfer.passes.placement_search import Problem

ROUNDING = 1 + 1e-9


def zipf(experts: int, exponent: float, seed: int = 0) -> np.ndarray:
    ranks = np.arange(1, experts + 1, dtype=np.float64)
    return np.random.default_rng(seed).permutation(np.round(1e6 / ranks**exponent))


@st.composite
def problems(draw: st.DrawFn, largest: int = 40) -> Problem:
    experts, ranks = draw(st.integers(1, largest)), draw(st.integers(1, 9))
    slots = -(-experts // ranks) + draw(st.integers(0, 3))
    counts = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    if not any(counts):
        counts[0] = 1
    budget = draw(st.integers(experts, ranks * slots))
    return Problem(np.array(counts, np.float64), ranks, slots, budget)


def solved(problem: Problem) -> Placement:
    spare = problem.budget - problem.num_experts
    (found,) = place(problem.counts, problem.ranks, problem.slots, replicas=spare)
    return found


def heaviest(placement: Placement, problem: Problem) -> float:
    return float(placement.loads(problem.counts).max())


@settings(deadline=None)
@given(problems())
def test_placements_are_legal_and_no_heavier_than_greedy(problem: Problem) -> None:
    found = solved(problem)
    # The record itself refuses an expert that is nowhere, or twice on a rank.
    assert found.array().shape == problem.shape
    assert found.replicas().sum() <= problem.budget
    assert found.loads(problem.counts).sum() == pytest.approx(problem.counts.sum())
    (public,) = greedy(
        problem.counts, problem.ranks, problem.slots, replicas=problem.budget - problem.num_experts
    )
    assert public.replicas().sum() <= problem.budget
    assert heaviest(found, problem) <= heaviest(public, problem) * ROUNDING
    assert simple_bound(problem).load <= heaviest(found, problem) * ROUNDING


@settings(deadline=None, max_examples=15)
@given(problems(largest=6).filter(lambda p: p.ranks <= 4))
def test_bounds_hold_and_small_layers_come_near_the_optimum(problem: Problem) -> None:
    best = optimum(problem, seconds=5)
    load = heaviest(solved(problem), problem)
    assert best.load <= load * (1 + 1e-5)
    relaxed = pattern_bound(problem, load, seconds=5)
    assert simple_bound(problem).load <= relaxed.load
    if best.proven:
        assert relaxed.load <= best.load * (1 + 1e-5)


@pytest.mark.parametrize(
    ("experts", "ranks", "spare", "exponent"),
    [
        (128, 64, 64, 1.3),
        (256, 64, 64, 1.3),
        (128, 16, 0, 0.5),
        (384, 64, 64, 1.0),
        (160, 8, 16, 1.0),
    ],
)
def test_skewed_layers_end_within_three_percent_of_a_bound(
    experts: int, ranks: int, spare: int, exponent: float
) -> None:
    slots = -(-(experts + spare) // ranks)
    problem = Problem(zipf(experts, exponent), ranks, slots, experts + spare)
    load = heaviest(solved(problem), problem)
    assert load <= pattern_bound(problem, load, seconds=10, close=1.02).load * 1.03


@pytest.mark.parametrize("seed", range(8))
def test_small_layers_end_within_three_percent_of_the_proven_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts, ranks = int(rng.integers(4, 9)), int(rng.integers(2, 5))
    slots = -(-experts // ranks) + int(rng.integers(0, 2))
    counts = np.round(1000 * rng.lognormal(0, 1, experts))
    problem = Problem(counts, ranks, slots, int(rng.integers(experts, ranks * slots + 1)))
    best = optimum(problem, seconds=10)
    assert best.proven
    assert best.load * (1 - 1e-5) <= heaviest(solved(problem), problem) <= best.load * 1.03


def test_patterns_prove_what_simple_bounds_cannot() -> None:
    """Three experts must share one of 64 ranks: the mean knows nothing of it."""
    problem = Problem(np.random.default_rng(0).poisson(1000, 160).astype(float), 64, 3, 160)
    load = heaviest(solved(problem), problem)
    assert load > simple_bound(problem).load * 1.15
    assert load < pattern_bound(problem, load, seconds=20, close=1.02).load * 1.03


def test_the_optimum_of_a_layer_worked_by_hand() -> None:
    """5 + 4, 5 + 4, 3 + 3 + 3: heaviest first puts 4 + 4 + 3 together."""
    problem = Problem(np.array([5.0, 5, 4, 4, 3, 3, 3]), 3, 3, 7)
    (public,) = greedy(problem.counts, 3, 3, replicas=0)
    assert heaviest(public, problem) == 11.0
    assert heaviest(solved(problem), problem) == 9.0
    best = optimum(problem, seconds=10)
    assert best.proven
    assert best.load == pytest.approx(9.0)


def test_a_placement_is_the_same_every_time() -> None:
    counts = np.stack([zipf(128, s) for s in (0.5, 1.0)])
    assert place(counts, 8, 20) == place(counts, 8, 20)


def test_even_loads_move_nothing() -> None:
    (found,) = place(np.full(64, 7), 8, 8, groups=[0] * 4 + [1] * 4)
    assert found == in_order(64, 8, 8)


def test_what_is_balanced_already_stays() -> None:
    counts = zipf(128, 1.0)
    (first,) = place(counts, 8, 20)
    (second,) = place(counts, 8, 20, before=[first])
    assert second == first
    assert count_moves(first, second, [0] * 8) == count_moves(first, first, [0] * 8)


def test_ranks_are_numbered_so_that_few_weights_cross_groups() -> None:
    counts, groups = zipf(128, 1.0), [0, 0, 0, 0, 1, 1, 1, 1]
    start = in_order(128, 8, 20)
    (found,) = place(counts, 8, 20, groups=groups)
    moves = count_moves(start, found, groups)
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = [found.slots[i] for i in rng.permutation(8)]
        other = count_moves(start, Placement(128, tuple(rows)), groups)
        assert (moves.across, moves.within) <= (other.across, other.within)


def test_slots_may_stay_empty() -> None:
    (found,) = place(np.array([5.0, 1, 1]), 2, 4, replicas=0)
    assert sorted(e for row in found.slots for e in row if e != EMPTY) == [0, 1, 2]


def test_a_layer_that_was_never_reached_is_balanced_by_number() -> None:
    (found,) = place(np.zeros(8), 4, 2)
    assert found == in_order(8, 4, 2)


def test_layers_of_384_experts_over_64_ranks() -> None:
    counts = np.stack([zipf(384, 0.4 + layer / 61, layer) for layer in range(6)])
    for row, found in zip(counts, place(counts, 64, 7), strict=True):
        assert found.loads(row).max() <= 1.03 * max(row.sum() / 64, (row / found.replicas()).max())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="9 experts do not fit on 2 ranks of 4 slots") as caught:
        place(np.ones(9), 2, 4)
    assert "give each rank 5 slots" in str(caught.value)


@pytest.mark.parametrize("bad", [[1.0, -1], [1.0, np.nan], [np.inf, 1], [], [[[1.0]]]])
def test_counts_that_are_none_are_refused(bad: list[float]) -> None:
    with pytest.raises(PlanError, match="are none of experts"):
        place(np.array(bad), 2, 2)


def test_replicas_groups_and_starts_must_fit() -> None:
    with pytest.raises(PlanError, match="4 ranks are given 2 groups"):
        place(np.ones(8), 4, 2, groups=[0, 1])
    with pytest.raises(PlanError, match="-1 replicas"):
        place(np.ones(8), 4, 2, replicas=-1)
    with pytest.raises(PlanError, match="1 layers are given 2 placements"):
        place(np.ones(8), 4, 2, before=[in_order(8, 4, 2)] * 2)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (((0, 1), (0, 0)), "rank 1 holds an expert twice"),
        (((0, 1), (0, EMPTY)), "placed nowhere, or unknown: .2."),
        (((0, 1), (2, 3)), "placed nowhere, or unknown: .3."),
        (((0, 1), (2,)), "rank 1 has 1 slots, rank 0 2"),
    ],
)
def test_slots_that_are_no_placement_are_refused(
    rows: tuple[tuple[int, ...], ...], match: str
) -> None:
    with pytest.raises(PlanError, match=match):
        Placement(3, rows)
