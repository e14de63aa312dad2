"""Canonical form: no dead code, no duplicates, small constants computed, view chains joined."""

from dataclasses import replace

from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.record import NONDETERMINISTIC, STATEFUL, op_def
from metainfer.ir.printer import print_attr
from metainfer.passes.fold import fold
from metainfer.passes.prune import prune
from metainfer.passes.simplify import Known, simplify, with_normal_attrs
from metainfer.passes.target import Target

COMMUTATIVE = frozenset(
    ["add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or"]
)


def canonicalize(module: Module, target: Target) -> Module:
    """Bring every graph to one form: what can be left away is left away.

    Order stays, and a second run changes nothing. Numbers stay to the last bit, but for the sign
    of a zero to which 0 is added.

    Before::

        graph f(%x: f32[T,4,8]) {
          %0 = full() {dtype = "f32", shape = (), value = 0.0} : f32[]
          %1 = add(%x, %0) : f32[T,4,8]
          %2 = reshape(%1) {shape = (dim(T), 32)} : f32[T,32]
          %3 = reshape(%2) {shape = (dim(T), 8, 4)} : f32[T,8,4]
          %4 = exp(%x) : f32[T,4,8]
          return %3
        }

    After::

        graph f(%x: f32[T,4,8]) {
          %0 = reshape(%x) {shape = (dim(T), 8, 4)} : f32[T,8,4]
          return %0
        }
    """
    for graph in module.graphs:
        module = prune(module, _canonical(graph))
        module = module.with_graph(canonical_names(module.graph(graph.name)))
    return module


def _canonical(graph: Graph) -> Graph:
    """Simplify, fold and merge ops in one walk; each op meets operands that are simple already."""
    known = Known()
    alias: dict[str, Value] = {}
    first: dict[tuple[object, ...], Op] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = replace(op, operands=_apply(op.operands, alias))
        made = _settle(with_normal_attrs(op), known)
        if isinstance(made, Value):
            alias[op.result.name] = made
            continue
        key = _key(made)
        twin = first.setdefault(key, made) if key is not None else made
        if twin is not made:
            alias.update(
                (old.name, new) for old, new in zip(made.results, twin.results, strict=True)
            )
            continue
        known.add(made)
        ops.append(made)
    return replace(
        graph,
        ops=tuple(ops),
        outputs=_apply(graph.outputs, alias),
        state_outputs=_apply(graph.state_outputs, alias),
    )


def _apply(values: tuple[Value, ...], alias: dict[str, Value]) -> tuple[Value, ...]:
    return tuple(alias.get(v.name, v) for v in values)


def _settle(op: Op, known: Known) -> Op | Value:
    """Simplify until nothing more is known of the op."""
    while True:
        simpler = simplify(op, known)
        if isinstance(simpler, Value):
            return simpler
        if simpler is None:
            return fold(op, known.makers) or op
        op = simpler


def _key(op: Op) -> tuple[object, ...] | None:
    """Equal keys mean equal results; None where an op must stay as it is."""
    if op.name in ("call", "fused") or op.choices or op.stream:
        return None
    if op_def(op.name).traits & {STATEFUL, NONDETERMINISTIC}:
        return None
    names = [v.name for v in op.operands]
    if op.name in COMMUTATIVE:
        names.sort()
    # Text tells 0 from -0 and 1 from true, which are equal in Python.
    return (op.name, *names, *((k, print_attr(v)) for k, v in op.attrs))
