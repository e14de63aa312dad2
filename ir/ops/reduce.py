"""Reductions, softmax, scans and top-k."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from metainfer.ir.dims import dim as dim_of
from metainfer.ir.dtypes import I64
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops.infer import axis_of, floats_only, numbers_only, reduce_dims, tensor_of
from metainfer.ir.ops.record import REDUCTION, Array, Attrs, Sizes, op
from metainfer.ir.ops.shard_rules import reduced, whole_dim
from metainfer.ir.types import Type


def _per_input(sizes: Sizes) -> int:
    return int(np.prod(sizes.shape(0), dtype=np.int64))


def _five_per_input(sizes: Sizes) -> int:
    return 5 * _per_input(sizes)


@op(
    "sum",
    infer=reduce_dims,
    flops=_per_input,
    shard=reduced("+", sums="0"),
    traits=[REDUCTION],
)
def sum_(x: Array, *, dims: tuple[int, ...], keep: bool = False) -> Array:
    """Add over dims; truth values are joined by or."""
    return np.sum(x, axis=dims, keepdims=keep, dtype=x.dtype)


@op(
    "mean",
    infer=floats_only(reduce_dims),
    flops=_per_input,
    shard=reduced("!", sums="0"),
    traits=[REDUCTION],
)
def mean(x: Array, *, dims: tuple[int, ...], keep: bool = False) -> Array:
    """Average over dims."""
    return np.mean(x, axis=dims, keepdims=keep)


@op("max", infer=reduce_dims, flops=_per_input, shard=reduced("!"), traits=[REDUCTION])
def max_(x: Array, *, dims: tuple[int, ...], keep: bool = False) -> Array:
    """Largest element over dims."""
    return np.max(x, axis=dims, keepdims=keep)


@op("min", infer=reduce_dims, flops=_per_input, shard=reduced("!"), traits=[REDUCTION])
def min_(x: Array, *, dims: tuple[int, ...], keep: bool = False) -> Array:
    """Smallest element over dims."""
    return np.min(x, axis=dims, keepdims=keep)


def _infer_argmax(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    axis = axis_of(attrs["dim"], x.rank)
    return (x.with_shape((*x.shape[:axis], *x.shape[axis + 1 :])).with_dtype(I64),)


@op(
    "argmax",
    infer=_infer_argmax,
    flops=_per_input,
    shard=reduced("!", key="dim"),
    traits=[REDUCTION],
)
def argmax(x: Array, *, dim: int) -> Array:
    """Index of the largest element of a dim; ties go to the lower index."""
    return np.argmax(x, axis=dim)


def _infer_along(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    axis_of(attrs["dim"], x.rank)
    return (x,)


@op("softmax", infer=floats_only(_infer_along), flops=_five_per_input, shard=whole_dim())
def softmax(x: Array, *, dim: int = -1) -> Array:
    """Exponentials normalised to sum 1 along a dim; a row of -inf gives zeros.

    The zeros (instead of NaN) are what masked attention means for a row that sees nothing.
    """
    top = np.max(x, axis=dim, keepdims=True)
    e = np.exp(x - np.where(np.isneginf(top), 0.0, top))
    total = np.sum(e, axis=dim, keepdims=True)
    return e / np.where(total == 0, 1.0, total)


@op("cumsum", infer=numbers_only(_infer_along), flops=_per_input, shard=whole_dim(sums="0"))
def cumsum(x: Array, *, dim: int) -> Array:
    """Running sum along a dim."""
    return np.cumsum(x, axis=dim, dtype=x.dtype)


def _infer_topk(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    axis_of(-1, x.rank)
    k = dim_of(int(cast(int, attrs["k"])))
    if k.static < 0:
        raise TypeMismatch(f"top {k}")
    if x.shape[-1].is_static and k.static > x.shape[-1].static:
        raise TypeMismatch(f"top {k} of a dim of {x.shape[-1]}")
    values = x.with_shape((*x.shape[:-1], k))
    return values, values.with_dtype(I64)


@op("topk", infer=_infer_topk, flops=_five_per_input, shard="... D! -> ... K!, ... K!")
def topk(x: Array, *, k: int) -> tuple[Array, Array]:
    """Largest k of the last dim, descending; ties go to the lower index.

    Shapes: x [..., D] -> values [..., k], indices [..., k].
    """
    # Ascending order of the mirrored row, mirrored back: equal elements keep their order.
    mirrored = np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    order = (x.shape[-1] - 1 - mirrored)[..., :k]
    return np.take_along_axis(x, order, axis=-1), order.astype(np.int64)
