"""A graph's ops by what makes a value and what reads it, kept up to date while ops are replaced.

Places are fixed: a rewrite rearranges ops inside the window that it touches, and leaves empty
places where there are fewer of them.
"""

from collections.abc import Sequence
from dataclasses import replace

from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.ops.record import STATEFUL, op_def


class OpIndex:
    """Ops of one graph at numbered places."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.outputs = graph.outputs
        self.state_outputs = graph.state_outputs
        self.slots: list[Op | None] = []
        self._made: dict[str, int] = {}
        self._reads: dict[str, set[int]] = {}
        self._counts: dict[str, int] = {}
        self._fresh = 0
        for op in graph.ops:
            self.slots.append(None)
            self._put(len(self.slots) - 1, op)

    def has(self, name: str) -> bool:
        """Whether there is an op of this name."""
        return self._counts.get(name, 0) > 0

    def at(self, place: int) -> Op:
        """The op at an occupied place."""
        op = self.slots[place]
        assert op is not None
        return op

    def maker(self, value: str) -> int | None:
        """The place of the op that makes a value, None for parameters."""
        return self._made.get(value)

    def readers(self, value: str) -> list[int]:
        """Places of the ops that read a value, ascending."""
        return sorted(self._reads.get(value, ()))

    def is_returned(self, value: str) -> bool:
        """Whether a value leaves the graph."""
        return any(v.name == value for v in (*self.outputs, *self.state_outputs))

    def fresh_name(self) -> str:
        """A name that no value has; later renamed to a number."""
        self._fresh += 1
        return f"%:{self._fresh}"

    def fill(self, start: int, ops: Sequence[Op], stop: int) -> None:
        """Put ops at the places ``start`` to ``stop`` (exclusive), instead of those there."""
        if len(ops) > stop - start:
            extra = len(ops) - (stop - start)
            self._widen(stop, extra)
            stop += extra
        for place in range(start, stop):
            self._take(place)
        for place, op in enumerate(ops, start=start):
            self._put(place, op)

    def _widen(self, place: int, extra: int) -> None:
        """Insert empty places; everything behind them moves."""
        self.slots[place:place] = [None] * extra
        for name, at in self._made.items():
            if at >= place:
                self._made[name] = at + extra
        for name, places in self._reads.items():
            self._reads[name] = {at + extra if at >= place else at for at in places}

    def _take(self, place: int) -> None:
        op = self.slots[place]
        if op is None:
            return
        self.slots[place] = None
        self._counts[op.name] -= 1
        for value in op.results:
            self._made.pop(value.name, None)
        for value in op.operands:
            self._reads[value.name].discard(place)

    def _put(self, place: int, op: Op) -> None:
        self.slots[place] = op
        self._counts[op.name] = self._counts.get(op.name, 0) + 1
        for value in op.results:
            self._made[value.name] = place
        for value in op.operands:
            self._reads.setdefault(value.name, set()).add(place)

    def replace_value(self, name: str, new: Value) -> None:
        """Let everything that reads or returns a value read or return another."""
        for place in self.readers(name):
            op = self.at(place)
            operands = tuple(new if v.name == name else v for v in op.operands)
            self._take(place)
            self._put(place, replace(op, operands=operands))
        self.outputs = tuple(new if v.name == name else v for v in self.outputs)
        self.state_outputs = tuple(new if v.name == name else v for v in self.state_outputs)

    def graph(self) -> Graph:
        """The graph as it is now."""
        ops = tuple(op for op in self.slots if op is not None)
        return replace(self._graph, ops=ops, outputs=self.outputs, state_outputs=self.state_outputs)


def overwritten(op: Op) -> set[str]:
    """Names of the states that an op writes over, which nothing may read after it."""
    if op.name == "fused":
        assert op.body is not None
        inner = {name for o in op.body.ops for name in overwritten(o)}
        pairs = zip(op.operands, op.body.inputs, strict=True)
        return {v.name for v, p in pairs if p.name in inner}
    if op.name == "call" or STATEFUL not in op_def(op.name).traits:
        return set()
    return {v.name for v in op.operands if v.is_state}
