"""localize: from global types with shardings to the program of one rank (SPMD).

After it nothing is sharded: every type is that of a rank's own part, and passes below know ranks
only by the collectives in the text, which carry their number.
"""

from dataclasses import replace

from metainfer.ir.dims import Dim
from metainfer.ir.graph import Attr, Graph, Module, Op, Value, attrs_of
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.collective import MEETING, OWN
from metainfer.ir.ops.record import VIEW, op_def
from metainfer.ir.sharding import local_type
from metainfer.ir.types import Mesh, StateType, Type
from metainfer.passes.target import Target

# Ops that look rows of a weight up: (operand with the row numbers, operand with the table).
_LOOKUPS = {"embedding": (0, 1), "experts": (1, 3)}


def localize(module: Module, target: Target) -> Module:
    """Write the program of one rank.

    Row numbers of a table that is sharded by rows are made local first (`local_index`).

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
    return replace(
        module,
        graphs=tuple(canonical_names(_local(g, mesh)) for g in module.graphs),
        loads=tuple(canonical_names(_local(g, mesh)) for g in module.loads),
    )


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
    lookup = _lookup(op, mesh)
    operands = tuple(Value(v.name, _local_type(v.type, mesh)) for v in op.operands)
    results = tuple(Value(v.name, _local_type(v.type, mesh)) for v in op.results)
    local = replace(op, operands=operands, results=results, attrs=_local_attrs(op, results, mesh))
    if lookup is None:
        return [local]
    index = _LOOKUPS[op.name][0]
    operands = tuple(lookup.result if i == index else v for i, v in enumerate(operands))
    return [lookup, replace(local, operands=operands)]


def _local_attrs(op: Op, results: tuple[Value, ...], mesh: Mesh) -> tuple[tuple[str, Attr], ...]:
    attrs = dict(op.attrs)
    if op.name in MEETING or op.name in OWN:
        attrs["ranks"] = dict(mesh.axes)[str(attrs["axis"])]
    elif op.name not in ("call", "fused") and op_def(op.name).has(VIEW) and "shape" in attrs:
        attrs["shape"] = tuple(_size(d) for d in results[0].tensor.shape)
    return attrs_of(attrs)


def _size(size: Dim) -> Attr:
    return size.static if size.is_static else size


def _lookup(op: Op, mesh: Mesh) -> Op | None:
    """`local_index` of the row numbers of a table that is sharded by rows, None for a whole one."""
    if op.name not in _LOOKUPS:
        return None
    index, table = _LOOKUPS[op.name]
    sharding = op.operands[table].tensor.sharding
    axis = next((a for a, place in sharding.axes if place == 0), None)
    if axis is None:
        return None
    ranks = dict(mesh.axes)[axis]
    ids = op.operands[index]
    plain = Value(ids.name, _local_type(ids.type, mesh))
    count = op.operands[table].tensor.shape[0].static // ranks
    attrs = attrs_of({"axis": axis, "ranks": ranks, "count": count})
    result = Value(f"{ids.name}.{op.results[0].name[1:]}.local", plain.type)
    return Op("local_index", (plain,), (result,), attrs, source=op.source)

