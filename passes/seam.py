"""Seams between blocks: the norm that begins a block moves to the end of the call before it.

Where products read the norm rounded to a block format, the rounding goes with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from metainfer.ir.graph import Attr, Binding, Graph, Module, Op, Value, attrs_of
from metainfer.ir.naming import canonical_names
from metainfer.ir.printer import print_attr
from metainfer.passes.prune import prune
from metainfer.passes.recipes import add_weight, recipe_of, recipe_text, source_names
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import load_of

NORMS = frozenset(["rms_norm", "layer_norm"])
_ROLES = ("weight", "bias")


@dataclass(frozen=True)
class _Norm:
    """A norm, and where its weights come from.

    Attributes:
        op: the norm in its own graph.
        graph: name of that graph.
        recipes: how each weight is made.
        norm_text: equal texts are the same norm, weights and rounding apart.
        rounding: the one op that reads it there, where that rounds it to a block format: it goes
            where the norm goes.
    """

    op: Op
    graph: str
    recipes: tuple[Graph, ...]
    norm_text: str
    rounding: Op | None = None

    @property
    def text(self) -> str:
        """The norm's text, and that of its rounding."""
        if self.rounding is None:
            return self.norm_text
        return f"{self.norm_text}\n{_attrs_text(self.rounding)}"

    @property
    def last(self) -> Op:
        """The op that makes what products read."""
        return self.op if self.rounding is None else self.rounding

    def made(self, x: Value, weights: Sequence[Value], name: str) -> tuple[Op, ...]:
        """The norm of a value, and its rounding."""
        normed = Value(name, x.tensor.with_dtype(self.op.result.tensor.dtype))
        norm = replace(self.op, operands=(x, *weights), results=(normed,))
        if self.rounding is None:
            return (norm,)
        rounded = Value(f"{name}:rounded", x.tensor.with_dtype(self.last.result.tensor.dtype))
        return norm, replace(self.rounding, operands=(normed,), results=(rounded,))


@dataclass(frozen=True)
class _Head:
    """A block's norm of its input ``position``."""

    position: int
    norm: _Norm


@dataclass(frozen=True)
class _Tail:
    """A norm to be done at the end of a call, of its result ``position``.

    Attributes:
        position: which result.
        norm: the norm.
        sources: full names of the checkpoint tensors of its weights, one tuple a weight.
    """

    position: int
    norm: _Norm
    sources: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Variant:
    """What becomes of a block: whether its norm is done before, and which norm it does after."""

    block: str
    headless: bool
    position: int = -1
    text: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the block stays as it is."""
        return not self.headless and not self.text


@dataclass
class _Plan:
    """Seams of a module, by the position of ops in main."""

    heads: dict[str, _Head] = field(default_factory=dict[str, _Head])
    tails: dict[int, _Tail] = field(default_factory=dict[int, _Tail])
    seamed: set[int] = field(default_factory=set[int])
    finals: dict[int, int] = field(default_factory=dict[int, int])

    def variant(self, index: int, call: Op) -> _Variant:
        """What a call calls."""
        block = str(call.attr["block"])
        tail = self.tails.get(index)
        if tail is None:
            return _Variant(block, block in self.heads)
        return _Variant(block, block in self.heads, tail.position, tail.norm.text)


def seam(module: Module, target: Target) -> Module:
    """Let each call end with the norm that the next one begins with.

    The block then takes the residual stream and its norm, and returns both, so that `fuse` sees
    the add and the norm that follows it in one graph. The next layer's weight is bound by the call.
    Main does the first norm; its own last norm, of the result of the last call or of rows gathered
    from it, moves into that call where it is the same kind of norm.

    Before::

        module m {
          dim T in [1, 8]
          block layer(%x: f32[T,4]) {
            weights {
              @norm : f32[4]
              @w : f32[4,4]
            }
            %0 = rms_norm(%x, @norm) {eps = 1e-05} : f32[T,4]
            %1 = linear(%0, @w) : f32[T,4]
            %2 = add(%x, %1) : f32[T,4]
            return %2
          }
          main(%x: f32[T,4]) {
            weights {
              @last : f32[4]
            }
            %0 = call layer(%x) {prefix = "0."} : f32[T,4]
            %1 = call layer(%0) {prefix = "1."} : f32[T,4]
            %2 = rms_norm(%1, @last) {eps = 1e-05} : f32[T,4]
            return %2
          }
        }

    After::

        module m {
          dim T in [1, 8]
          block layer(%x: f32[T,4], %x.normed: f32[T,4]) {
            weights {
              @w : f32[4,4]
              @next_norm.weight : f32[4]
            }
            %0 = linear(%x.normed, @w) : f32[T,4]
            %1 = add(%x, %0) : f32[T,4]
            %2 = rms_norm(%1, @next_norm.weight) {eps = 1e-05} : f32[T,4]
            return %1, %2
          }
          main(%x: f32[T,4]) {
            weights {
              @0.norm : f32[4]
            }
            %0 = rms_norm(%x, @0.norm) {eps = 1e-05} : f32[T,4]
            %1, %2 = call layer(%x, %0)
              {bind = (("next_norm.weight", "1.norm"),), prefix = "0."} : f32[T,4], f32[T,4]
            %3, %4 = call layer(%1, %2)
              {bind = (("next_norm.weight", "last"),), prefix = "1."} : f32[T,4], f32[T,4]
            return %4
          }
        }
    """
    plan = _plan(module)
    if not plan.tails:
        return module
    names = _variant_names(module, plan)
    old = module
    for variant, name in names.items():
        module = _add_variant(module, old, plan, variant, name)
    module = _rewrite_main(module, old, plan, names)
    module = _without_uncalled(module, set(names.values()))
    for graph in module.graphs:
        module = prune(module, graph)
        module = module.with_graph(canonical_names(module.graph(graph.name)))
    _report(old, plan, names, target)
    return module


# --- planning ----------------------------------------------------------------------------------


def _plan(module: Module) -> _Plan:
    plan = _Plan()
    heads = {g.name: _head(module, g) for g in module.graphs if g.name != "main"}
    made = _made_by_calls(module.main)
    wanted: list[tuple[int, Op, _Head]] = []
    for index, call in enumerate(module.main.ops):
        head = heads.get(str(call.attr.get("block", ""))) if call.is_call else None
        if head is not None:
            wanted.append((index, call, head))
    joined = {str(c.attr["block"]) for _, c, h in wanted if c.operands[h.position].name in made}
    plan.heads = {name: head for name, head in heads.items() if head and name in joined}
    for index, call, head in wanted:
        place = made.get(call.operands[head.position].name)
        if place is None or place[0] in plan.tails:
            continue
        sources = _full_sources(head.norm, Binding.of(call))
        plan.tails[place[0]] = _Tail(place[1], head.norm, sources)
        plan.seamed.add(index)
    if plan.tails:
        _plan_last(module, plan, made)
    return plan


def _made_by_calls(main: Graph) -> dict[str, tuple[int, int]]:
    """Value -> (index of the call that makes it, which result)."""
    return {
        value.name: (index, position)
        for index, op in enumerate(main.ops)
        if op.is_call
        for position, value in enumerate(op.results)
    }


def _head(module: Module, graph: Graph) -> _Head | None:
    """The one norm of an input that a block has."""
    positions = {v.name: i for i, v in enumerate(graph.inputs)}
    norms = [op for op in graph.ops if op.name in NORMS and op.operands[0].name in positions]
    if len(norms) != 1 or not all(v.is_weight for v in norms[0].operands[1:]):
        return None
    norm = replace(_norm(module, graph.name, norms[0]), rounding=_rounding(graph, norms[0]))
    return _Head(positions[norms[0].operands[0].name], norm)


def _rounding(graph: Graph, norm: Op) -> Op | None:
    """What rounds a norm to a block format, if nothing else reads it."""
    readers = graph.uses().get(norm.result.name, [])
    is_alone = len(readers) == 1 and norm.result.name not in graph.returned()
    return readers[0] if is_alone and readers[0].name == "quantize" else None


def _norm(module: Module, graph: str, op: Op) -> _Norm:
    recipes = tuple(recipe_of(module, graph, w.name) for w in op.operands[1:])
    parts = [_attrs_text(op), str(op.operands[0].type), *map(recipe_text, recipes)]
    return _Norm(op, graph, recipes, "\n".join(parts))


def _attrs_text(op: Op) -> str:
    return "\n".join([op.name, *(f"{k} = {print_attr(v)}" for k, v in op.attrs)])


def _full_sources(norm: _Norm, binding: Binding) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(binding.full_name(w.name[1:]) for w in recipe.weights) for recipe in norm.recipes
    )


def _plan_last(module: Module, plan: _Plan, made: dict[str, tuple[int, int]]) -> None:
    """Let calls do main's own norms, where their block does the same norm for its neighbours."""
    producers, uses = module.main.producers(), module.main.uses()
    done: dict[str, set[str]] = {}
    for index, tail in plan.tails.items():
        done.setdefault(str(module.main.ops[index].attr["block"]), set()).add(tail.norm.norm_text)
    for index, op in enumerate(module.main.ops):
        if op.name not in NORMS or not all(v.is_weight for v in op.operands[1:]):
            continue
        source = op.operands[0]
        gather = producers.get(source.name)
        if gather is not None and gather.name == "gather":
            if len(uses[source.name]) > 1 or source.name in module.main.returned():
                continue
            source = gather.operands[0]
        place = made.get(source.name)
        if place is None or place[0] in plan.tails:
            continue
        norm = _norm(module, "main", replace(op, operands=(source, *op.operands[1:])))
        if norm.norm_text in done.get(str(module.main.ops[place[0]].attr["block"]), ()):
            plan.tails[place[0]] = _Tail(place[1], norm, _full_sources(norm, Binding("")))
            plan.finals[index] = place[0]


def _variant_names(module: Module, plan: _Plan) -> dict[_Variant, str]:
    """A name for each variant; the one called most keeps the block's own."""
    called: dict[_Variant, int] = {}
    for index, op in enumerate(module.main.ops):
        if op.is_call:
            variant = plan.variant(index, op)
            called[variant] = called.get(variant, 0) + 1
    names: dict[_Variant, str] = {}
    taken = {g.name for g in module.graphs}
    by_use = sorted(called, key=lambda v: (not v.is_plain, -called[v]))
    for variant in by_use:
        if variant.block not in names.values():
            names[variant] = variant.block
            continue
        free = (f"{variant.block}_{n}" for n in count(2))
        names[variant] = next(name for name in free if name not in taken)
        taken.add(names[variant])
    return {variant: names[variant] for variant in called}


# --- rewriting ---------------------------------------------------------------------------------


def _add_variant(module: Module, old: Module, plan: _Plan, variant: _Variant, name: str) -> Module:
    """The module with a variant of a block, in place of the block or beside it."""
    if variant.is_plain:
        return module
    block = replace(old.graph(variant.block), name=name)
    load = old.load(variant.block)
    if name == variant.block:
        module = module.with_graph(block)
    else:
        module = replace(module, graphs=(*module.graphs[:-1], block, module.graphs[-1]))
    if load is not None:
        module = module.with_load(replace(load, name=name))
    if variant.headless:
        module = module.with_graph(_headless(module.graph(name), plan.heads[variant.block]))
    if variant.text:
        tail = next(
            t
            for t in plan.tails.values()
            if (t.norm.text, t.position) == (variant.text, variant.position)
        )
        module = _with_tail(module, name, tail)
    return prune(module, module.graph(name))


def _headless(graph: Graph, head: _Head) -> Graph:
    """The block that takes the norm of its input instead of computing it."""
    last = head.norm.last.result
    normed = Value(f"{graph.inputs[head.position].name}.normed", last.type)
    gone = {head.norm.op.result.name, last.name}

    alias = {last.name: normed}
    ops = tuple(
        replace(op, operands=_apply(op.operands, alias))
        for op in graph.ops
        if gone.isdisjoint(v.name for v in op.results)
    )
    return replace(
        graph,
        inputs=(*graph.inputs, normed),
        ops=ops,
        outputs=_apply(graph.outputs, alias),
    )


def _tail_names(tail: _Tail) -> list[str]:
    return [f"@next_norm.{role}" for role in _ROLES[: len(tail.norm.recipes)]]


def _with_tail(module: Module, name: str, tail: _Tail) -> Module:
    """The block that also returns the norm of one of its results."""
    weights = []
    for weight, recipe in zip(_tail_names(tail), tail.norm.recipes, strict=True):
        module = add_weight(module, name, weight, recipe, source_names(weight, recipe))
        weights.append(Value(weight, recipe.outputs[0].type))
    graph = module.graph(name)
    ops = tail.norm.made(graph.outputs[tail.position], weights, "%:normed")
    outputs = (*graph.outputs, ops[-1].result)
    return module.with_graph(replace(graph, ops=(*graph.ops, *ops), outputs=outputs))


def _rewrite_main(module: Module, old: Module, plan: _Plan, names: dict[_Variant, str]) -> Module:
    """Main with the variants called, its first norm before them and its last one gone."""
    ops: list[Op] = []
    normed: dict[int, Value] = {}
    alias: dict[str, Value] = {}
    producers, made = old.main.producers(), _made_by_calls(old.main)
    for index, op in enumerate(old.main.ops):
        op = replace(op, operands=_apply(op.operands, alias))
        if index in plan.finals:
            last = normed[plan.finals[index]]
            gather = producers[op.operands[0].name]
            if gather.name == "gather":
                ops.append(replace(gather, operands=(last, gather.operands[1]), results=op.results))
            else:
                alias[op.result.name] = last
            continue
        head = plan.heads.get(str(op.attr["block"])) if op.is_call else None
        operands = op.operands
        if head is not None and index in plan.seamed:
            operands = (*operands, normed[made[operands[head.position].name][0]])
        elif head is not None:
            module, first = _first_norm(module, op, head, f"%{index}:normed")
            ops += first
            operands = (*operands, first[-1].result)
        if op.is_call:
            name = names[plan.variant(index, op)]
            op = _seamed_call(op, plan.tails.get(index), name, _bound_names(module, name))
        if index in plan.tails:
            tail = plan.tails[index]
            dtype = tail.norm.last.result.tensor.dtype
            made_type = op.results[tail.position].tensor.with_dtype(dtype)
            normed[index] = Value(f"%{index}:next", made_type)
            op = replace(op, results=(*op.results, normed[index]))
        ops.append(replace(op, operands=operands))
    main = replace(module.main, ops=tuple(ops), outputs=_apply(module.main.outputs, alias))
    return module.with_graph(main)


def _apply(values: tuple[Value, ...], alias: dict[str, Value]) -> tuple[Value, ...]:
    return tuple(alias.get(v.name, v) for v in values)


def _bound_names(module: Module, block: str) -> frozenset[str]:
    """Names of a block that a call may bind: checkpoint tensors and states, without sigils."""
    graph = module.graph(block)
    return frozenset(v.name[1:] for v in (*load_of(module, block).weights, *graph.states))


def _seamed_call(call: Op, tail: _Tail | None, name: str, bound: frozenset[str]) -> Op:
    """The call of a variant, with the next norm's weights bound and nothing that is gone."""
    pairs = [pair for pair in Binding.of(call).renames if pair[0] in bound]
    if tail is not None:
        for weight, recipe, sources in zip(
            _tail_names(tail), tail.norm.recipes, tail.sources, strict=True
        ):
            local = [source[1:] for source in source_names(weight, recipe)]
            pairs += zip(local, sources, strict=True)
    attrs: dict[str, Attr] = {**call.attr, "block": name, "bind": tuple(pairs)}
    if not pairs:
        del attrs["bind"]
    return replace(call, attrs=attrs_of(attrs))


def _first_norm(
    module: Module, call: Op, head: _Head, result: str
) -> tuple[Module, tuple[Op, ...]]:
    """The norm in main of what a call is given, with the weights of that call."""
    weights = []
    sources = _full_sources(head.norm, Binding.of(call))
    locals_ = head.norm.op.operands[1:]
    for local, recipe, full in zip(locals_, head.norm.recipes, sources, strict=True):
        name = f"@{full[0]}" if len(full) == 1 else f"@{Binding.of(call).full_name(local.name[1:])}"
        known = next((w for w in module.main.weights if w.name == name), None)
        if known is None:
            module = add_weight(module, "main", name, recipe, [f"@{s}" for s in full])
        weights.append(known or Value(name, recipe.outputs[0].type))
    return module, head.norm.made(call.operands[head.position], weights, result)


def _without_uncalled(module: Module, called: set[str]) -> Module:
    kept = called | {"main"}
    return replace(
        module,
        graphs=tuple(g for g in module.graphs if g.name in kept),
        loads=tuple(g for g in module.loads if g.name in kept),
    )


def _report(old: Module, plan: _Plan, names: dict[_Variant, str], target: Target) -> None:
    for variant, name in names.items():
        if variant.is_plain:
            continue
        calls = [
            i for i, op in enumerate(old.main.ops) if op.is_call and plan.variant(i, op) == variant
        ]
        chosen = (
            "norm of the next call at its end" if variant.text else "norm done by the call before"
        )
        reason = f"{len(calls)} calls as {name}: the add and the norm after it stand in one graph"
        data = (("calls", len(calls)),)
        target.report.add(Decision("seam", variant.block, chosen, reason, data=data))
