"""Static loops over experts: a sum of MLPs of one input, each times a share of its own.

    for e in range(E):  out = out + where(ids == e, weights, 0).sum(-1, keepdim=True) * mlp_e(x)

How a share is spelled does not matter: it is evaluated at numbers that tell which expert it is of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metainfer.ir.dims import dim
from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Graph, Op, Value
from metainfer.passes.regions import ancestors, region

_LEAST = 2  # experts; a single one is an MLP times a number
_SIZE = 8  # of each symbol while a share is evaluated


@dataclass(frozen=True)
class Part:
    """One expert's matrix: a weight, or a row of a stacked weight.

    Attributes:
        weight: the weight.
        index: which of its matrices; -1 where it is a matrix itself.
    """

    weight: Value
    index: int = -1


@dataclass(frozen=True)
class Expert:
    """One term of the sum: (gate, up, down) over an input, and its share."""

    x: Value
    parts: tuple[Part, Part, Part]
    activation: str
    share: Value


@dataclass(frozen=True)
class Loop:
    """A sum of experts.

    Attributes:
        root: the op that adds last.
        experts: in order of their numbers.
        ids: numbers of the chosen experts [T, K].
        weights: their shares [T, K].
        others: what is added besides.
    """

    root: Op
    experts: tuple[Expert, ...]
    ids: Value
    weights: Value
    others: tuple[Value, ...]


def find_loop(graph: Graph) -> Loop | None:
    """The first loop of a graph, None if there is none."""
    producers, uses = graph.producers(), graph.uses()
    for op in graph.ops:
        if op.name != "add" or _is_inner(op, uses, graph):
            continue
        leaves = _leaves(op, producers, uses, graph)
        found = [(leaf, _expert(leaf, producers)) for leaf in leaves]
        experts = [e for _, e in found if e is not None]
        if len(experts) < _LEAST or len({(e.x.name, e.activation) for e in experts}) > 1:
            continue
        chosen = _choices(graph, experts)
        if chosen is None:
            continue
        ids, weights, order = chosen
        others = tuple(leaf for leaf, e in found if e is None and not _is_zero(leaf, producers))
        return Loop(op, tuple(experts[i] for i in order), ids, weights, others)
    return None


def _is_inner(op: Op, uses: Mapping[str, list[Op]], graph: Graph) -> bool:
    readers = uses.get(op.result.name, [])
    returned = op.result.name in graph.returned()
    return len(readers) == 1 and readers[0].name == "add" and not returned


def _leaves(
    op: Op, producers: Mapping[str, Op], uses: Mapping[str, list[Op]], graph: Graph
) -> list[Value]:
    found: list[Value] = []
    pending = list(reversed(op.operands))
    while pending:
        value = pending.pop()
        inner = producers.get(value.name)
        if inner is not None and inner.name == "add" and _is_inner(inner, uses, graph):
            pending.extend(reversed(inner.operands))
        else:
            found.append(value)
    return found


def _is_zero(value: Value, producers: Mapping[str, Op]) -> bool:
    op = producers.get(value.name)
    return op is not None and op.name == "full" and op.attr["value"] == 0


def _expert(term: Value, producers: Mapping[str, Op]) -> Expert | None:
    op = producers.get(term.name)
    if op is None or op.name != "mul" or term.tensor.rank != 2:
        return None
    for share, y in (op.operands, op.operands[::-1]):
        if share.tensor.shape != (term.tensor.shape[0], dim(1)) or y.tensor != term.tensor:
            continue
        found = _mlp(y, producers)
        if found is not None:
            return Expert(*found, share)
    return None


def _mlp(
    y: Value, producers: Mapping[str, Op]
) -> tuple[Value, tuple[Part, Part, Part], str] | None:
    down = _linear(y, producers)
    gated = producers.get(down[0].name) if down else None
    if down is None or gated is None:
        return None
    activation = {"silu_mul": "silu", "gelu_mul": "gelu_tanh"}.get(gated.name, "")
    if not activation or (gated.name == "gelu_mul" and gated.attr.get("approximate") != "tanh"):
        return None
    gate, up = (_linear(v, producers) for v in gated.operands)
    if gate is None or up is None or gate[0].name != up[0].name:
        return None
    return gate[0], (gate[1], up[1], down[1]), activation


def _linear(y: Value, producers: Mapping[str, Op]) -> tuple[Value, Part] | None:
    op = producers.get(y.name)
    if op is None or op.name != "linear" or len(op.operands) != 2:
        return None
    part = _part(op.operands[1], producers)
    return (op.operands[0], part) if part is not None else None


def _part(weight: Value, producers: Mapping[str, Op]) -> Part | None:
    """``@w`` itself, or ``reshape(slice(@w, e:e+1))``."""
    if weight.is_weight:
        return Part(weight)
    view = producers.get(weight.name)
    cut = producers.get(view.operands[0].name) if view is not None and view.operands else None
    if view is None or view.name != "reshape" or cut is None or cut.name != "slice":
        return None
    source, start, stop = cut.operands[0], cut.attr["start"], cut.attr["stop"]
    if not source.is_weight or source.tensor.rank != 3 or cut.attr["dim"] != 0:
        return None
    if not isinstance(start, int) or stop != start + 1:
        return None
    return Part(source, start) if weight.tensor.shape == source.tensor.shape[1:] else None


# --- which expert a share is of ----------------------------------------------------------------


def _choices(graph: Graph, experts: Sequence[Expert]) -> tuple[Value, Value, list[int]] | None:
    """(ids, weights, the experts' places by number) if the shares are those of ids and weights."""
    near = ancestors(graph, experts[0].share)
    matrices = [v for v in near if not v.is_state and v.tensor.rank == 2]
    for ids in (v for v in matrices if v.tensor.dtype.kind in ("int", "uint")):
        for weights in (v for v in matrices if v.tensor.dtype.is_float):
            if weights.tensor.shape != ids.tensor.shape:
                continue
            numbers = [_number(graph, e.share, ids, weights, len(experts)) for e in experts]
            if sorted(numbers) == list(range(len(experts))):
                return ids, weights, [numbers.index(n) for n in range(len(experts))]
    return None


def _number(graph: Graph, share: Value, ids: Value, weights: Value, count: int) -> int:
    """The e for which the share is ``sum(where(ids == e, weights, 0), -1)``, -1 if it is none."""
    found = region(graph, share, (ids, weights))
    if found is None or not ids.tensor.shape[1].is_static:
        return -1
    chosen = ids.tensor.shape[1].static
    env = dict.fromkeys(ids.tensor.shape[0].symbols(), _SIZE)
    rows = ids.tensor.shape[0].evaluate(env)
    # Each expert at each place of a row, then rows that choose an expert twice.
    table = [
        [e if k == at else -1 for k in range(chosen)] for e in range(count) for at in range(chosen)
    ]
    table += [[e] * chosen for e in range(count)]
    table += [[-1] * chosen] * (-len(table) % rows)
    numbers = np.array(table, ids.tensor.dtype.numpy)  # type: ignore[union-attr]
    values = np.random.default_rng(0).uniform(1, 2, numbers.shape).astype(np.float32)
    parts = []
    try:
        for start in range(0, len(numbers), rows):
            cut = slice(start, start + rows)
            parts.append(found.run((numbers[cut], values[cut]), env).reshape(-1))
    except (MetainferError, ValueError):
        return -1  # the sizes are others than those of choices
    made = np.concatenate(parts)
    for e in range(count):
        if np.allclose(made, np.where(numbers == e, values, 0).sum(-1), atol=1e-5):
            return e
    return -1
