"""Computing small constants while compiling, by the references of their ops."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import Scalar
from metainfer.ir.graph import Attr, Graph, Op, Value, attrs_of
from metainfer.ir.interpret import interpret_graph
from metainfer.ir.ops.record import ELEMENTWISE, NONDETERMINISTIC, RAW, STATEFUL, Array, op_def
from metainfer.ir.types import TensorType

MAX_ELEMENTS = 64
MAKERS = frozenset(["full", "constant", "iota"])
# Of one number repeated, these make that number repeated.
_SPREADING = frozenset(["reshape", "transpose", "broadcast", "slice"])


def fold(op: Op, makers: Mapping[str, Op]) -> Op | None:
    """The constant that an op makes, if all its operands are constants and few numbers.

    Args:
        op: the op.
        makers: the op (of MAKERS) that makes each constant value.

    Returns: a ``full`` or ``constant`` op with the same result, or None.
    """
    if not _is_foldable(op):
        return None
    sources = [makers[v.name] for v in op.operands if v.name in makers]
    if not sources or len(sources) != len(op.operands):
        return None
    if all(source.name == "full" for source in sources):
        return _fold_splat(op, sources)
    if all(_is_small(v) for v in (*op.operands, op.result)):
        return _fold_small(op, sources)
    return None


def full(value: Value, number: Attr) -> Op:
    """The op that fills a value's type with one number."""
    shape = tuple(n.constant if n.is_static else n for n in value.tensor.shape)
    attrs: dict[str, Attr] = {
        "shape": shape,
        "value": number,
        "dtype": value.tensor.dtype.name,
    }
    return Op("full", (), (value,), attrs_of(attrs))


def _is_foldable(op: Op) -> bool:
    if op.name in ("call", "fused", *MAKERS) or len(op.results) != 1:
        return False
    if op_def(op.name).traits & {RAW, STATEFUL, NONDETERMINISTIC}:
        return False
    type_ = op.result.type
    return isinstance(type_, TensorType) and isinstance(type_.dtype, Scalar)


def _is_small(value: Value) -> bool:
    size = value.tensor.shape
    if not all(n.is_static for n in size):
        return False
    return value.tensor.num_elements().constant <= MAX_ELEMENTS


def _fold_splat(op: Op, sources: list[Op]) -> Op | None:
    """Fold an op over repeated numbers, of any size."""
    if op.name in _SPREADING:
        return replace(full(op.result, sources[0].attr["value"]), source=op.source)
    if ELEMENTWISE not in op_def(op.name).traits:
        return _fold_small(op, sources) if _all_small(op) else None
    scalars = [full(_scalar(source.result), source.attr["value"]) for source in sources]
    made = replace(op, results=(_scalar(op.result),))
    array = _evaluate(made, scalars)
    return None if np.isnan(array) else replace(full(op.result, array.item()), source=op.source)


def _all_small(op: Op) -> bool:
    return all(_is_small(v) for v in (*op.operands, op.result))


def _scalar(value: Value) -> Value:
    return Value(value.name, TensorType((), value.tensor.dtype))


def _fold_small(op: Op, sources: list[Op]) -> Op | None:
    array = _evaluate(op, sources)
    numbers = [_plain(n) for n in array.reshape(-1)]
    # NaN is unequal to itself: a graph that holds it would not equal its own text.
    if any(n != n for n in numbers) or not numbers:
        return None
    if len({repr(n) for n in numbers}) == 1:
        return replace(full(op.result, numbers[0]), source=op.source)
    attrs: dict[str, Attr] = {
        "shape": tuple(n.constant for n in op.result.tensor.shape),
        "values": tuple(numbers),
        "dtype": op.result.tensor.dtype.name,
    }
    return Op("constant", (), (op.result,), attrs_of(attrs), source=op.source)


def _plain(number: Array) -> int | float | bool:
    """A Python number, exactly; narrow floats have no item() that gives one."""
    if number.dtype.kind in "biu":
        return cast(int, number.item())
    return float(number)


def _evaluate(op: Op, sources: list[Op]) -> Array:
    unique = {source.result.name: source for source in sources}
    graph = Graph("fold", ops=(*unique.values(), _typed(op, unique)), outputs=op.results)
    (made,) = interpret_graph(graph, {})
    return cast(Array, made)


def _typed(op: Op, sources: Mapping[str, Op]) -> Op:
    return replace(op, operands=tuple(sources[v.name].result for v in op.operands))


def number_in(value: Value, makers: Mapping[str, Op]) -> int | float | bool | None:
    """The number that a value repeats, None if it is no such constant."""
    maker = makers.get(value.name)
    if maker is None or maker.name != "full":
        return None
    return cast(int | float | bool, maker.attr["value"])


def is_one_size(value: Value) -> bool:
    """Whether a value has rank 0 or one element only."""
    return all(n == dim(1) for n in value.tensor.shape)
