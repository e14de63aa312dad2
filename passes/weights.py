"""Load graphs: how passes change the form of a weight.

The load graph of a graph turns checkpoint tensors into the graph's weights. A pass that changes a
weight appends ops to it; what no longer reaches an output is dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.ops.record import Builder


def load_of(module: Module, graph: str) -> Graph:
    """The load graph of a graph; the identity over its weights where there is none."""
    found = module.load(graph)
    if found is not None:
        return found
    weights = module.graph(graph).weights
    return Graph(graph, weights=weights, outputs=weights)


class LoadEditor:
    """Edits one graph's weights and their load graph together.

    Example: before -> after
        load: return @q                 ->  %0 = quantize(@q) {format = "i8/32:f16"} / return %0
        block: weights @q : f32[8,32]   ->  weights @q : i8/32:f16[8,32]
    """

    def __init__(self, module: Module, graph: str) -> None:
        self.module = module
        self.graph = module.graph(graph)
        load = load_of(module, graph)
        self._sources = list(load.weights)
        self._builder = Builder(_next_number(load))
        self._builder.ops.extend(load.ops)
        pairs = zip(self.graph.weights, load.outputs, strict=True)
        self._made: dict[str, Value] = {weight.name: made for weight, made in pairs}

    def made(self, weight: str) -> Value:
        """The load graph's value for a weight ("@name")."""
        return self._made[weight]

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops of the load graph so far."""
        return tuple(self._builder.ops)

    def source(self, value: Value) -> Value:
        """Declare a tensor of the checkpoint (or of the plan) that the load graph reads."""
        self._sources.append(value)
        return value

    def emit(self, name: str, *operands: Value, **attrs: object) -> Value:
        """Append a load op."""
        return self._builder.emit(name, *operands, **attrs)  # type: ignore[arg-type]

    def update(self, weight: str, value: Value) -> None:
        """Make a weight from another value of the load graph; its type follows."""
        if weight not in self._made:
            raise TypeMismatch(f"{self.graph.name} has no weight {weight}")
        self._made[weight] = value

    def add(self, weight: str, value: Value) -> Value:
        """Add a weight made from a value of the load graph, and return it."""
        if weight in self._made:
            raise TypeMismatch(f"{self.graph.name} has a weight {weight} already")
        self._made[weight] = value
        return Value(weight, value.type)

    def remove(self, weight: str) -> None:
        """Drop a weight that no op reads any more."""
        del self._made[weight]

    def finish(self, rewrite: Callable[[Graph], Graph] | None = None) -> Module:
        """The module with the graph (after ``rewrite``) and its load graph replaced."""
        retyped = retype_weights(self.graph, {n: v for n, v in self._made.items()})
        graph = rewrite(retyped) if rewrite is not None else retyped
        read = {v.name for op in graph.ops for v in op.operands} | graph.returned()
        names = [n for n in self._made if n in read]
        weights = tuple(Value(n, self._made[n].type) for n in names)
        graph = replace(graph, weights=weights)
        load = Graph(
            graph.name,
            weights=tuple(self._sources),
            ops=tuple(self._builder.ops),
            outputs=tuple(self._made[n] for n in names),
        )
        return self.module.with_graph(graph).with_load(_live(load))


def _next_number(load: Graph) -> int:
    numbers = [int(v.name[1:]) for op in load.ops for v in op.results if v.name[1:].isdigit()]
    return max(numbers, default=-1) + 1


def _live(load: Graph) -> Graph:
    """Drop ops and sources that no output needs."""
    needed = {v.name for v in load.outputs}
    kept: list[Op] = []
    for op in reversed(load.ops):
        if any(v.name in needed for v in op.results):
            needed |= {v.name for v in op.operands}
            kept.append(op)
    sources = tuple(w for w in load.weights if w.name in needed)
    return replace(load, weights=sources, ops=tuple(reversed(kept)))


def retype_weights(graph: Graph, made: Mapping[str, Value]) -> Graph:
    """The graph with its weights' types taken from ``made``, in declarations and uses."""

    def swap(value: Value) -> Value:
        found = made.get(value.name)
        return value if found is None else Value(value.name, found.type)

    ops = tuple(replace(op, operands=tuple(swap(v) for v in op.operands)) for op in graph.ops)
    return replace(graph, weights=tuple(swap(w) for w in graph.weights), ops=ops)
