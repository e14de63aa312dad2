"""Experts spread over the data-parallel axis: each replica's tokens go to where the experts are.

A step of `localize`, since the tokens of other replicas are no part of the global types.
"""

from dataclasses import replace

from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Attr, Graph, Module, Op, Value, attrs_of
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.record import infer_types
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import LoadEditor

AXIS = "dp"


def spread_experts(module: Module, target: Target) -> Module:
    """Gather the tokens of all replicas, compute the experts held here, hand the sums back.

    Every replica's step has the same number of tokens (the runtime pads); padded rows carry no
    weight that matters, since nobody reads them.

    Raises: Unsupported if the experts do not divide by the replicas.

    Before (dp=2, local types)::

        %3 = experts(%0, %1, %2, @gate, @up, @down) {total = 8} : f32[T,16]

    After::

        %3 = all_gather(%0) {axis = "dp", dim = 0, ranks = 2} : f32[2*T,16]
        %4 = all_gather(%1) {axis = "dp", dim = 0, ranks = 2} : i32[2*T,2]
        %5 = all_gather(%2) {axis = "dp", dim = 0, ranks = 2} : f32[2*T,2]
        %6 = local_index(%4) {axis = "dp", count = 4, ranks = 2} : i32[2*T,2]
        %7 = experts(%3, %6, %5, @gate, @up, @down) {total = 8} : f32[2*T,16]
        %8 = reduce_scatter(%7) {axis = "dp", dim = 0, ranks = 2} : f32[T,16]
    """
    ranks = dict(module.mesh.axes).get(AXIS, 1)
    if ranks == 1 or AXIS not in target.strategy.experts:
        return module
    for graph in module.graphs:
        found = [op for op in graph.ops if op.name == "experts"]
        if found:
            module = _spread(module, graph, ranks)
            held = found[0].operands[3].tensor.shape[0].static // ranks
            reason = f"{held} whole experts on every rank, tokens are gathered over dp"
            target.report.add(Decision("shard", f"{graph.name}: experts", "over dp", reason))
    return module


def _spread(module: Module, graph: Graph, ranks: int) -> Module:
    editor = LoadEditor(module, graph.name)
    for op in graph.ops:
        for weight in op.operands[3:] if op.name == "experts" else ():
            count = weight.tensor.shape[0].static
            if count % ranks:
                raise Unsupported(
                    f"{count} experts of {graph.name} do not divide by the {ranks} replicas",
                    text=f"{weight.name}: {weight.type}",
                    advice="choose a --dp that divides the experts, or --ep without dp",
                )
            made = editor.made(weight.name)
            editor.update(
                weight.name, editor.emit("take_shard", made, axis=AXIS, dim=0, ranks=ranks)
            )
    return editor.finish(lambda g: canonical_names(_rewritten(g, ranks)))


def _rewritten(graph: Graph, ranks: int) -> Graph:
    ops: list[Op] = []
    for op in graph.ops:
        ops += _gathered(op, ranks) if op.name == "experts" else [op]
    return replace(graph, ops=tuple(ops))


def _gathered(op: Op, ranks: int) -> list[Op]:
    made: list[Op] = []

    def emit(name: str, value: Value, **attrs: Attr) -> Value:
        attrs.update({"axis": AXIS, "ranks": ranks})
        (type_,) = infer_types(name, [value.type], attrs)
        result = Value(f"{op.result.name}.{len(made)}", type_)
        made.append(Op(name, (value,), (result,), attrs_of(attrs), source=op.source))
        return result

    x, ids, weights = (emit("all_gather", v, dim=0) for v in op.operands[:3])
    held = op.operands[3].tensor.shape[0].static
    ids = emit("local_index", ids, count=held)
    operands = (x, ids, weights, *op.operands[3:])
    (type_,) = infer_types("experts", [v.type for v in operands], op.attr)
    partial = Value(f"{op.result.name}.sum", type_)
    made.append(replace(op, operands=operands, results=(partial,)))
    result = emit("reduce_scatter", partial, dim=0)
    made[-1] = replace(made[-1], results=(Value(op.result.name, result.type),))
    return made
