"""Flatten a module: calls inlined, names made unique, weights and states by full name.

What runs is a flat list; blocks exist so that people can read a model of many layers.
"""

from dataclasses import dataclass, replace
from typing import Any

from metainfer.ir.graph import Binding, Graph, Module, Op, Value


@dataclass(frozen=True)
class FlatOp:
    """An op of the flat list and the layer it came from.

    Attributes:
        op: operands and results by flat names.
        place: graph and call prefix, for traces ("layer model.layers.3.").
    """

    op: Op
    place: str


@dataclass(frozen=True)
class FlatWeight:
    """A weight of one call.

    Attributes:
        name: flat name, "@" + full name (calls that share a weight share the name).
        graph: graph whose load graph makes it.
        local: name within that graph.
        binding: where the call finds its tensors.
    """

    name: str
    graph: str
    local: str
    binding: Binding


@dataclass(frozen=True)
class FlatModule:
    """A module without calls.

    Attributes:
        inputs: main's inputs.
        outputs: main's outputs.
        ops: in execution order.
        weights: by flat name.
        states: initial state values by flat name ("$model.layers.0.self_attn.kv").
        state_of: final or intermediate version -> flat name of its state.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    ops: tuple[FlatOp, ...]
    weights: dict[str, FlatWeight]
    states: dict[str, Value]
    state_of: dict[str, str]


# The full name of a checkpoint tensor, or (op, attributes, recipes of the operands).
Recipe = str | tuple[Any, ...]


def recipe_of(module: Module, weight: FlatWeight) -> Recipe:
    """How a weight is made, in full names: equal recipes give equal tensors."""
    load = module.load(weight.graph)
    if load is None:
        return weight.binding.full_name(weight.local[1:])
    index = [w.name for w in module.graph(weight.graph).weights].index(weight.local)
    producers = load.producers()

    def recipe(value: Value) -> Recipe:
        op = producers.get(value.name)
        if op is None:
            return weight.binding.full_name(value.name[1:])
        return (op.name, op.attrs, tuple(recipe(v) for v in op.operands))

    return recipe(load.outputs[index])


# Ops that hold all of their operands' numbers in another form.
_FORMS = frozenset(
    [
        "pack", "quantize", "dequantize", "cast", "refine_scales", "unpermute_rope", "transpose",
        "concat", "concat_rows",
    ]
)  # fmt: skip


def parts_of(recipe: Recipe) -> frozenset[Recipe]:
    """What a weight holds, whatever its form: checkpoint tensors, or parts of them."""
    if isinstance(recipe, str) or recipe[0] not in _FORMS:
        return frozenset([recipe])
    return frozenset(part for operand in recipe[2] for part in parts_of(operand))


class _Flattener:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.ops: list[FlatOp] = []
        self.weights: dict[str, FlatWeight] = {}
        self.states: dict[str, Value] = {}
        self.state_of: dict[str, str] = {}
        self.number = 0
        self.taken = {v.name for v in module.main.inputs}

    def fresh_name(self) -> str:
        """A name that no value has: inputs keep theirs, which may be numbers too."""
        while f"%{self.number}" in self.taken:
            self.number += 1
        self.number += 1
        return f"%{self.number - 1}"

    def inline(
        self, graph: Graph, binding: Binding, inputs: tuple[Value, ...], place: str
    ) -> tuple[Value, ...]:
        names: dict[str, Value] = {p.name: v for p, v in zip(graph.inputs, inputs, strict=True)}
        for weight in graph.weights:
            full = Value("@" + binding.full_name(weight.name[1:]), weight.type)
            names[weight.name] = full
            # Two graphs may make one tensor differently: the maker is part of the name then.
            known = self.weights.get(full.name)
            if known is not None and known.graph != graph.name:
                full = Value(f"{full.name}:{graph.name}", weight.type)
                names[weight.name] = full
            self.weights[full.name] = FlatWeight(full.name, graph.name, weight.name, binding)
        for state in graph.states:
            full = Value("$" + binding.full_name(state.name[1:]), state.type)
            names[state.name] = full
            self.states[full.name] = full
            self.state_of[full.name] = full.name
        for op in graph.ops:
            self.op(op, names, place)
        return tuple(names[v.name] for v in graph.outputs)

    def op(self, op: Op, names: dict[str, Value], place: str) -> None:
        operands = tuple(names.get(v.name, v) for v in op.operands)
        if op.is_call:
            block = self.module.graph(str(op.attr["block"]))
            binding = Binding.of(op)
            made = self.inline(block, binding, operands, f"{block.name} {binding.prefix}")
            names.update((v.name, m) for v, m in zip(op.results, made, strict=True))
            return
        results = []
        for value in op.results:
            fresh = Value(self.fresh_name(), value.type)
            names[value.name] = fresh
            results.append(fresh)
            if value.is_state:
                before = next(v for v in operands if v.is_state and v.type == value.type)
                self.state_of[fresh.name] = self.state_of[before.name]
        after = tuple(names[n].name for n in op.after)
        flat = replace(op, operands=operands, results=tuple(results), after=after)
        self.ops.append(FlatOp(flat, place))


def flatten(module: Module) -> FlatModule:
    """Inline all calls of a verified module."""
    run = _Flattener(module)
    main = module.main
    outputs = run.inline(main, Binding(""), main.inputs, "main")
    return FlatModule(main.inputs, outputs, tuple(run.ops), run.weights, run.states, run.state_of)
