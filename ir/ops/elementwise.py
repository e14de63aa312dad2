"""Ops that act on each element: unary, binary, comparisons, select, cast."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from metainfer.ir.dtypes import BOOL
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops import shard_rules
from metainfer.ir.ops.infer import (
    broadcast_shapes,
    comparison,
    elementwise,
    floats_only,
    numbers_only,
    scalar_of,
    tensor_of,
)
from metainfer.ir.ops.record import ELEMENTWISE, Array, Attrs, Count, ShardRule, op
from metainfer.ir.types import TensorType, Type

_erf = np.vectorize(math.erf, otypes=[np.float64])


def per_element(count: int) -> Count:
    """So many operations per result element."""
    return lambda sizes: count * sizes.num_results()


def _unary(
    name: str,
    function: Callable[[Array], Array],
    flops: int = 1,
    *,
    real: bool = True,
    linear: bool = False,
) -> None:
    def reference(x: Array) -> Array:
        return function(x)

    reference.__doc__ = f"Apply {name} to each element."
    infer = floats_only(elementwise) if real else numbers_only(elementwise)
    shard = "...=+" if linear else "...="
    op(name, infer=infer, flops=per_element(flops), shard=shard, traits=[ELEMENTWISE])(reference)


_unary("neg", np.negative, real=False, linear=True)
_unary("abs", np.abs, real=False)
_unary("exp", np.exp, 8)
_unary("log", np.log, 8)
_unary("sqrt", np.sqrt)
_unary("rsqrt", lambda x: 1.0 / np.sqrt(x), 2)
_unary("reciprocal", lambda x: 1.0 / x)
_unary("sin", np.sin, 8)
_unary("cos", np.cos, 8)
_unary("tanh", np.tanh, 8)
_unary("erf", lambda x: _erf(x).astype(x.dtype), 8)
_unary("sigmoid", lambda x: 1.0 / (1.0 + np.exp(-x)), 10)
_unary("relu", lambda x: np.maximum(x, 0))
_unary("silu", lambda x: x / (1.0 + np.exp(-x)), 10)
_unary("floor", np.floor)


@op(
    "gelu",
    infer=floats_only(elementwise),
    flops=per_element(12),
    shard="...=",
    traits=[ELEMENTWISE],
)
def gelu(x: Array, *, approximate: str = "none") -> Array:
    """Gaussian error linear unit, exact or by tanh.

    Source: Hendrycks & Gimpel 2016.
    """
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1.0 + np.tanh(inner))
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)).astype(x.dtype))


@op("logical_not", infer=comparison, shard="...=", traits=[ELEMENTWISE])
def logical_not(x: Array) -> Array:
    """Negate each truth value."""
    return np.logical_not(x)


def _binary(
    name: str,
    function: Callable[[Array, Array], Array],
    *,
    shard: str | ShardRule = "...=",
    bools: bool = False,
) -> None:
    def reference(x: Array, y: Array) -> Array:
        return function(x, y)

    reference.__doc__ = f"Apply {name} to each pair of elements, broadcasting."
    infer = elementwise if bools else numbers_only(elementwise)
    op(name, infer=infer, flops=per_element(1), shard=shard, traits=[ELEMENTWISE])(reference)


def _divide(x: Array, y: Array) -> Array:
    # Integers divided by 0 give 0, as everywhere in numpy.
    return np.true_divide(x, y) if x.dtype.kind == "f" else np.floor_divide(x, y)


_binary("add", np.add, shard="...=+", bools=True)
_binary("sub", np.subtract, shard="...=+")
_binary("mul", np.multiply, shard="...= ; sums 0 | 1", bools=True)
_binary("div", _divide, shard=shard_rules.divide)
_binary("floor_div", np.floor_divide)
_binary("remainder", np.remainder)
_binary("pow", np.power)
_binary("maximum", np.maximum, bools=True)
_binary("minimum", np.minimum, bools=True)


def _compare(name: str, function: Callable[[Array, Array], Array]) -> None:
    def reference(x: Array, y: Array) -> Array:
        return function(x, y)

    reference.__doc__ = f"Compare each pair of elements by {name}, broadcasting."
    op(name, infer=comparison, flops=per_element(1), shard="...=", traits=[ELEMENTWISE])(reference)


_compare("eq", np.equal)
_compare("ne", np.not_equal)
_compare("lt", np.less)
_compare("le", np.less_equal)
_compare("gt", np.greater)
_compare("ge", np.greater_equal)
_compare("logical_and", np.logical_and)
_compare("logical_or", np.logical_or)


def _infer_where(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    condition, x, y = (tensor_of(t) for t in types)
    if condition.dtype != BOOL:
        raise TypeMismatch(f"the condition of where is bool, got {condition}")
    if x.dtype != y.dtype:
        raise TypeMismatch(f"element types differ: {x.dtype}, {y.dtype}", advice="insert a cast")
    return (TensorType(broadcast_shapes([condition.shape, x.shape, y.shape]), x.dtype),)


@op(
    "where",
    infer=_infer_where,
    flops=per_element(1),
    shard="...= ; sums 1 2",
    traits=[ELEMENTWISE],
)
def where(condition: Array, x: Array, y: Array) -> Array:
    """Take x where the condition holds, else y."""
    return np.where(condition, x, y)


def _infer_cast(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return (tensor_of(types[0]).with_dtype(scalar_of(attrs["dtype"])),)


@op("cast", infer=_infer_cast, flops=per_element(1), shard="...=", traits=[ELEMENTWISE])
def cast(x: Array, *, dtype: str) -> Array:
    """Convert to another element type; float to integer truncates, floats round to nearest even."""
    target = scalar_of(dtype)
    if x.dtype.kind == "f" and target.kind in ("int", "uint"):
        return np.trunc(x).astype(target.numpy)
    return x.astype(target.numpy)
