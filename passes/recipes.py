"""Recipes: how one weight is made, taken out of a load graph and put into another."""

from collections.abc import Sequence
from dataclasses import replace

from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.naming import canonical_names
from metainfer.ir.printer import print_graph
from metainfer.passes.weights import load_of


def recipe_of(module: Module, graph: str, weight: str) -> Graph:
    """The part of a graph's load graph that makes one weight: its sources, ops, one output.

    Raises: KeyError if the graph has no such weight.
    """
    load = load_of(module, graph)
    names = [w.name for w in module.graph(graph).weights]
    made = dict(zip(names, load.outputs, strict=True))[weight]
    needed = {made.name}
    ops: list[Op] = []
    for op in reversed(load.ops):
        if any(v.name in needed for v in op.results):
            needed |= {v.name for v in op.operands}
            ops.append(op)
    sources = tuple(w for w in load.weights if w.name in needed)
    return Graph("recipe", weights=sources, ops=tuple(reversed(ops)), outputs=(made,))


def recipe_text(recipe: Graph) -> str:
    """Equal texts make weights alike, from sources of whatever names."""
    names = [f"@{i}" for i in range(len(recipe.weights))]
    return print_graph(canonical_names(_renamed(recipe, names)))


def _renamed(recipe: Graph, sources: Sequence[str]) -> Graph:
    """The recipe with its sources under other names."""
    swap = {w.name: Value(n, w.type) for w, n in zip(recipe.weights, sources, strict=True)}

    def apply(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(swap.get(v.name, v) for v in values)

    ops = tuple(replace(op, operands=apply(op.operands)) for op in recipe.ops)
    return replace(recipe, weights=tuple(swap.values()), ops=ops, outputs=apply(recipe.outputs))


def source_names(weight: str, recipe: Graph) -> tuple[str, ...]:
    """Names for the sources of a weight: its own, numbered where there are several."""
    if len(recipe.weights) == 1:
        return (weight,)
    return tuple(f"{weight}.{i}" for i in range(len(recipe.weights)))


def add_weight(
    module: Module, graph: str, weight: str, recipe: Graph, sources: Sequence[str]
) -> Module:
    """Add a weight to a graph, made by a recipe from sources of the given names ("@a").

    Example: before -> after
        weights @a : f32[8]                 ->  weights @a : f32[8]  @b : f32[8]
        load: return @a                     ->  load: %0 = cast(@s) {dtype = "f32"} / return @a, %0
    """
    target = module.graph(graph)
    recipe = _renamed(recipe, sources)
    made = recipe.outputs[0]
    target = replace(target, weights=(*target.weights, Value(weight, made.type)))
    plain = module.load(graph) is None and not recipe.ops and made.name == weight
    if plain:
        return module.with_graph(target)
    load = load_of(module, graph)
    known = {w.name for w in load.weights}
    fresh = tuple(w for w in recipe.weights if w.name not in known)
    ops, made = _appended(load, recipe)
    load = replace(load, weights=(*load.weights, *fresh), ops=ops, outputs=(*load.outputs, made))
    return module.with_graph(target).with_load(canonical_names(load))


def _appended(load: Graph, recipe: Graph) -> tuple[tuple[Op, ...], Value]:
    """The load graph's ops and the recipe's behind them, under names of their own."""
    swap: dict[str, Value] = {}

    def apply(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(swap.get(v.name, v) for v in values)

    ops = list(load.ops)
    for op in recipe.ops:
        operands = apply(op.operands)
        swap.update((v.name, Value(f"{v.name}:added", v.type)) for v in op.results)
        ops.append(replace(op, operands=operands, results=apply(op.results)))
    return tuple(ops), apply(recipe.outputs)[0]
