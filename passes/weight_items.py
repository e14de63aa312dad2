"""Weights whose format is chosen together: those that one op reads, with all their readers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from metainfer.ir.dtypes import DType
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.passes.weights import LoadEditor

# Operands that are weights, by op; a kernel takes those of one op in one format.
WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "linear": (1,),
    "embedding": (1,),
    "experts": (3, 4, 5),
}
# What stands between the scores of a router and the choice of its experts.
_SCORING = frozenset(
    {"softmax", "sigmoid", "cast", "add", "mul", "div", "sqrt", "softplus", "reshape", "sub"}
)


@dataclass(frozen=True)
class Item:
    """Weights of one graph that take one format.

    Attributes:
        graph: its name.
        weights: their names.
        stored: the same before their load graph widened them, in order.
        made: type that the graph reads now, the activations' as captured.
        readers: every op that reads one of them.
        calls: how often the graph is called, each time with weights of its own.
        is_router: whether the scores that choose experts come from here.
    """

    graph: str
    weights: tuple[str, ...]
    stored: tuple[Value, ...]
    made: DType
    readers: tuple[Op, ...]
    calls: int
    is_router: bool

    @property
    def is_outer(self) -> bool:
        """Whether it lies outside the layers: a table or a head."""
        return self.graph == "main"

    @property
    def own(self) -> DType | None:
        """The checkpoint's format, None where the weights have several."""
        found = {v.tensor.dtype for v in self.stored}
        return found.pop() if len(found) == 1 else None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the weights."""
        return tuple(tuple(n.static for n in v.tensor.shape) for v in self.stored)


def weight_items(module: Module) -> Iterator[Item]:
    """All weights whose format can be chosen, graph by graph."""
    for graph in module.graphs:
        calls = sum(str(c.attr["block"]) == graph.name for c in module.calls())
        editor = LoadEditor(module, graph.name)
        for weights, readers in _groups(graph):
            yield Item(
                graph.name,
                weights,
                tuple(_stored(editor, editor.made(w)) for w in weights),
                editor.made(weights[0]).tensor.dtype,
                readers,
                1 if graph.name == "main" else calls,
                any(reaches_topk(graph, op) for op in readers),
            )


def _groups(graph: Graph) -> Iterator[tuple[tuple[str, ...], tuple[Op, ...]]]:
    """Weights joined by common readers; none of which an op of another kind reads."""
    readers = {w.name: _readers(graph, w.name) for w in graph.weights}
    seen: set[str] = set()
    for weight in graph.weights:
        if weight.name in seen:
            continue
        names, frontier = [], [weight.name]
        while frontier:
            name = frontier.pop(0)
            if name in names:
                continue
            names.append(name)
            frontier += [v.name for op in readers[name] or () for v in weights_of(op)]
        seen |= set(names)
        ops = [op for op in graph.ops if any(op in (readers[n] or ()) for n in names)]
        if ops and all(readers[n] for n in names):
            yield tuple(names), tuple(ops)


def _readers(graph: Graph, weight: str) -> list[Op] | None:
    """Ops that read a weight, None if one of them takes no other format."""
    found: list[Op] = []
    for op in graph.ops:
        for position, value in enumerate(op.operands):
            if value.name != weight:
                continue
            if position not in WEIGHTS.get(op.name, ()):
                return None
            found.append(op)
    return found


def weights_of(op: Op) -> tuple[Value, ...]:
    """Operands of an op whose format can be chosen."""
    return tuple(op.operands[i] for i in WEIGHTS.get(op.name, ()) if op.operands[i].is_weight)


def retyped(op: Op, dtype: DType) -> Op:
    """The op with its weights in a format."""
    places = WEIGHTS.get(op.name, ())
    operands = tuple(
        replace(v, type=replace(v.tensor, dtype=dtype)) if v.is_weight and i in places else v
        for i, v in enumerate(op.operands)
    )
    return replace(op, operands=operands)


def _stored(editor: LoadEditor, made: Value) -> Value:
    """The weight before its load graph widened it to the activations' type."""
    for op in reversed(editor.ops):
        if op.name in ("dequantize", "cast") and op.result.name == made.name:
            return op.operands[0]
    return made


def reaches_topk(graph: Graph, op: Op) -> bool:
    """Whether a linear's result is scored and then the ground of a choice."""
    if op.name != "linear":
        return False
    uses = graph.uses()
    frontier, seen = [op.result.name], set[str]()
    while frontier:
        name = frontier.pop()
        if name in seen:
            continue
        seen.add(name)
        for user in uses.get(name, ()):
            if user.name in ("topk", "choose_experts"):
                return True
            if user.name in _SCORING:
                frontier += [v.name for v in user.results]
    return False


def narrow_rows(shapes: Sequence[tuple[int, ...]], group: int) -> int:
    """Width of the first weight whose rows are no whole groups, 0 if all are."""
    return next((shape[-1] for shape in shapes if shape[-1] % group), 0)
