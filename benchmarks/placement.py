"""Placement of experts beside the public greedy method and lower bounds.

    python benchmarks/placement.py [--seconds 120] [--only zipf1.0]

Loads are of the heaviest rank, as percent above a lower bound that no placement can beat: "mean"
of the ranks, largest "piece" that replicas leave, "full" ranks, or linear programs over the
"patterns" of a rank (searched for at most ``--seconds`` where the others leave more than 1%).
Every cell is checked: never heavier than greedy. Then small layers whose optimum HiGHS proves, the
experts that a step touches on each rank, and the time of a whole model. Times are of one CPU.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from metainfer.ir.synthetic_router import active_experts, draw_choices
from metainfer.passes.placement import Placement, greedy, in_order, place
from metainfer.passes.placement_bounds import Bound, optimum, pattern_bound, simple_bound
from metainfer.passes.placement_search import Problem

EXPERTS = (128, 160, 256, 384)
RANKS = (4, 8, 16, 32, 64)
REPLICAS = (0, 16, 64)
ROUNDING = 1 + 1e-9


def histograms(experts: int) -> Iterator[tuple[str, np.ndarray]]:
    """Counts of one layer: even up to noise, Zipf of three skews, and as recorded ones look."""
    rng = np.random.default_rng(experts)
    yield "uniform", rng.poisson(1000, experts).astype(float)
    for skew in (0.5, 1.0, 1.3):
        weights = np.arange(1, experts + 1, dtype=float) ** -skew
        yield f"zipf{skew}", rng.permutation(np.round(1e6 * weights))
    # Trained routers: a log-normal bulk and some experts that are hardly ever chosen.
    counts = np.round(1000 * rng.lognormal(0.0, 0.8, experts))
    counts[rng.permutation(experts)[: experts // 16]] *= 0.01
    yield "recorded", np.round(counts)


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    name: str
    problem: Problem
    ours: float
    public: float
    plain: float
    bound: Bound
    seconds: float

    def row(self) -> str:
        """The row's text."""
        above = [f"{100 * (x / self.bound.load - 1):7.2f}%" for x in self._loads()]
        spare = self.problem.budget - self.problem.num_experts
        sizes = f"{self.problem.num_experts:5} {self.problem.ranks:5} {spare:5}"
        kind = self.bound.kind + ("!" if self.bound.proven else "")
        timed = f"{1e3 * self.seconds:7.1f} ms"
        return f"{self.name:9} {sizes} {self.problem.slots:6} {' '.join(above)} {kind:9} {timed}"

    def _loads(self) -> tuple[float, float, float]:
        return self.ours, self.public, self.plain


def measure(name: str, problem: Problem, seconds: float) -> Cell:
    """Place one layer three ways and bound it."""
    spare = problem.budget - problem.num_experts
    sizes = (problem.counts, problem.ranks, problem.slots)
    begun = time.process_time()
    (ours,) = place(*sizes, replicas=spare)
    took = time.process_time() - begun
    (public,) = greedy(*sizes, replicas=spare)
    plain = in_order(problem.num_experts, problem.ranks, problem.slots)
    bound = simple_bound(problem)
    load = _heaviest(ours, problem)
    if load > 1.01 * bound.load:
        known = (ours.array(), public.array())
        bound = pattern_bound(problem, load, seconds, known=known)
    public_load = _heaviest(public, problem)
    assert load <= public_load * ROUNDING, (name, problem)
    return Cell(name, problem, load, public_load, _heaviest(plain, problem), bound, took)


def _heaviest(placement: Placement, problem: Problem) -> float:
    return float(placement.loads(problem.counts).max())


def measure_small(seconds: float) -> Iterator[Cell]:
    """Layers small enough for a proof of the optimum."""
    for experts, ranks, spare in ((8, 4, 0), (8, 4, 4), (12, 3, 0), (12, 4, 4), (16, 4, 0)):
        for name, counts in histograms(experts):
            slots = -(-(experts + spare) // ranks)
            problem = Problem(counts, ranks, slots, experts + spare)
            cell = measure(name, problem, seconds)
            best = optimum(problem, min(seconds, 20.0))
            fields = (cell.ours, cell.public, cell.plain, best, cell.seconds)
            yield Cell(name, problem, *fields)


def show_active(tokens: int = 64, chosen: int = 8) -> None:
    """How many experts of each rank one step touches: what a figure of its speed depends on."""
    print(f"\nactive experts a rank, of those it holds, in a step of {tokens} tokens x {chosen}")
    print("histogram experts ranks    least  mean  most  of")
    for experts, ranks in ((128, 8), (256, 16), (384, 64)):
        for name, counts in histograms(experts):
            (placed,) = place(counts, ranks, -(-experts // ranks))
            active = active_experts(draw_choices(counts, tokens, chosen), placed.slots)
            figures = f"{active.min():8} {active.mean():5.1f} {active.max():5}"
            print(f"{name:9} {experts:7} {ranks:5} {figures} {placed.slots_per_rank:3}")


def show_model(layers: int = 61, experts: int = 384, ranks: int = 64, spare: int = 64) -> None:
    """Time to place a whole model, every layer skewed differently."""
    rng = np.random.default_rng(0)
    shares = np.arange(1, experts + 1, dtype=float)
    rows = [np.round(1e6 * shares ** -(0.3 + layer / layers)) for layer in range(layers)]
    counts = np.stack([rng.permutation(row) for row in rows])
    begun, cpu = time.perf_counter(), time.process_time()
    place(counts, ranks, -(-(experts + spare) // ranks), replicas=spare)
    took, used = time.perf_counter() - begun, time.process_time() - cpu
    print(
        f"\n{layers} layers x {experts} experts on {ranks} ranks: {took:.1f} s, {used:.1f} s of CPU"
    )


def main() -> None:
    """Print the tables and check every cell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0, help="of a bound's search")
    parser.add_argument("--only", default="", help="one kind of histogram")
    wanted = parser.parse_args()
    head = "histogram experts ranks spare  slots    ours   greedy in order  bound         time"
    cells: list[Cell] = []
    print(head)
    for experts in EXPERTS:
        for name, counts in histograms(experts):
            if wanted.only not in ("", name):
                continue
            for ranks in RANKS:
                for spare in REPLICAS:
                    slots = -(-(experts + spare) // ranks)
                    problem = Problem(counts, ranks, slots, experts + spare)
                    cells.append(measure(name, problem, wanted.seconds))
                    print(cells[-1].row(), flush=True)
    print(f"\nsmall layers, whose optimum is proven where '!' stands\n{head}")
    small = list(measure_small(wanted.seconds))
    for cell in small:
        print(cell.row(), flush=True)
    show_active()
    show_model()
    _summarize(cells, small)


def _summarize(cells: list[Cell], small: list[Cell]) -> None:
    near = sum(cell.ours <= 1.03 * cell.bound.load for cell in cells)
    better = sum(cell.ours * ROUNDING < cell.public for cell in cells)
    gains = [cell.public / cell.ours - 1 for cell in cells]
    proven = [cell for cell in small if cell.bound.proven]
    worst = max((cell.ours / cell.bound.load - 1 for cell in proven), default=0.0)
    print(
        f"\n{len(cells)} layers: none heavier than greedy, {better} lighter (up to "
        f"{100 * max(gains):.1f}%); {near} within 3% of a lower bound\n"
        f"{1e3 * float(np.mean([c.seconds for c in cells])):.1f} ms a layer, at most "
        f"{1e3 * max(c.seconds for c in cells):.1f}\n"
        f"{len(proven)} small layers with a proven optimum: at most {100 * worst:.2f}% above it"
    )


if __name__ == "__main__":
    main()
