"""Graphs as values: operations in SSA order, blocks called with a layer's weights, modules.

Names carry their role in the first character: ``%x`` a computed value or input, ``@w`` a weight of
the graph, ``$kv`` a state as it is at the start of the step, ``step.positions`` a field of the step
record. A Value does not hold its Op, so that hashing stays shallow.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from metainfer.ir.dims import Dim
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.types import Mesh, StateType, Symbol, TensorType, Type

Attr = int | float | bool | str | tuple["Attr", ...] | Dim


@dataclass(frozen=True)
class Source:
    """A line of the model: file as given, 1-based line."""

    file: str
    line: int

    def __str__(self) -> str:
        """Print ``models/decoder.py:41``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Value:
    """A named, typed SSA value."""

    name: str
    type: Type

    @property
    def tensor(self) -> TensorType:
        """The type of a tensor value.

        Raises: TypeMismatch for a state.
        """
        if isinstance(self.type, TensorType):
            return self.type
        raise TypeMismatch(f"{self.name} is a state where a tensor is needed")

    @property
    def state(self) -> StateType:
        """The type of a state value.

        Raises: TypeMismatch for a tensor.
        """
        if isinstance(self.type, StateType):
            return self.type
        raise TypeMismatch(f"{self.name} is a tensor where a state is needed")

    @property
    def is_state(self) -> bool:
        """Whether the value is a state."""
        return isinstance(self.type, StateType)

    @property
    def is_weight(self) -> bool:
        """Whether the value is a weight of its graph."""
        return self.name.startswith("@")


@dataclass(frozen=True)
class Choice:
    """One row of a group's kernel table: use ``kernel`` while ``symbol`` <= ``limit``.

    Attributes:
        kernel: registered name.
        symbol: size symbol that selects, "" in the last row.
        limit: inclusive upper bound, 0 in the last row.
    """

    kernel: str
    symbol: str = ""
    limit: int = 0


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: name of its record in ``ir.ops`` ("fused" and "call" are structural).
        operands: values read.
        results: values made.
        attrs: sorted pairs (name, value).
        body: graph of a fused group.
        source: line of the model that it came from.
        stream: queue that executes it; 0 is the main one.
        after: values of other streams that must be made before it starts: the event it waits for
            is recorded when their op ends (see `ir.streams`).
        choices: kernels chosen by size, after `select`.
    """

    name: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    body: "Graph | None" = None
    source: Source | None = None
    stream: int = 0
    after: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def attr(self) -> Mapping[str, Attr]:
        """Attributes by name."""
        return dict(self.attrs)

    @property
    def result(self) -> Value:
        """The only result."""
        if len(self.results) != 1:
            raise TypeMismatch(f"{self.name} has {len(self.results)} results where one is needed")
        return self.results[0]

    @property
    def is_call(self) -> bool:
        """Whether the op calls a block."""
        return self.name == "call"


def attrs_of(values: Mapping[str, Attr]) -> tuple[tuple[str, Attr], ...]:
    """Attributes in canonical order."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True)
class Graph:
    """A block, the main graph, a load graph, or the body of a fused group.

    Attributes:
        name: name in its module.
        inputs: values passed in (``%``).
        weights: values bound by name (``@``).
        states: states bound by name (``$``).
        ops: in execution order; every operand is defined before it is used.
        outputs: values passed out; may hold tensors only.
        state_outputs: final value of each state, in the order of ``states``.
    """

    name: str
    inputs: tuple[Value, ...] = ()
    weights: tuple[Value, ...] = ()
    states: tuple[Value, ...] = ()
    ops: tuple[Op, ...] = ()
    outputs: tuple[Value, ...] = ()
    state_outputs: tuple[Value, ...] = ()

    def definitions(self) -> dict[str, Value]:
        """All values defined in the graph, by name, step fields apart."""
        found = {v.name: v for v in (*self.inputs, *self.weights, *self.states)}
        for op in self.ops:
            found.update((v.name, v) for v in op.results)
        return found

    def producers(self) -> dict[str, Op]:
        """The op that makes each computed value."""
        return {v.name: op for op in self.ops for v in op.results}

    def uses(self) -> dict[str, list[Op]]:
        """Ops that read each value."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in {v.name for v in op.operands}:
                found.setdefault(name, []).append(op)
        return found

    def returned(self) -> frozenset[str]:
        """Names that leave the graph."""
        return frozenset(v.name for v in (*self.outputs, *self.state_outputs))


@dataclass(frozen=True)
class Module:
    """Graphs by name: `main`, blocks that it calls, and how each block's weights are made.

    Attributes:
        name: name of the model.
        symbols: size symbols with bounds.
        mesh: axes over ranks.
        graphs: main last, blocks before it.
        loads: load graph of the graph of the same name: outputs are its weights, in order; its
            weights are tensors of the checkpoint, relative to the call's prefix.
        has_step: whether the graphs may read the step record.
    """

    name: str
    symbols: tuple[Symbol, ...] = ()
    mesh: Mesh = field(default_factory=Mesh)
    graphs: tuple[Graph, ...] = ()
    loads: tuple[Graph, ...] = ()
    has_step: bool = False

    @property
    def main(self) -> Graph:
        """The graph that a step runs."""
        return self.graph("main")

    def graph(self, name: str) -> Graph:
        """A graph by name.

        Raises: TypeMismatch if there is none.
        """
        for graph in self.graphs:
            if graph.name == name:
                return graph
        known = ", ".join(g.name for g in self.graphs)
        raise TypeMismatch(f"module {self.name} has no graph {name!r}", advice=f"it has: {known}")

    def load(self, name: str) -> Graph | None:
        """The load graph of a graph, None where its weights are the checkpoint's own tensors."""
        return next((g for g in self.loads if g.name == name), None)

    def limits(self) -> dict[str, tuple[int, int]]:
        """Inclusive bounds of the symbols."""
        return {s.name: (s.low, s.high) for s in self.symbols}

    def with_graph(self, graph: Graph) -> "Module":
        """The module with one graph replaced by name."""
        return replace(
            self, graphs=tuple(graph if g.name == graph.name else g for g in self.graphs)
        )

    def with_load(self, load: Graph) -> "Module":
        """The module with one load graph replaced or added."""
        if self.load(load.name) is None:
            return replace(self, loads=(*self.loads, load))
        return replace(self, loads=tuple(load if g.name == load.name else g for g in self.loads))

    def calls(self) -> Iterator[Op]:
        """The calls of main, in order."""
        return (op for op in self.main.ops if op.is_call)


@dataclass(frozen=True)
class Binding:
    """Where a call finds the block's weights and states.

    Attributes:
        prefix: put before each name ("model.layers.3.").
        renames: names of the block that stand elsewhere: (block name, full name).
    """

    prefix: str
    renames: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(call: Op) -> "Binding":
        """Read a call's attributes ``prefix`` and ``bind``."""
        pairs = cast(tuple[tuple[str, str], ...], call.attr.get("bind", ()))
        return Binding(str(call.attr.get("prefix", "")), pairs)

    def full_name(self, name: str) -> str:
        """Full name of a weight, checkpoint tensor or state of the block (without its sigil)."""
        return dict(self.renames).get(name, self.prefix + name)
