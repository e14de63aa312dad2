"""place_experts: which rank holds which experts, and how many times.

Runs before `shard`, so that ranks then share slots evenly as they share any dim: the stacked
weights are put in the order of the slots, and what the router chose is turned into slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import I32
from metainfer.ir.graph import Binding, Graph, Module, Op, Value
from metainfer.ir.histogram import layer_of
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.record import infer_types
from metainfer.ir.simulate import axis_numbers
from metainfer.ir.types import TensorType
from metainfer.passes.placement import Placement, greedy, place
from metainfer.passes.placement_tables import route_table, slot_order, table_width
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import LoadEditor


def place_experts(module: Module, target: Target) -> Module:
    """Place experts over the ranks that whole experts are spread over.

    Asked for by a routing histogram or by replicas, and needed where experts do not divide by the
    ranks; else each rank holds a run of them. Orders and tables differ from layer to layer: they
    are tensors of the plan (`Target.constants`), so that all layers stay calls of one block.

    Before (ep=2, three slots on a rank, one replica)::

        %1 = experts(%0, %ids, %w, @e.*.gate, @e.*.up, @e.*.down) : f32[T,8]

    After::

        load: %0 = take_rows(@e.*.gate, @e.slot_order) : f32[6,12,8]  ...
        %1 = route(%ids, @e.slot_table, @e.slot_replicas) : i64[T,2]
        %2 = experts(%0, %1, %w, @e.*.gate, @e.*.up, @e.*.down) : f32[T,8]
    """
    ranks = _num_ranks(target)
    if ranks == 1:
        return module
    for graph in module.graphs:
        found = [op for op in graph.ops if op.name == "experts"]
        calls = [c for c in module.calls() if c.attr["block"] == graph.name]
        if len(found) == 1 and calls and _is_wanted(found[0], ranks, target):
            module = _placed(module, graph, found[0], calls, ranks, target)
    return module


def _num_ranks(target: Target) -> int:
    sizes = dict(target.strategy.mesh.axes)
    return int(np.prod([sizes[axis] for axis in target.strategy.experts], dtype=int))


def _is_wanted(op: Op, ranks: int, target: Target) -> bool:
    uneven = op.operands[3].tensor.shape[0].static % ranks != 0
    return bool(target.routing or target.options.replicas or uneven)


@dataclass(frozen=True)
class _Layer:
    """One call of a block: its name, and how often each of its experts was chosen."""

    name: str
    counts: np.ndarray


def _placed(
    module: Module, graph: Graph, op: Op, calls: Sequence[Op], ranks: int, target: Target
) -> Module:
    experts = op.operands[3].tensor.shape[0].static
    layers = [_layer(op, call, experts, target) for call in calls]
    slots = -(-(experts + target.options.replicas) // ranks)
    counts = np.stack([layer.counts for layer in layers])
    replicas = ranks * slots - experts
    groups = _groups(target, ranks)
    found = place(counts, ranks, slots, replicas=replicas, groups=groups)
    width = table_width(found)
    for layer, placement in zip(layers, found, strict=True):
        table, number = route_table(placement, layer.counts, width)
        target.constants[f"{layer.name}.slot_order"] = slot_order(placement)
        target.constants[f"{layer.name}.slot_table"] = table
        target.constants[f"{layer.name}.slot_replicas"] = number
    _report(graph, layers, found, greedy(counts, ranks, slots, replicas=replicas), target)
    return _rewritten(module, graph, op, experts, ranks * slots, width)


def _layer(op: Op, call: Op, experts: int, target: Target) -> _Layer:
    binding = Binding.of(call)
    name = layer_of([binding.full_name(w.name[1:]) for w in op.operands[3:]])
    if target.routing is None:
        return _Layer(name, np.ones(experts, np.int64))
    return _Layer(name, target.routing.array()[target.routing.layers.index(name)])


def _groups(target: Target, ranks: int) -> list[int]:
    """The socket or host of each rank, in the order in which ranks share slots: tp, then dp."""
    strategy = target.strategy
    islands = target.machine.topology().islands()
    of_rank = {r: number for number, island in enumerate(islands) for r in island}
    axes = [a for a in ("tp", "dp") if a in strategy.experts]
    numbers = {axis: axis_numbers(strategy.mesh, axis) for axis in axes}
    places: dict[tuple[int, ...], int] = {}
    for rank in range(strategy.mesh.num_ranks):
        places.setdefault(tuple(numbers[a][rank] for a in axes), rank)
    return [of_rank[strategy.first_rank + places[key]] for key in sorted(places)][:ranks]


def _rewritten(
    module: Module, graph: Graph, op: Op, experts: int, slots: int, width: int
) -> Module:
    prefix = layer_of([w.name for w in op.operands[3:]])
    order = Value(f"{prefix}.slot_order", _ints(slots))
    table = Value(f"{prefix}.slot_table", _ints(experts, width))
    number = Value(f"{prefix}.slot_replicas", _ints(experts))
    editor = LoadEditor(module, graph.name)
    held = editor.source(order)
    for weight in op.operands[3:]:
        editor.update(weight.name, editor.emit("take_rows", editor.made(weight.name), held))
    for value in (table, number):
        editor.add(value.name, editor.source(value))

    def rewrite(retyped: Graph) -> Graph:
        ops: list[Op] = []
        for old in retyped.ops:
            ops += _routed(old, table, number) if old.name == "experts" else [old]
        return canonical_names(replace(retyped, ops=tuple(ops)))

    return editor.finish(rewrite)


def _ints(*shape: int) -> TensorType:
    return TensorType(tuple(dim(n) for n in shape), I32)


def _routed(op: Op, table: Value, number: Value) -> list[Op]:
    ids = op.operands[1]
    (type_,) = infer_types("route", [ids.type, table.type, number.type], {})
    slots = Value(f"{op.result.name}.slots", type_)
    route = Op("route", (ids, table, number), (slots,), source=op.source)
    operands = (op.operands[0], slots, *op.operands[2:])
    return [route, replace(op, operands=operands)]


def _report(
    graph: Graph, layers: Sequence[_Layer], found: Sequence[Placement],
    public: Sequence[Placement], target: Target,
) -> None:  # fmt: skip
    def worst(placements: Sequence[Placement]) -> float:
        """Heaviest rank over the mean, the worst layer's."""
        ratios = []
        for layer, placement in zip(layers, placements, strict=True):
            loads = placement.loads(layer.counts)
            ratios.append(float(loads.max() / max(loads.mean(), 1e-12)))
        return max(ratios)

    first = found[0]
    copies = int(first.replicas().sum()) - first.num_experts
    source = "the routing histogram" if target.routing else "even routing, as no histogram is given"
    reason = (
        f"by {source}: the heaviest rank does {worst(found):.3f} of the mean, "
        f"{worst(public):.3f} by the greedy method; {copies} replicas"
    )
    text = f"{first.num_ranks} ranks of {first.slots_per_rank} slots"
    target.report.add(Decision("place_experts", f"{graph.name}: experts", text, reason))
