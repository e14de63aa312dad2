"""The verifier: what every graph must satisfy, checked after every pass.

Names are defined once and before use; declared types are those that the op's record infers; a call
fits its block; the body of a fused group fits its operands and results; a state is a chain, in
which an older version is never read after it was written over; kernel tables end in an else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from metainfer.ir.errors import MetainferError, TypeMismatch
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.ops.record import infer_types
from metainfer.ir.printer import print_op
from metainfer.ir.sharding import check_sharding
from metainfer.ir.step import STEP_FIELDS
from metainfer.ir.streams import overwritten, verify_streams
from metainfer.ir.types import Mesh, StateType, TensorType, Type


@dataclass
class _Scope:
    """What is known while walking one graph."""

    graph: str
    defined: dict[str, Value]
    has_step: bool
    mesh: Mesh | None
    consumed: dict[str, Op] = field(default_factory=dict)


def verify_module(module: Module) -> None:
    """Check a module.

    Raises: TypeMismatch naming graph, op and model line.
    """
    names = [g.name for g in module.graphs]
    if len(set(names)) != len(names) or "main" not in names:
        raise TypeMismatch(f"module {module.name} needs one main and unlike names, has {names}")
    blocks: dict[str, Graph] = {}
    known = {s.name for s in module.symbols}
    for graph in module.graphs:
        verify_graph(graph, blocks=blocks, has_step=module.has_step, mesh=module.mesh)
        _check_symbols(graph, known)
        blocks[graph.name] = graph
    for load in module.loads:
        verify_graph(load, mesh=module.mesh)
        _check_load(load, module.graph(load.name))


def verify_graph(
    graph: Graph,
    *,
    blocks: Mapping[str, Graph] | None = None,
    has_step: bool = True,
    mesh: Mesh | None = None,
) -> None:
    """Check one graph; ``blocks`` are those that it may call, ``mesh`` what shards must divide by.

    Raises: TypeMismatch naming the op and its model line.
    """
    scope = _Scope(graph.name, {}, has_step, mesh)
    for value in (*graph.inputs, *graph.weights, *graph.states):
        _define(scope, value, None)
    for op in graph.ops:
        try:
            _check_op(op, scope, blocks or {})
        except MetainferError as error:
            raise _placed(error, op, graph.name) from None
    for value in (*graph.outputs, *graph.state_outputs):
        _check_defined(scope, value, None)
    _check_states(graph)
    verify_streams(graph)


def _placed(error: MetainferError, op: Op, graph: str) -> TypeMismatch:
    if error.text:
        return error if isinstance(error, TypeMismatch) else TypeMismatch(error.what)
    origin = f"{op.source} in {graph}" if op.source else f"graph {graph}"
    return TypeMismatch(error.what, text=print_op(op), origin=origin, advice=error.advice)


def _define(scope: _Scope, value: Value, op: Op | None) -> None:
    if value.name in scope.defined:
        raise TypeMismatch(f"{value.name} is defined twice in {scope.graph}")
    scope.defined[value.name] = value


def _check_defined(scope: _Scope, value: Value, op: Op | None) -> None:
    known = scope.defined.get(value.name)
    if known is None and value.name.startswith("step."):
        wanted = STEP_FIELDS.get(value.name.removeprefix("step."))
        if wanted is None or not scope.has_step:
            raise TypeMismatch(f"{value.name} is no field of this module's step record")
        if value.type != wanted:
            raise TypeMismatch(f"{value.name} is {wanted}, not {value.type}")
        return
    if known is None:
        raise TypeMismatch(f"{value.name} is used before it is defined in {scope.graph}")
    if known.type != value.type:
        raise TypeMismatch(f"{value.name} is {known.type} where it is defined, {value.type} here")
    if value.name in scope.consumed:
        writer = scope.consumed[value.name]
        raise TypeMismatch(
            f"{value.name} is read after {writer.name} wrote over it",
            advice="read the version that the write returns, or read before it",
        )


def _check_op(op: Op, scope: _Scope, blocks: Mapping[str, Graph]) -> None:
    for value in op.operands:
        _check_defined(scope, value, op)
    _check_waits(op, scope)
    wanted = _result_types(op, blocks, scope.mesh)
    if len(wanted) != len(op.results):
        raise TypeMismatch(f"{op.name} makes {len(wanted)} results, {len(op.results)} are named")
    for value, type_ in zip(op.results, wanted, strict=True):
        if not _agrees(value.type, type_):
            raise TypeMismatch(f"{value.name} is {type_}, declared {value.type}")
    if op.name not in ("fused", "call"):
        check_sharding(op, scope.mesh)
    _check_choices(op)
    for state in overwritten(op):
        scope.consumed[state.name] = op
    for value in op.results:
        _define(scope, value, op)


def _check_waits(op: Op, scope: _Scope) -> None:
    for name in op.after:
        if name not in scope.defined:
            raise TypeMismatch(f"{op.name} waits for {name}, which is not made before it")


def _result_types(op: Op, blocks: Mapping[str, Graph], mesh: Mesh | None) -> Sequence[Type]:
    if op.name == "call":
        return _call_types(op, blocks)
    if op.name == "fused":
        return _fused_types(op, mesh)
    if op.body is not None:
        raise TypeMismatch(f"{op.name} cannot hold a body")
    return infer_types(op.name, [v.type for v in op.operands], op.attr)


def _call_types(op: Op, blocks: Mapping[str, Graph]) -> Sequence[Type]:
    name = str(op.attr.get("block", ""))
    if name not in blocks:
        raise TypeMismatch(f"call of {name!r}, which is no block above")
    block = blocks[name]
    _check_arguments(f"block {name}", block.inputs, op.operands)
    return [v.type for v in block.outputs]


def _fused_types(op: Op, mesh: Mesh | None) -> Sequence[Type]:
    if op.body is None or "kind" not in op.attr:
        raise TypeMismatch("a fused group carries its kind and its body")
    _check_arguments(f"body of {op.attr['kind']}", op.body.inputs, op.operands)
    if op.body.weights or op.body.states:
        raise TypeMismatch("the body of a fused group takes weights and states as inputs")
    verify_graph(op.body, mesh=mesh)
    return [v.type for v in op.body.outputs]


def _check_arguments(what: str, wanted: Sequence[Value], given: Sequence[Value]) -> None:
    if len(wanted) != len(given):
        raise TypeMismatch(f"{what} takes {len(wanted)} operands, got {len(given)}")
    for parameter, value in zip(wanted, given, strict=True):
        if parameter.type != value.type:
            raise TypeMismatch(f"{what}: {parameter.name} is {parameter.type}, got {value.type}")


def _agrees(declared: Type, inferred: Type) -> bool:
    if isinstance(declared, TensorType) and isinstance(inferred, TensorType):
        same_layout = not inferred.layout or declared.layout == inferred.layout
        return (declared.shape, declared.dtype) == (inferred.shape, inferred.dtype) and same_layout
    return declared == inferred


def _check_choices(op: Op) -> None:
    if not op.choices:
        return
    *bounded, last = op.choices
    if last.symbol or any(not c.symbol for c in bounded):
        raise TypeMismatch(f"the kernel table of {op.name} must end in an else, and only there")
    for symbol in {c.symbol for c in bounded}:
        limits = [c.limit for c in bounded if c.symbol == symbol]
        if limits != sorted(set(limits)):
            raise TypeMismatch(f"limits of {symbol} in the kernel table of {op.name} must ascend")


def _check_states(graph: Graph) -> None:
    if len(graph.states) != len(graph.state_outputs):
        counts = f"{len(graph.states)} states and returns {len(graph.state_outputs)}"
        raise TypeMismatch(f"graph {graph.name} has {counts}")
    for state, final in zip(graph.states, graph.state_outputs, strict=True):
        if not isinstance(state.type, StateType) or final.type != state.type:
            raise TypeMismatch(f"{state.name} of {graph.name} ends as {final.type}")


def _check_symbols(graph: Graph, known: set[str]) -> None:
    for value in graph.definitions().values():
        used = (
            {s for size in value.type.shape for s in size.symbols()}
            if isinstance(value.type, TensorType)
            else set()
        )
        if used - known:
            unknown = ", ".join(sorted(used - known))
            raise TypeMismatch(f"{value.name} of {graph.name} uses undeclared sizes: {unknown}")


def _check_load(load: Graph, graph: Graph) -> None:
    made = [v.type for v in load.outputs]
    wanted = [v.type for v in graph.weights]
    if made != wanted:
        pairs = zip(graph.weights, load.outputs, strict=False)
        bad = next((w.name for w, m in pairs if w.type != m.type), "their number")
        raise TypeMismatch(f"the load graph of {graph.name} does not make its weights: {bad}")
