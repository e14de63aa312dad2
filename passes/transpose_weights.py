"""Weights stored [in, out] are turned while they are loaded, so that their products are linears."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.naming import canonical_names
from metainfer.passes.weights import LoadEditor


def transpose_weights(module: Module) -> Module:
    """Let a linear stand for each product by a weight that is used in no other way.

    Example: before -> after
        load: return @w                     ->  load: %0 = transpose(@w) {perm = (1, 0)} / return %0
        %0 = matmul(%x, @w) : f32[T,16]     ->  %0 = linear(%x, @w) : f32[T,16]
    """
    for graph in module.graphs:
        names = _turnable(graph)
        if not names:
            continue
        editor = LoadEditor(module, graph.name)
        for name in names:
            editor.update(name, editor.emit("transpose", editor.made(name), perm=(1, 0)))
        module = editor.finish(partial(_with_linears, turned=frozenset(names)))
        load = module.load(graph.name)
        assert load is not None  # the editor has just made it
        module = module.with_load(canonical_names(load))
    return module


def _turnable(graph: Graph) -> list[str]:
    """Weights of two dims that are read as the second operand of plain products only."""
    uses: Mapping[str, list[Op]] = graph.uses()
    returned = graph.returned()
    return [
        w.name
        for w in graph.weights
        if w.tensor.rank == 2
        and w.name not in returned
        and uses.get(w.name)
        and all(_is_product_by(op, w) for op in uses[w.name])
    ]


def _is_product_by(op: Op, weight: Value) -> bool:
    if op.name != "matmul" or op.attr.get("transpose_b", False):
        return False
    first, second = op.operands
    return second.name == weight.name and first.name != weight.name


def _with_linears(graph: Graph, turned: frozenset[str]) -> Graph:
    ops = tuple(
        replace(op, name="linear", attrs=())
        if op.name == "matmul" and op.operands[1].name in turned
        else op
        for op in graph.ops
    )
    return replace(graph, ops=ops)
