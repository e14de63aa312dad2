"""localize: from global types with shardings to the program of one rank (SPMD).

After it nothing is sharded: every type is that of a rank's own part, and passes below know ranks
only by the collectives in the text, which carry their number.
"""

from dataclasses import replace

from metainfer.ir.graph import Attr, Graph, Module, Op, Value, attrs_of
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.collective import MEETING, OWN
from metainfer.ir.ops.record import op_def
from metainfer.ir.shard_rule import Rule, parse_rule
from metainfer.ir.sharding import local_attrs, local_type
from metainfer.ir.types import Mesh, StateType, Type
from metainfer.passes.spread_experts import spread_experts
from metainfer.passes.target import Target


def localize(module: Module, target: Target) -> Module:
    """Write the program of one rank.

    Row numbers of a table that is sharded by rows are made local first (`local_index`). Experts
    that are spread over the data-parallel axis get their tokens here (`spread_experts`).

    Before (tp=2)::

        module f {
          mesh (tp=2)
          dim T in [1, 512]
          load main {
            weights {
              @up.weight : f32[16,8]
            }
            %0 = take_shard(@up.weight) {axis = "tp", dim = 0} : f32[16,8] @ (tp=S0)
            return %0
          }
          main(%x: f32[T,8]) {
            weights {
              @up.weight : f32[16,8] @ (tp=S0)
            }
            %0 = linear(%x, @up.weight) : f32[T,16] @ (tp=S1)
            %1 = all_gather(%0) {axis = "tp", dim = 1} : f32[T,16]
            return %1
          }
        }

    After::

        module f {
          mesh (tp=2)
          dim T in [1, 512]
          load main {
            weights {
              @up.weight : f32[16,8]
            }
            %0 = take_shard(@up.weight) {axis = "tp", dim = 0, ranks = 2} : f32[8,8]
            return %0
          }
          main(%x: f32[T,8]) {
            weights {
              @up.weight : f32[8,8]
            }
            %0 = linear(%x, @up.weight) : f32[T,8]
            %1 = all_gather(%0) {axis = "tp", dim = 1, ranks = 2} : f32[T,16]
            return %1
          }
        }
    """
    mesh = module.mesh
    if mesh.num_ranks == 1:
        return module
    module = replace(
        module,
        graphs=tuple(canonical_names(_local(g, mesh)) for g in module.graphs),
        loads=tuple(canonical_names(_local(g, mesh)) for g in module.loads),
    )
    return spread_experts(module, target)


def _local(graph: Graph, mesh: Mesh) -> Graph:
    def value(v: Value) -> Value:
        return Value(v.name, _local_type(v.type, mesh))

    ops: list[Op] = []
    for op in graph.ops:
        ops += _local_op(op, mesh)
    return replace(
        graph,
        inputs=tuple(map(value, graph.inputs)),
        weights=tuple(map(value, graph.weights)),
        states=tuple(map(value, graph.states)),
        ops=tuple(ops),
        outputs=tuple(map(value, graph.outputs)),
        state_outputs=tuple(map(value, graph.state_outputs)),
    )


def _local_type(type_: Type, mesh: Mesh) -> Type:
    if isinstance(type_, StateType):
        fields = tuple((name, local_type(t, mesh)) for name, t in type_.fields)
        return replace(type_, fields=fields)
    return replace(local_type(type_, mesh), layout=type_.layout)


def _local_op(op: Op, mesh: Mesh) -> list[Op]:
    operands = tuple(Value(v.name, _local_type(v.type, mesh)) for v in op.operands)
    results = tuple(Value(v.name, _local_type(v.type, mesh)) for v in op.results)
    local = replace(op, operands=operands, results=results, attrs=_local_attrs(op, mesh))
    lookup = _lookup(op, local, mesh)
    if lookup is None:
        return [local]
    index, op_before = lookup
    operands = tuple(op_before.result if i == index else v for i, v in enumerate(operands))
    return [op_before, replace(local, operands=operands)]


def _local_attrs(op: Op, mesh: Mesh) -> tuple[tuple[str, Attr], ...]:
    if op.name in ("call", "fused"):
        return op.attrs
    attrs = local_attrs(op.name, op.attr, [v.type for v in op.results], mesh)
    if op.name in MEETING or op.name in OWN:
        attrs["ranks"] = dict(mesh.axes)[str(attrs["axis"])]
    elif op.name == "experts":
        # Costs must know that only a part of the choices falls on the experts held here.
        attrs["total"] = attrs.get("total", 0) or op.operands[3].tensor.shape[0].static
    return attrs_of(attrs)


def _lookup(op: Op, local: Op, mesh: Mesh) -> tuple[int, Op] | None:
    """(operand, `local_index` of it) where an op looks up rows of a table sharded by rows."""
    if op.is_call or op.name == "fused":
        return None
    types = [v.type for v in op.operands]
    record = op_def(op.name)
    text = record.shard_rule(types, record.complete(op.attr))
    rule = parse_rule(text) if text and "=>" not in text else None
    for index, name in rule.index if rule is not None else ():
        found = _sharded_rows(op, rule, name)
        if found is not None:
            axis, table, place = found
            count = local.operands[table].tensor.shape[place].static
            attrs: dict[str, Attr] = {"axis": axis, "count": count}
            attrs["ranks"] = dict(mesh.axes)[axis]
            return index, _local_index(local, index, attrs)
    return None


def _local_index(op: Op, index: int, attrs: dict[str, Attr]) -> Op:
    ids = op.operands[index]
    result = Value(f"{op.results[0].name}.index", ids.type)
    return Op("local_index", (ids,), (result,), attrs_of(attrs), source=op.source)


def _sharded_rows(op: Op, rule: Rule | None, name: str) -> tuple[str, int, int] | None:
    """(axis, operand, dim) where the dim of that name is sharded."""
    for number, value in enumerate(op.operands):
        if rule is None or value.is_state:
            continue
        labels = [d.name for d in rule.operand(number).labels(value.tensor.rank)]
        for axis, place in value.tensor.sharding.axes:
            if isinstance(place, int) and labels[place] == name:
                return axis, number, place
    return None
