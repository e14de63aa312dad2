"""Experts by gathered weights: each choice takes its matrices, and batched products apply them.

    h = silu(einsum("tkfd,td->tkf", gate[ids], x)) * einsum("tkfd,td->tkf", up[ids], x)
    y = (einsum("tkdf,tkf->tkd", down[ids], h) * weights[..., None]).sum(1)

How it is spelled (flat rows, gate and up in one weight) does not matter: what lies between is
evaluated on few small experts and compared with the op.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.ops.moe import ACTIVATIONS
from metainfer.ir.ops.record import op_def
from metainfer.passes.regions import Region, ancestors, region

_EXPERTS = 3  # while it is evaluated
_SIZE = 4  # of each symbol
_TOLERANCE = 1e-3
Cut = tuple[str, int, int]  # a weight, and elements start:stop of its dim 1


@dataclass(frozen=True)
class Gathered:
    """Experts by gathered weights.

    Attributes:
        root: the op that makes the result [T, D].
        operands: x, ids, weights.
        gate: weight, or (weight, start, stop) of its dim 1 where gate and up are one.
        up: the same.
        down: weight.
        activation: of the gate.
    """

    root: Op
    operands: tuple[Value, Value, Value]
    gate: tuple[Value, int, int]
    up: tuple[Value, int, int]
    down: Value
    activation: str


def find_gathered(graph: Graph) -> Gathered | None:
    """The first mixture of a graph that gathers its experts' weights, None if there is none."""
    for index, stacks in _stacks(graph):
        for root in graph.ops:
            if root.name != "sum" or root.result.tensor.rank != 2:
                continue
            near = ancestors(graph, root.result)
            if not {v.name for v in (index, *stacks)} <= {v.name for v in near}:
                continue
            found = _matched(graph, root, stacks, near)
            if found is not None:
                return found
    return None


def _stacks(graph: Graph) -> list[tuple[Value, list[Value]]]:
    """Stacked weights by the index with which their matrices are taken."""
    found: dict[str, tuple[Value, list[Value]]] = {}
    for op in graph.ops:
        if op.name == "gather" and op.operands[0].is_weight and op.operands[0].tensor.rank == 3:
            weight, index = op.operands
            found.setdefault(index.name, (index, []))[1].append(weight)
    return [pair for pair in found.values() if len(pair[1]) in (2, 3)]


def _matched(graph: Graph, root: Op, stacks: list[Value], near: list[Value]) -> Gathered | None:
    matrices = [v for v in near if not v.is_state and not v.is_weight and v.tensor.rank == 2]
    tokens, width = root.result.tensor.shape
    floats = [v for v in matrices if v.tensor.dtype.is_float and v.tensor.shape[0] == tokens]
    for ids in (v for v in matrices if v.tensor.dtype.kind in ("int", "uint")):
        for weights in (v for v in floats if v.tensor.shape == ids.tensor.shape):
            for x in (v for v in floats if v.tensor.shape[1] == width):
                between = region(graph, root.result, (x, ids, weights, *stacks))
                if between is None:
                    continue
                found = _same(between, root, (x, ids, weights), stacks)
                if found is not None:
                    return found
    return None


def roles(
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[Cut, Cut, Cut]]:
    """(gate, up, down) of stacked weights, or of cuts of their dim 1, whose shapes fit.

    Args:
        shapes: of two or three weights, by name.
    """
    for down, (num, width, inner) in shapes.items():
        rest = [name for name in shapes if name != down]
        whole = (down, 0, width)
        if len(rest) == 2 and all(shapes[w] == (num, inner, width) for w in rest):
            for gate, up in permutations(rest):
                yield (gate, 0, inner), (up, 0, inner), whole
        if len(rest) == 1 and shapes[rest[0]] == (num, 2 * inner, width):
            first, second = (rest[0], 0, inner), (rest[0], inner, 2 * inner)
            yield first, second, whole
            yield second, first, whole


def _same(
    between: Region, root: Op, operands: tuple[Value, Value, Value], stacks: list[Value]
) -> Gathered | None:
    """What the region is, by its numbers; None if it is no mixture of experts."""
    env = dict.fromkeys(root.result.tensor.shape[0].symbols(), _SIZE)
    rng = np.random.default_rng(0)
    data = _operand_data(operands, env, rng)
    drawn = {w.name: _matrices(w, rng) for w in stacks}
    try:
        made = between.run((*data, *(drawn[w.name] for w in stacks)), env)
    except (MetainferError, ValueError, IndexError):
        return None  # x, ids or weights are others than these
    named = {w.name: w for w in stacks}
    for cuts in roles({w.name: tuple(n.static for n in w.tensor.shape) for w in stacks}):
        parts = [drawn[name][:, start:stop] for name, start, stop in cuts]
        for activation in ACTIVATIONS:
            wanted = op_def("experts").reference(*data, *parts, activation=activation)
            limit = _TOLERANCE * float(np.abs(wanted).max())
            if made.shape == wanted.shape and np.abs(made - wanted).max() <= limit:
                gate, up, down = ((named[name], start, stop) for name, start, stop in cuts)
                return Gathered(root, operands, gate, up, down[0], activation)
    return None


def _operand_data(
    operands: tuple[Value, Value, Value], env: Mapping[str, int], rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    x, ids, weights = (v.tensor for v in operands)
    return (
        rng.standard_normal(x.concrete(env)).astype(np.float32),
        rng.integers(0, _EXPERTS, ids.concrete(env)).astype(ids.dtype.numpy),  # type: ignore[union-attr]
        rng.uniform(0.5, 1.5, weights.concrete(env)).astype(np.float32),
    )


def _matrices(weight: Value, rng: np.random.Generator) -> np.ndarray:
    _, rows, columns = (n.static for n in weight.tensor.shape)
    made = rng.standard_normal((_EXPERTS, rows, columns)) * columns**-0.5
    return made.astype(np.float32)
