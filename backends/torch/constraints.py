"""Requirements of library kernels beyond the vocabulary of `backends.kernel`."""

from collections.abc import Callable

from metainfer.backends.kernel import Constraint, Query, Repair
from metainfer.ir.dtypes import Block, DType, Scalar
from metainfer.ir.entries import is_rounded
from metainfer.ir.graph import Op
from metainfer.ir.ops.record import attr_value
from metainfer.ir.types import StateType, TensorType


def all_dtypes(*names: str) -> Constraint:
    """All tensor operands have the same one of some element types."""

    def check(query: Query) -> str | None:
        types = [v.type for v in query.op.operands if isinstance(v.type, TensorType)]
        found = {str(t.dtype) for t in types}
        if len(found) <= 1 and found <= set(names):
            return None
        return ", ".join(sorted(found))

    return Constraint(f"operands are {' or '.join(names)}, all alike", check)


def same_dtype(first: int, *others: int) -> Constraint:
    """Operands have the element type of the first one; absent ones are left out."""

    def check(query: Query) -> str | None:
        wanted = query.dtype(first)
        for i in others:
            if i < len(query.op.operands) and query.dtype(i) != wanted:
                return f"{query.dtype(i)} in operand {i}, {wanted} in operand {first}"
        return None

    text = ", ".join(map(str, others))
    return Constraint(f"operand {text} has the type of operand {first}", check)


def result_dtype(operand: int) -> Constraint:
    """The first result has an operand's element type."""

    def check(query: Query) -> str | None:
        made, read = query.op.results[0].tensor.dtype, query.dtype(operand)
        return None if made == read else f"{made} from {read}"

    return Constraint(f"result has the type of operand {operand}", check)


def format_is(operand: int, text: str, holds: Callable[[DType], bool]) -> Constraint:
    """An operand's element type fulfils a description."""

    def check(query: Query) -> str | None:
        found = query.dtype(operand)
        return None if holds(found) else str(found)

    return Constraint(f"operand {operand} is {text}", check)


def is_row_format(element: str, *, tensor: bool = False) -> Callable[[DType], bool]:
    """Whether a format has codes of a type with one scale per row (or tensor) and no offset."""
    blocks = ((0,), (0, 0)) if tensor else ((0,),)

    def holds(dtype: DType) -> bool:
        return (
            isinstance(dtype, Block)
            and dtype.element.name == element
            and dtype.block in blocks
            and dtype.offset is None
        )

    return holds


def narrower(operand: int) -> Constraint:
    """An operand is a block format, or a float narrower than f32: something to widen."""

    def check(query: Query) -> str | None:
        found = query.dtype(operand)
        if isinstance(found, Block) or (found.is_float and found.bits < 32):
            return None
        return str(found)

    return Constraint(f"operand {operand} is a block format or a narrow float", check)


def block_format(operand: int) -> Constraint:
    """An operand is block-quantized."""
    return format_is(operand, "a block format", lambda d: isinstance(d, Block))


def any_feature(*names: str) -> Constraint:
    """The device has at least one of some features."""

    def check(query: Query) -> str | None:
        if any(query.device.has(name) for name in names):
            return None
        return f"{query.device.name} has none of them"

    return Constraint(f"feature {' or '.join(names)}", check)


def group_divides(operand: int, dim: int, name: str) -> Constraint:
    """A static size is a multiple of the group of the operand's block format."""

    def check(query: Query) -> str | None:
        dtype = query.dtype(operand)
        if isinstance(dtype, Scalar):
            return str(dtype)
        size, group = query.tensor(operand).shape[dim].static, dtype.block[-1]
        return None if group == 0 or size % group == 0 else f"{name} = {size}, group {group}"

    return Constraint(f"{name} % group == 0", check)


def equal_dims(a: tuple[int, int], b: tuple[int, int], text: str) -> Constraint:
    """Two sizes, each (operand, dim), are the same."""

    def check(query: Query) -> str | None:
        first = query.tensor(a[0]).shape[a[1]]
        second = query.tensor(b[0]).shape[b[1]]
        return None if first == second else f"{first} and {second}"

    return Constraint(text, check)


def rank_is(operand: int, rank: int) -> Constraint:
    """An operand has a number of dims."""

    def check(query: Query) -> str | None:
        found = query.tensor(operand).rank
        return None if found == rank else f"{found}"

    return Constraint(f"operand {operand} has {rank} dims", check)


def reduces_something() -> Constraint:
    """A reduction names a dim: libraries read no dims as all of them."""

    def check(query: Query) -> str | None:
        return None if attr_value(query.op, "dims") else "no dims"

    return Constraint("dims are named", check)


def batches_alike(a: int, b: int) -> Constraint:
    """Two stacks of matrices need no repetition: equal leading dims, or one matrix on the right."""

    def check(query: Query) -> str | None:
        first, second = query.tensor(a).shape[:-2], query.tensor(b).shape[:-2]
        if first == second or not second:
            return None
        return " and ".join(f"[{','.join(map(str, s))}]" for s in (first, second))

    return Constraint(f"operands {a} and {b} have the same leading dims", check)


def causal_is_square() -> Constraint:
    """Causal attention has as many queries as keys, where all libraries mean the same by it."""

    def check(query: Query) -> str | None:
        if not attr_value(query.op, "causal"):
            return None
        rows, columns = query.tensor(0).shape[-2], query.tensor(1).shape[-2]
        return None if rows == columns else f"{rows} queries, {columns} keys"

    return Constraint("causal only if square", check)


def state_dtype(state_operand: int, *names: str) -> Constraint:
    """All fields of a state have one of some element types."""

    def check(query: Query) -> str | None:
        type_ = query.op.operands[state_operand].type
        fields = type_.fields if isinstance(type_, StateType) else ()
        found = {str(t.dtype) for _, t in fields}
        return None if found and found <= set(names) else ", ".join(sorted(found))

    return Constraint(f"state {state_operand} is {' or '.join(names)}", check)


def state_like(state_operand: int, operand: int) -> Constraint:
    """Entries of a state have an operand's element type, or are rounded to fp8 codes."""

    def check(query: Query) -> str | None:
        type_ = query.op.operands[state_operand].type
        if isinstance(type_, StateType) and is_rounded(type_):
            return None
        fields = type_.fields if isinstance(type_, StateType) else ()
        found = {t.dtype for _, t in fields}
        return None if found == {query.dtype(operand)} else ", ".join(sorted(map(str, found)))

    text = f"state {state_operand} has the type of operand {operand} or is rounded to fp8 codes"
    return Constraint(text, check)


def head_width(state_operand: int, limit: int, multiple: int) -> Constraint:
    """Keys and values are equally wide, at most a limit, and a multiple of a number."""

    def check(query: Query) -> str | None:
        type_ = query.op.operands[state_operand].type
        if not isinstance(type_, StateType):
            return "a tensor"
        widths = [type_.field_type(name).shape[-1].static for name in ("k", "v")]
        fits = widths[0] == widths[1] <= limit and widths[0] % multiple == 0
        return None if fits else " and ".join(map(str, widths))

    return Constraint(f"key and value width equal, <= {limit}, % {multiple} == 0", check)


def body_is(*names: str) -> Constraint:
    """A fused group is a chain of ops, the first of which takes the first two inputs."""

    def check(query: Query) -> str | None:
        found = tuple(op.name for op in _body(query.op))
        if found != names:
            return ", ".join(found)
        inputs = query.op.body.inputs if query.op.body else ()
        first = _body(query.op)[0]
        lead = tuple(v.name for v in first.operands[:2]) == tuple(v.name for v in inputs[:2])
        return None if lead else "other operands first"

    return Constraint(f"body is {', '.join(names)} of the first operands", check)


def body_operands(index: int, *counts: int) -> Constraint:
    """An op of a fused group's body has one of these numbers of operands."""

    def check(query: Query) -> str | None:
        body = _body(query.op)
        found = len(body[index].operands) if index < len(body) else 0
        return None if found in counts else f"{found}"

    return Constraint(f"op {index} of the body has {' or '.join(map(str, counts))} operands", check)


def body_attr(index: int, name: str, value: str) -> Constraint:
    """An attribute of an op of a fused group's body has a value."""

    def check(query: Query) -> str | None:
        body = _body(query.op)
        if index >= len(body):
            return f"{len(body)} ops"
        found = attr_value(body[index], name)
        return None if found == value else f"{found}"

    return Constraint(f"{name} is {value}", check)


def _body(op: Op) -> tuple[Op, ...]:
    return op.body.ops if op.body is not None else ()


def pad_repair(
    constraint: Constraint, name: str, size_of: tuple[int, int], multiple: int = 0
) -> Repair:
    """Fill one static size up with zeros; costs the share that was added.

    Args:
        size_of: (operand, dim) of the size.
        multiple: what it is filled up to; 0 means the group of the operand's block format.
    """

    def waste(query: Query) -> float:
        operand, dim = size_of
        size, dtype = query.tensor(operand).shape[dim].static, query.dtype(operand)
        unit = multiple or (dtype.block[-1] if isinstance(dtype, Block) else 0)
        return -size % unit / size if unit else 0.0

    unit = f"a multiple of {multiple}" if multiple else "whole groups"
    return Repair(f"pad {name} to {unit}", constraint.text, waste)


def equal_widths(limit: int, multiple: int) -> Constraint:
    """Queries, keys and values are equally wide, at most a limit, and a multiple."""

    def check(query: Query) -> str | None:
        widths = [query.tensor(i).shape[-1].static for i in range(3)]
        fits = len(set(widths)) == 1 and widths[0] <= limit and widths[0] % multiple == 0
        return None if fits else " and ".join(map(str, widths))

    return Constraint(f"widths equal, <= {limit}, % {multiple} == 0", check)
