"""Regions of a graph: what lies between some values and a result, and what it computes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metainfer.ir.dims import dim
from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.interpret import interpret_graph
from metainfer.ir.ops.record import NONDETERMINISTIC, STATEFUL, op_def


@dataclass(frozen=True)
class Region:
    """Ops that make a value from some others and from nothing else.

    Attributes:
        leaves: where it begins.
        ops: in order.
        root: what it makes.
    """

    leaves: tuple[Value, ...]
    ops: tuple[Op, ...]
    root: Value

    def run(self, data: Sequence[np.ndarray], env: Mapping[str, int]) -> np.ndarray:
        """The value of the root for values of the leaves, whose sizes may be others.

        Raises: TypeMismatch if the shapes do not fit the ops.
        """
        inputs = tuple(
            Value(v.name, v.tensor.with_shape(tuple(dim(n) for n in d.shape)))
            for v, d in zip(self.leaves, data, strict=True)
        )
        graph = Graph("region", inputs, ops=self.ops, outputs=(self.root,))
        named = {v.name: d for v, d in zip(self.leaves, data, strict=True)}
        (made,) = interpret_graph(graph, named, env=env)
        return np.asarray(made)


def region(graph: Graph, root: Value, leaves: Sequence[Value]) -> Region | None:
    """What makes the root of the leaves; None if something else takes part, or nothing does."""
    producers = graph.producers()
    stops = {v.name for v in leaves}
    needed: dict[int, Op] = {}
    order = {id(op): place for place, op in enumerate(graph.ops)}
    pending = [root]
    while pending:
        value = pending.pop()
        if value.name in stops:
            continue
        op = producers.get(value.name)
        if op is None or not _is_plain(op):
            return None
        if id(op) not in needed:
            needed[id(op)] = op
            pending.extend(op.operands)
    ops = tuple(sorted(needed.values(), key=lambda op: order[id(op)]))
    return Region(tuple(leaves), ops, root) if ops else None


def ancestors(graph: Graph, root: Value) -> list[Value]:
    """Values that a value is made of, the nearest first."""
    producers = graph.producers()
    found: dict[str, Value] = {}
    layer = [root]
    while layer:
        behind: list[Value] = []
        for value in layer:
            op = producers.get(value.name)
            for operand in op.operands if op is not None else ():
                if operand.name not in found:
                    found[operand.name] = operand
                    behind.append(operand)
        layer = behind
    return list(found.values())


def _is_plain(op: Op) -> bool:
    if op.name in ("call", "fused"):
        return False
    return not op_def(op.name).traits & {STATEFUL, NONDETERMINISTIC}
