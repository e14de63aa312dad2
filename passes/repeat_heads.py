"""Key and value heads that are fewer than the ranks are repeated, so that each rank holds one.

A step of `shard`. Query head h of H reads key head h // (H/G); with every key head repeated r
times in a row it reads h // (H/(G*r)), which holds the same numbers: nothing changes but the room.
"""

from collections.abc import Mapping
from dataclasses import replace

from metainfer.ir.dtypes import Block
from metainfer.ir.graph import Graph, Module, Op, Value, attrs_of
from metainfer.ir.ops.infer import sizes_of
from metainfer.ir.ops.record import infer_types
from metainfer.ir.refine import row_blocks
from metainfer.ir.types import StateType, TensorType
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import LoadEditor

# What may stand between a projection and kv_write: each works on heads one by one.
_THROUGH = ("rope", "rms_norm", "cast", "reshape")


def repeat_heads(module: Module, ranks: int, target: Target) -> Module:
    """Repeat key and value heads of every block whose query heads divide by the ranks.

    Blocks stay as they are where a projection cannot be followed back to its weight.
    """
    for graph in module.graphs:
        plan = _Plan.of(graph, ranks)
        if plan is None:
            continue
        module = _repeated(module, plan)
        heads, times = plan.heads, plan.times
        reason = (
            f"{heads} key heads over {ranks} ranks: each is held by {times} ranks, "
            f"KV takes {times} times the room of one copy"
        )
        target.report.add(
            Decision("shard", f"{graph.name}: key and value heads", f"repeated {times}x", reason)
        )
    return module


class _Plan:
    """What is repeated in one graph.

    Attributes:
        graph: its name.
        heads: key heads of the model.
        times: how often each is repeated.
        weights: rows of these are repeated by heads (weights and biases of linears).
        reshapes: results of reshapes that split rows into heads.
    """

    def __init__(self, graph: Graph, heads: int, times: int) -> None:
        self.graph = graph
        self.heads = heads
        self.times = times
        self.weights: list[str] = []
        self.reshapes: set[str] = set()

    @staticmethod
    def of(graph: Graph, ranks: int) -> "_Plan | None":
        """The plan of a graph with one state of keys and values, None if there is nothing to do."""
        writes = [op for op in graph.ops if op.name == "kv_write"]
        reads = [op for op in graph.ops if op.name == "attention"]
        if len(writes) != 1 or len(reads) != 1 or len(graph.states) != 1:
            return None
        heads = writes[0].operands[1].tensor.shape[1].static
        queries = reads[0].operands[0].tensor.shape[1].static
        if heads % ranks == 0 or ranks % heads or queries % ranks:
            return None
        plan = _Plan(graph, heads, ranks // heads)
        producers, uses = graph.producers(), graph.uses()
        found = [plan._follow(v, producers, uses) for v in writes[0].operands[1:3]]
        return plan if all(found) else None

    def _follow(
        self, value: Value, producers: Mapping[str, Op], uses: Mapping[str, list[Op]]
    ) -> bool:
        """Walk back to a linear whose rows are the heads; False if something else is met."""
        while (op := producers.get(value.name)) is not None:
            if len(uses[value.name]) != 1:
                return False
            if op.name == "linear":
                params = op.operands[1:]
                self.weights += [p.name for p in params]
                return all(p.is_weight and len(uses[p.name]) == 1 for p in params)
            if op.name not in _THROUGH:
                return False
            if op.name == "reshape":
                if op.operands[0].tensor.rank != 2 or op.result.tensor.rank != 3:
                    return False
                self.reshapes.add(op.result.name)
            value = op.operands[0]
        return False


def _repeated(module: Module, plan: _Plan) -> Module:
    editor = LoadEditor(module, plan.graph.name)
    for weight in plan.weights:
        made = _by_heads(editor, editor.made(weight), plan.heads)
        editor.update(weight, editor.emit("repeat_rows", made, groups=plan.heads, times=plan.times))
    return editor.finish(lambda graph: _retyped(graph, plan))


def _by_heads(editor: LoadEditor, made: Value, heads: int) -> Value:
    """The weight with scale blocks that end where heads do."""
    dtype, shape = made.tensor.dtype, made.tensor.concrete({})
    if not isinstance(dtype, Block):
        return made
    finer = row_blocks(dtype, shape, shape[0] // heads)
    return made if finer == dtype else editor.emit("refine_scales", made, format=str(finer))


def _retyped(graph: Graph, plan: _Plan) -> Graph:
    """Types from the repeated weights on, along the two chains and the state."""
    names: dict[str, Value] = {v.name: v for v in graph.weights}
    states = tuple(Value(s.name, _wider(s.state, plan.times)) for s in graph.states)
    names.update((s.name, s) for s in states)
    ops = []
    for op in graph.ops:
        operands = tuple(names.get(v.name, v) for v in op.operands)
        attrs = dict(op.attrs)
        if any(v.name in plan.reshapes for v in op.results):
            tokens, heads, width = sizes_of(attrs["shape"])
            attrs["shape"] = tuple(d.attr for d in (tokens, heads * plan.times, width))
        if op.is_call:
            ops.append(replace(op, operands=operands))
            continue
        types = infer_types(op.name, [v.type for v in operands], attrs)
        results = tuple(Value(v.name, t) for v, t in zip(op.results, types, strict=True))
        names.update((v.name, v) for v in results)
        ops.append(replace(op, operands=operands, results=results, attrs=attrs_of(attrs)))
    finals = tuple(names.get(v.name, v) for v in graph.state_outputs)
    return replace(graph, ops=tuple(ops), states=states, state_outputs=finals)


def _wider(state: StateType, times: int) -> StateType:
    fields = tuple((name, _more_heads(type_, times)) for name, type_ in state.fields)
    return replace(state, fields=fields)


def _more_heads(type_: TensorType, times: int) -> TensorType:
    return type_.with_shape((type_.shape[0] * times, *type_.shape[1:]))
