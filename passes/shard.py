"""shard: how weights, states and activations lie over the ranks of the tensor-parallel axis.

The result is in global form: types carry global shapes with their shardings, collectives are
explicit, and weights are cut by `take_shard` in the load graphs. `localize` then writes the program
of one rank. Expert parallelism over the data-parallel axis is added there too, since the tokens of
other replicas are no part of the global types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from metainfer.ir.dtypes import Block
from metainfer.ir.entries import is_latent
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.record import VIEW, op_def
from metainfer.ir.simulate import axis_groups
from metainfer.ir.types import StateType, TensorType, Type
from metainfer.passes.refine_blocks import refine_blocks
from metainfer.passes.repeat_heads import repeat_heads
from metainfer.passes.shard_search import Form, Prices, Search, Sharded
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import LoadEditor

AXIS = "tp"


def shard(module: Module, target: Target) -> Module:
    """Shard over the tensor-parallel axis of the strategy's mesh.

    Every block takes and gives whole activations; within it every weight and state is cut that may
    be, and among the programs that do so the fastest is searched for, by the ops' sharding rules
    (`passes.shard_search`). Key and value heads that are fewer than the ranks are repeated first,
    and scale blocks that a rank's border would cut are made smaller (`passes.refine_blocks`).

    Raises: Unsupported if the layout is forbidden, naming the rule.

    Before::

        graph f(%x: f32[T,8], @up.weight: f32[16,8], @down.weight: f32[8,16]) {
          %0 = linear(%x, @up.weight) : f32[T,16]
          %1 = silu(%0) : f32[T,16]
          %2 = linear(%1, @down.weight) : f32[T,8]
          return %2
        }

    After (tp=2)::

        module f {
          dim T in [1, 512]
          mesh (tp=2)
          load main {
            weights {
              @up.weight : f32[16,8]
              @down.weight : f32[8,16]
            }
            %0 = take_shard(@up.weight) {axis = "tp", dim = 0} : f32[16,8] @ (tp=S0)
            %1 = take_shard(@down.weight) {axis = "tp", dim = 1} : f32[8,16] @ (tp=S1)
            return %0, %1
          }
          main(%x: f32[T,8]) {
            weights {
              @up.weight : f32[16,8] @ (tp=S0)
              @down.weight : f32[8,16] @ (tp=S1)
            }
            %0 = linear(%x, @up.weight) : f32[T,16] @ (tp=S1)
            %1 = silu(%0) : f32[T,16] @ (tp=S1)
            %2 = linear(%1, @down.weight) : f32[T,8] @ (tp=partial)
            %3 = all_reduce(%2) {axis = "tp"} : f32[T,8]
            return %3
          }
        }
    """
    mesh = target.strategy.mesh
    module = replace(module, mesh=mesh)
    ranks = dict(mesh.axes).get(AXIS, 1)
    if ranks == 1:
        return module
    module = repeat_heads(module, ranks, target)
    module = refine_blocks(module, AXIS, ranks, target)
    allowed = _ExpertsScheme(AXIS in target.strategy.experts)
    sizes = typical_steps(module, target)
    for name in [g.name for g in module.graphs]:
        graph = module.graph(name)
        found = Search(graph, mesh, AXIS, _prices(graph, target, sizes), allowed).run()
        _report(graph, found, ranks, target)
        module = _with_shardings(module, found)
    _check_sharded(module, target)
    return module


class _ExpertsScheme:
    """Which dim of the experts the axis cuts: whole experts, or each one's inner dim."""

    def __init__(self, whole_experts: bool) -> None:
        self._name = "E" if whole_experts else "F"

    def __call__(self, op: str, name: str) -> bool:
        return op != "experts" or name == self._name


# --- prices ------------------------------------------------------------------------------------


# Weights below this part of a graph's own are not worth a collective: routers, norms.
_COUNTS = 0.002


def _prices(graph: Graph, target: Target, sizes: Sequence[Mapping[str, int]]) -> Prices:
    """Times of a step of each phase together: both run on the same weights."""
    device, costs, strategy = target.device, target.costs, target.strategy
    group = tuple(strategy.first_rank + r for r in axis_groups(strategy.mesh, AXIS)[0])
    seconds: dict[object, float] = {}

    def op_seconds(op: Op) -> float:
        key = (op.name, op.attrs, tuple(v.type for v in op.operands))
        if key not in seconds:
            is_free = op.name in ("call", "fused") or op_def(op.name).has(VIEW)
            at = () if is_free else sizes
            seconds[key] = sum(costs.roofline(op, device, env).seconds for env in at)
        return seconds[key]

    def collective(name: str, type_: TensorType) -> float:
        if name == "take_shard":
            return 1e-9  # no byte leaves the rank: only ties are decided
        return sum(
            costs.collective(name, target.machine, group, type_.bytes_at(env)) for env in sizes
        )

    held = strategy.max_context * strategy.max_sequences
    least = _COUNTS * sum(w.tensor.bytes_at({}) for w in graph.weights)

    def room(type_: Type) -> float:
        if isinstance(type_, TensorType):
            size = type_.bytes_at({})
            return size if size >= least else 0.0
        return type_.entry_bytes() * (held if type_.growth == "token" else strategy.max_sequences)

    return Prices(op_seconds, collective, room)


def typical_steps(module: Module, target: Target) -> tuple[dict[str, int], ...]:
    """Sizes of a full decode step and of a full prefill chunk, alike for both phases' plans.

    A module of another kind has one step, in which a size that is none of a step's counts as 1.
    """
    strategy = target.strategy
    pages = dict(strategy.typical).get("P", 32)
    most = strategy.max_sequences
    decode = {"T": most, "B": most, "R": most, "P": pages}
    prefill = {"T": strategy.max_tokens, "B": 1, "R": 1, "P": pages}
    steps = (decode, prefill) if strategy.phase != "call" else (decode,)
    return tuple({s.name: step.get(s.name, 1) for s in module.symbols} for step in steps)


# --- the result --------------------------------------------------------------------------------


def _with_shardings(module: Module, found: Sharded) -> Module:
    editor = LoadEditor(module, found.graph.name)
    for weight in found.graph.weights:
        form = found.placed.get(weight.name)
        if form is not None:
            editor.update(
                weight.name,
                editor.emit("take_shard", editor.made(weight.name), axis=AXIS, dim=form),
            )
    graph = found.graph

    def rewritten(_: Graph) -> Graph:
        return canonical_names(graph)

    return editor.finish(rewritten)


def _report(before: Graph, found: Sharded, ranks: int, target: Target) -> None:
    for value in (*before.weights, *before.states):
        form = found.placed.get(value.name)
        text = _described(value.type, form)
        if text:
            reason = f"1/{ranks} on every rank" if text != "whole" else "no rule allows a cut"
            target.report.add(Decision("shard", f"{before.name}: {value.name}", text, reason))
    names = [op.name for op in found.graph.ops if op.attr.get("axis") == AXIS]
    met = {n: names.count(n) for n in sorted(set(names)) if n != "take_shard"}
    text = ", ".join(f"{count} x {name}" for name, count in met.items()) or "none"
    reason = f"the fastest that the ops' rules allow, {found.seconds * 1e6:.0f} us in both phases"
    target.report.add(Decision("shard", f"{before.name}: collectives over tp", text, reason))


def _whole_latents(graph: Graph, state: Value, ranks: int) -> Decision:
    """Latents belong to all heads, of which every rank has some."""
    size = state.state.entry_bytes()
    reason = (
        f"one latent a token for all heads: each of the {ranks} ranks holds it, its heads attend "
        f"over it; a token takes {size:,} bytes on each rank, {ranks} times the room of one copy; "
        "replicas by --dp hold each token once"
    )
    subject, data = f"{graph.name}: {state.name}", (("copies", ranks),)
    return Decision("shard", subject, f"held {ranks}x", reason, data=data)


def _described(type_: TensorType | StateType, form: Form) -> str:
    if isinstance(type_, StateType):
        places = form if isinstance(form, tuple) else ()
        return "sharded by heads" if any(p is not None for p in places) else "whole"
    big = type_.rank > 1
    return f"sharded in dim {form}" if form is not None else "whole" if big else ""


def _check_sharded(module: Module, target: Target) -> None:
    """A layout in which every rank would compute everything is no layout.

    Raises: Unsupported naming the sizes that do not divide.
    """
    ranks = dict(target.strategy.mesh.axes)[AXIS]
    blocks = [g for g in module.graphs if g.weights]
    if any(w.tensor.sharding.axes for g in blocks for w in g.weights):
        _report_whole_states(module, ranks, target)
        return
    sizes = _sizes_of(blocks)
    raise Unsupported(
        f"tp = {ranks} shards nothing of {module.name}",
        text=f"rule: a sharded size divides by the ranks and cuts no block; sizes: {sizes}",
        advice="choose a --tp that divides heads and widths, or --dp and --pp",
    )


def _sizes_of(blocks: list[Graph]) -> str:
    sizes = {n.static for g in blocks for w in g.weights for n in w.tensor.shape}
    formats = {str(w.tensor.dtype) for g in blocks for w in g.weights if _has_blocks(w.tensor)}
    text = ", ".join(map(str, sorted(sizes)))
    return f"{text} in {', '.join(sorted(formats))}" if formats else text


def _has_blocks(type_: TensorType) -> bool:
    return isinstance(type_.dtype, Block)


def _report_whole_states(module: Module, ranks: int, target: Target) -> None:
    """Keys and values that every rank holds: attention is computed by all of them."""
    for graph in module.graphs:
        for state in graph.states:
            fields: Mapping[str, TensorType] = dict(state.state.fields)
            if any(t.sharding.axes for t in fields.values()):
                continue
            if is_latent(state.state):
                target.report.add(_whole_latents(graph, state, ranks))
                continue
            heads = next(iter(fields.values())).shape[0]
            target.report.add(
                Decision(
                    "shard",
                    f"{graph.name}: {state.name}",
                    "replicated",
                    f"rule: heads divide by the ranks, {heads} heads over {ranks}: every rank "
                    "computes all of the attention and holds all keys and values",
                    "fallback",
                )
            )
