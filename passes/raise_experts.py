"""raise_experts: static loops over experts, and products by gathered weights, become one op."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

from metainfer.ir.dims import dim
from metainfer.ir.graph import Binding, Graph, Module, Op, Value
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.record import Builder
from metainfer.passes.expert_gathers import Gathered, find_gathered
from metainfer.passes.expert_loops import Loop, Part, find_loop
from metainfer.passes.prune import prune
from metainfer.passes.recipes import add_weight, recipe_of, recipe_text
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import LoadEditor

# What may stand between a checkpoint's tensors and the stacked weights.
_FORMS = frozenset(["slice", "reshape", "concat", "transpose", "cast"])
_WEIGHTS = (3, 4, 5)
_NUMBER = re.compile(r"\d+")


def raise_experts(module: Module, target: Target) -> Module:
    """Let one `experts` op stand for each mixture that a graph spells out.

    Runs before `canonicalize`, which merges views over the borders of what is looked for. Weights
    of single experts are stacked in the load graph; whatever the op's weights were cut or joined of
    moves there too, so that kernels may pack them.

    Before::

        graph f(%x: f32[T,8], %ids: i64[T,2], %w: f32[T,2],
                @gate: f32[3,12,8], @up: f32[3,12,8], @down: f32[3,8,12]) {
          %0 = gather(@gate, %ids) : f32[T,2,12,8]
          %1 = gather(@up, %ids) : f32[T,2,12,8]
          %2 = gather(@down, %ids) : f32[T,2,8,12]
          %3 = reshape(%x) {shape = (dim(T), 1, 8, 1)} : f32[T,1,8,1]
          %4 = matmul(%0, %3) : f32[T,2,12,1]
          %5 = matmul(%1, %3) : f32[T,2,12,1]
          %6 = silu_mul(%4, %5) : f32[T,2,12,1]
          %7 = matmul(%2, %6) : f32[T,2,8,1]
          %8 = reshape(%7) {shape = (dim(T), 2, 8)} : f32[T,2,8]
          %9 = reshape(%w) {shape = (dim(T), 2, 1)} : f32[T,2,1]
          %10 = mul(%8, %9) : f32[T,2,8]
          %11 = sum(%10) {dims = (1,)} : f32[T,8]
          return %11
        }

    After::

        graph f(%x: f32[T,8], %ids: i64[T,2], %w: f32[T,2],
                @gate: f32[3,12,8], @up: f32[3,12,8], @down: f32[3,8,12]) {
          %0 = experts(%x, %ids, %w, @gate, @up, @down) : f32[T,8]
          return %0
        }
    """
    module = _inlined(module)
    for graph in module.graphs:
        module = _raised(module, graph.name, target)
        module = _hoisted(module, graph.name)
    return _called_only(module)


def _raised(module: Module, name: str, target: Target) -> Module:
    while (found := _find(module.graph(name))) is not None:
        graph = module.graph(name)
        builder = Builder(_next_number(graph))
        if isinstance(found, Loop):
            module, stacks = _stacked(module, name, found, builder)
            operands = (found.experts[0].x, found.ids, found.weights)
            activation, what = found.experts[0].activation, f"a loop over {len(found.experts)}"
        else:
            stacks = _cut(found, builder)
            operands, activation = found.operands, found.activation
            what = "gathered weights"
        result = builder.emit(
            "experts", *operands, *stacks, activation=activation, source=found.root.source
        )
        for other in found.others if isinstance(found, Loop) else ():
            result = builder.emit("add", other, result, source=found.root.source)
        module = _spliced(module, name, found.root, builder.ops, result)
        reason = f"{what} computes the same numbers, and visits every expert"
        subject = f"{name}: {found.root.result.name}"
        target.report.add(Decision("raise_experts", subject, "experts", reason))
    return module


def _find(graph: Graph) -> Loop | Gathered | None:
    return find_loop(graph) or find_gathered(graph)


def _next_number(graph: Graph) -> int:
    numbers = [int(v.name[1:]) for v in graph.definitions().values() if v.name[1:].isdigit()]
    return max(numbers, default=-1) + 1


def _spliced(module: Module, name: str, root: Op, ops: Sequence[Op], result: Value) -> Module:
    """The graph with ops in place of one, whose result gets the last one's value."""
    graph = module.graph(name)
    last = replace(ops[-1], results=(replace(root.result, type=result.type),))
    made: list[Op] = []
    for op in graph.ops:
        made.extend([*ops[:-1], last] if op is root or op == root else [op])
    module = prune(module, replace(graph, ops=tuple(made)))
    return module.with_graph(canonical_names(module.graph(name)))


# --- weights -----------------------------------------------------------------------------------


def _cut(found: Gathered, builder: Builder) -> list[Value]:
    made = []
    for weight, start, stop in (found.gate, found.up):
        whole = stop - start == weight.tensor.shape[1].static
        cut = weight if whole else builder.emit("slice", weight, dim=1, start=start, stop=stop)
        made.append(cut)
    return [*made, found.down]


def _stacked(module: Module, name: str, loop: Loop, builder: Builder) -> tuple[Module, list[Value]]:
    """The loop's weights, one behind the other: gate, up, down."""
    made = []
    for role in range(3):
        parts = [e.parts[role] for e in loop.experts]
        module, value = _stack_of(module, name, parts, builder)
        made.append(value)
    return module, made


def _stack_of(
    module: Module, name: str, parts: Sequence[Part], builder: Builder
) -> tuple[Module, Value]:
    first = parts[0].weight
    held = [(p.weight.name, p.index) for p in parts]
    if held == [(first.name, e) for e in range(len(parts))] and first.tensor.shape[0] == dim(
        len(parts)
    ):
        return module, first
    family = _family([p.weight.name for p in parts]) if all(p.index < 0 for p in parts) else ""
    if family:
        found = _with_family(module, name, [p.weight for p in parts], family)
        if found is not None:
            return found
    matrices = []
    for part in parts:
        value = part.weight
        if part.index >= 0:
            start = part.index
            value = builder.emit("slice", value, dim=0, start=start, stop=start + 1)
        else:
            shape = tuple(n.static for n in value.tensor.shape)
            value = builder.emit("reshape", value, shape=(1, *shape))
        matrices.append(value)
    return module, builder.emit("concat", *matrices, dim=0)


def _family(names: Sequence[str]) -> str:
    """``@a.*.w`` for ``@a.0.w, @a.1.w ...``; "" if the names are no such series."""
    for match in _NUMBER.finditer(names[0]):
        start, end = match.span()
        lead, tail = names[0][:start], names[0][end:]
        if not lead.endswith(".") or not tail.startswith("."):
            continue
        if list(names) == [f"{lead}{n}{tail}" for n in range(len(names))]:
            return f"{lead}*{tail}"
    return ""


def _with_family(
    module: Module, name: str, weights: Sequence[Value], family: str
) -> tuple[Module, Value] | None:
    """Weights that the checkpoint holds in one form, as one stacked tensor of it."""
    recipes = [recipe_of(module, name, w.name) for w in weights]
    first = recipes[0]
    forms = [op.name for op in first.ops]
    if len({recipe_text(r) for r in recipes}) > 1 or len(first.weights) != 1:
        return None
    if not set(forms) <= {"cast", "dequantize"}:
        return None
    source = first.weights[0]
    shape = (dim(len(weights)), *source.tensor.shape)
    value = stacked = Value(family, source.tensor.with_shape(shape))
    builder = Builder()
    for op in first.ops:
        value = builder.emit(op.name, value, dtype=op.attr["dtype"])
    recipe = Graph("recipe", weights=(stacked,), ops=tuple(builder.ops), outputs=(value,))
    module = add_weight(module, name, family, recipe, (family,))
    return module, Value(family, value.type)


def _hoisted(module: Module, name: str) -> Module:
    """Cuts and joins of weights that experts read, moved to the load graph."""
    while (found := _computed_weight(module.graph(name))) is not None:
        graph = module.graph(name)
        editor = LoadEditor(module, name)
        made = _moved(found, graph.producers(), editor)
        weight = editor.add(_free_name(graph, found), made)
        module = editor.finish(partial(_reading, {found.name: weight}))
        module = prune(module, module.graph(name))
        module = module.with_graph(canonical_names(module.graph(name)))
    return module


def _moved(value: Value, producers: Mapping[str, Op], editor: LoadEditor) -> Value:
    if value.is_weight:
        return editor.made(value.name)
    op = producers[value.name]
    operands = [_moved(v, producers, editor) for v in op.operands]
    return editor.emit(op.name, *operands, **op.attr)


def _reading(swap: Mapping[str, Value], graph: Graph) -> Graph:
    """The graph with other values read in place of some."""
    ops = tuple(
        replace(op, operands=tuple(swap.get(v.name, v) for v in op.operands)) for op in graph.ops
    )
    return replace(graph, ops=ops)


def _computed_weight(graph: Graph) -> Value | None:
    """An operand of experts that only weights make, by views."""
    producers = graph.producers()

    def is_view(value: Value) -> bool:
        op = producers.get(value.name)
        if op is None:
            return value.is_weight
        return op.name in _FORMS and all(map(is_view, op.operands))

    for op in graph.ops:
        for position in _WEIGHTS if op.name == "experts" else ():
            value = op.operands[position]
            if not value.is_weight and is_view(value):
                return value
    return None


def _free_name(graph: Graph, value: Value) -> str:
    """A name after the first weight that the value is made of."""
    producers = graph.producers()
    while not value.is_weight:
        value = producers[value.name].operands[0]
    taken = {w.name for w in graph.weights}
    number = 1
    while f"{value.name}.part{number}" in taken:
        number += 1
    return f"{value.name}.part{number}"


# --- experts that are blocks -------------------------------------------------------------------


def _inlined(module: Module) -> Module:
    """Calls of MLPs in main whose results main adds up, in place of the calls."""
    calls = [op for op in module.main.ops if op.is_call and _is_mlp(module, op)]
    if len(calls) < 2:
        return module
    found = find_loop(reduce(_inline, calls, module).main)
    if found is None:
        return module
    read = {p.weight.name for e in found.experts for p in e.parts}
    return reduce(_inline, [c for c in calls if read & _weights_of(module, c)], module)


def _weights_of(module: Module, call: Op) -> set[str]:
    block, binding = module.graph(str(call.attr["block"])), Binding.of(call)
    return {f"@{binding.full_name(w.name[1:])}" for w in block.weights}


def _is_mlp(module: Module, call: Op) -> bool:
    block = module.graph(str(call.attr["block"]))
    names = sorted(op.name for op in block.ops)
    is_gated = names in (["linear"] * 3 + ["silu_mul"], ["gelu_mul", *["linear"] * 3])
    return is_gated and not block.states and len(block.inputs) == len(block.outputs) == 1


def _inline(module: Module, call: Op) -> Module:
    block, binding = module.graph(str(call.attr["block"])), Binding.of(call)
    names = {block.inputs[0].name: call.operands[0]}
    for weight in block.weights:
        full = f"@{binding.full_name(weight.name[1:])}"
        names[weight.name] = Value(full, weight.type)
        recipe = recipe_of(module, block.name, weight.name)
        sources = [f"@{binding.full_name(s.name[1:])}" for s in recipe.weights]
        module = add_weight(module, "main", full, recipe, sources)
    names[block.outputs[0].name] = call.result

    def local(value: Value) -> Value:
        return names.get(value.name) or Value(f"{call.result.name}.{value.name[1:]}", value.type)

    ops = [
        replace(op, operands=tuple(map(local, op.operands)), results=tuple(map(local, op.results)))
        for op in block.ops
    ]
    main = module.main
    place = next(i for i, op in enumerate(main.ops) if op.is_call and op.result == call.result)
    made = (*main.ops[:place], *ops, *main.ops[place + 1 :])
    return module.with_graph(replace(main, ops=made))


def _called_only(module: Module) -> Module:
    """The module without blocks that nothing calls any more."""
    called = {str(op.attr["block"]) for op in module.calls()} | {"main"}
    graphs = tuple(g for g in module.graphs if g.name in called)
    loads = tuple(g for g in module.loads if g.name in called)
    return replace(module, graphs=graphs, loads=loads)
