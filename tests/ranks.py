"""Simulated ranks beside one rank: steps of a language model over both, states carried along.

Imported by tests of sharding; holds no tests.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metainfer.compiler.cost import CostModel
from metainfer.hardware import load_machine
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Module
from metainfer.ir.interpret import interpret
from metainfer.ir.options import Options
from metainfer.ir.simulate import RankInput, axis_numbers, simulate
from metainfer.ir.strategy import Strategy
from metainfer.ir.types import Mesh
from metainfer.ir.verify import verify_module
from metainfer.passes.localize import localize
from metainfer.passes.shard import shard
from metainfer.passes.target import Report, Target

Step = Mapping[str, np.ndarray]


def rank_target(
    mesh: Sequence[tuple[str, int]], experts: Sequence[str] = (), hw: str = "8xpcie"
) -> Target:
    """A target for the passes that need no kernels."""
    nothing: Any = None
    strategy = Strategy(
        "decode", Mesh(tuple(mesh)), tuple(experts), typical=(("P", 4),), max_sequences=4
    )
    report = Report()
    return Target(load_machine(hw), strategy, Options(), nothing, CostModel(nothing), report)


def as_ranks(module: Module, target: Target) -> Module:
    """The program of one rank of the target's mesh, verified on the way."""
    sharded = shard(module, target)
    verify_module(sharded)
    local = localize(sharded, target)
    verify_module(local)
    return local


def zero_states(module: Module, pages: int, page: int) -> dict[str, Any]:
    """Empty paged states by full name."""
    return {
        name[1:]: {
            field: np.zeros((pages, page, *type_.concrete({})), np.float32)
            for field, type_ in value.state.fields
        }
        for name, value in flatten(module).states.items()
    }


class OneRank:
    """The reference: the module as captured."""

    def __init__(self, module: Module, weights: Any, pages: int, page: int) -> None:
        self.module, self.weights = module, weights
        self.states = zero_states(module, pages, page)

    def run(self, tokens: np.ndarray, step: Step) -> np.ndarray:
        result = interpret(self.module, [tokens], self.weights, step=step, states=self.states)
        self.states = dict(result.states)
        return result.outputs[0]


class ManyRanks:
    """The local module on all simulated ranks; each replica is given its own step."""

    def __init__(self, module: Module, weights: Any, pages: int, page: int) -> None:
        self.module, self.weights = module, weights
        count = module.mesh.num_ranks
        self.states = [zero_states(module, pages, page) for _ in range(count)]

    def run(self, steps: Sequence[tuple[np.ndarray, Step]]) -> list[np.ndarray]:
        """One (tokens, step) for each replica -> first output of each; its ranks must agree."""
        return [found[0] for found in self.run_all([([x], step) for x, step in steps])]

    def run_all(self, steps: Sequence[tuple[Sequence[np.ndarray], Step]]) -> list[list[np.ndarray]]:
        """One (inputs, step) for each replica -> all outputs of each; its ranks must agree."""
        axes = dict(self.module.mesh.axes)
        numbers = axis_numbers(self.module.mesh, "dp") if "dp" in axes else [0] * len(self.states)
        given = [
            RankInput(list(steps[n][0]), steps[n][1], states)
            for n, states in zip(numbers, self.states, strict=True)
        ]
        results = simulate(self.module, given, self.weights)
        self.states = [dict(r.states) for r in results]
        outputs: dict[int, list[np.ndarray]] = {}
        for number, result in zip(numbers, results, strict=True):
            for known, got in zip(
                outputs.setdefault(number, list(result.outputs)), result.outputs, strict=True
            ):
                np.testing.assert_array_equal(known, got)
        return [outputs[n] for n in sorted(outputs)]
