"""Dropping what nothing reads: ops, weights, and the ops that make those weights."""

from dataclasses import replace

from metainfer.ir.graph import Graph, Module, Op
from metainfer.ir.naming import canonical_names
from metainfer.passes.weights import LoadEditor


def prune(module: Module, graph: Graph) -> Module:
    """The module with a graph replaced by its live part.

    Weights that no op reads go, and what made them in the load graph; inputs and states stay, since
    callers pass them. A call of a block that writes a state is never dead.

    Example::

        %0 = exp(%x)                     %0 = linear(%x, @b)
        %1 = linear(%x, @b)      ->      return %0
        return %1
    """
    graph = replace(graph, ops=live_ops(module, graph))
    if module.load(graph.name) is not None:
        module = LoadEditor(module.with_graph(graph), graph.name).finish()
        load = module.load(graph.name)
        assert load is not None  # it was there, and an editor drops none
        return module.with_load(canonical_names(load))
    read = _read(graph)
    weights = tuple(w for w in graph.weights if w.name in read)
    return module.with_graph(replace(graph, weights=weights))


def live_ops(module: Module, graph: Graph) -> tuple[Op, ...]:
    """Ops whose results leave the graph, directly or not, or whose call writes a state."""
    needed = set(graph.returned())
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if any(v.name in needed for v in op.results) or _writes_state(module, op):
            needed |= {v.name for v in op.operands}
            kept.append(op)
    return tuple(reversed(kept))


def _writes_state(module: Module, op: Op) -> bool:
    return op.is_call and bool(module.graph(str(op.attr["block"])).states)


def _read(graph: Graph) -> set[str]:
    return {v.name for op in graph.ops for v in op.operands} | graph.returned()
