"""Ops that move, repeat or make numbers without computing: views, gathers, constants."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from metainfer.ir.dims import Dim, dim, product, same_product
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Attr
from metainfer.ir.ops import shard_rules
from metainfer.ir.ops.infer import (
    axis_of,
    floats_of,
    integers_of,
    ints_of,
    scalar_of,
    size_of,
    sizes_of,
    tensor_of,
)
from metainfer.ir.ops.record import VIEW, Array, Attrs, ShardRule, Sizes, op
from metainfer.ir.types import TensorType, Type


def _no_bytes(sizes: Sizes) -> int:
    return 0


def _infer_reshape(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    shape = sizes_of(attrs["shape"])
    if not same_product(shape, x.shape):
        raise TypeMismatch(f"reshape of {x} to [{', '.join(map(str, shape))}]")
    return (x.with_shape(shape),)


@op("reshape", infer=_infer_reshape, bytes=_no_bytes, shard=shard_rules.reshape, traits=[VIEW])
def reshape(x: Array, *, shape: tuple[Attr, ...]) -> Array:
    """Give the same numbers another shape; sizes may be symbolic."""
    return x.reshape(cast(tuple[int, ...], shape))


def _infer_transpose(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    perm = ints_of(attrs["perm"])
    if sorted(perm) != list(range(x.rank)):
        raise TypeMismatch(f"{perm} is no permutation of {x.rank} dims")
    return (x.with_shape(tuple(x.shape[i] for i in perm)),)


@op(
    "transpose",
    infer=_infer_transpose,
    bytes=_no_bytes,
    shard=shard_rules.transpose,
    traits=[VIEW],
)
def transpose(x: Array, *, perm: tuple[int, ...]) -> Array:
    """Permute the dims."""
    return np.transpose(x, perm)


def _infer_broadcast(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    shape = sizes_of(attrs["shape"])
    for have, want in zip(reversed(x.shape), reversed(shape), strict=False):
        if have not in (want, dim(1)):
            raise TypeMismatch(f"{x} does not broadcast to [{', '.join(map(str, shape))}]")
    if x.rank > len(shape):
        raise TypeMismatch(f"{x} does not broadcast to {len(shape)} dims")
    return (x.with_shape(shape),)


@op(
    "broadcast",
    infer=_infer_broadcast,
    bytes=_no_bytes,
    shard=shard_rules.broadcast,
    traits=[VIEW],
)
def broadcast(x: Array, *, shape: tuple[Attr, ...]) -> Array:
    """Repeat dims of size 1 to a shape."""
    return np.broadcast_to(x, cast(tuple[int, ...], shape))


def _infer_slice(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    axis = axis_of(attrs["dim"], x.rank)
    first, last, step = size_of(attrs["start"]), size_of(attrs["stop"]), size_of(attrs["step"])
    # Bounds may hold the dim's own symbols: what is decided is their difference.
    ends = (first, last - first, x.shape[axis] - last)
    if step.static < 1 or any(n.is_static and n.static < 0 for n in ends):
        raise TypeMismatch(f"slice [{first}:{last}:{step}] of a dim of {x.shape[axis]}")
    size = (last - first).ceildiv(step.static)
    return (x.with_shape((*x.shape[:axis], size, *x.shape[axis + 1 :])),)


@op(
    "slice",
    infer=_infer_slice,
    bytes=_no_bytes,
    shard=shard_rules.whole_dim(sums="0"),
    traits=[VIEW],
)
def slice_(x: Array, *, dim: int, start: Attr, stop: Attr, step: int = 1) -> Array:
    """Take ``start:stop:step`` of one dim; bounds are non-negative and may be symbolic."""
    index = [slice(None)] * x.ndim
    index[dim] = slice(cast(int, start), cast(int, stop), step)
    return x[tuple(index)]


def _infer_concat(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    tensors = [tensor_of(t) for t in types]
    if not tensors:
        raise TypeMismatch("concat of nothing")
    axis = axis_of(attrs["dim"], tensors[0].rank)
    first = tensors[0]
    for other in tensors[1:]:
        rest = [
            (a, b)
            for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=False))
            if i != axis
        ]
        if other.rank != first.rank or other.dtype != first.dtype or any(a != b for a, b in rest):
            raise TypeMismatch(f"concat along dim {axis} of {first} and {other}")
    total = sum((t.shape[axis] for t in tensors), start=Dim())
    return (first.with_shape((*first.shape[:axis], total, *first.shape[axis + 1 :])),)


@op("concat", infer=_infer_concat, shard=shard_rules.whole_dim(sums="all"))
def concat(*xs: Array, dim: int) -> Array:
    """Join along one dim."""
    return np.concatenate(xs, axis=dim)


def _infer_pad(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    axis = axis_of(attrs["dim"], x.rank)
    before, after = size_of(attrs["before"]).static, size_of(attrs["after"]).static
    if before < 0 or after < 0:
        raise TypeMismatch(f"pad by {before} and {after}: a negative number", advice="use slice")
    size = x.shape[axis] + before + after
    return (x.with_shape((*x.shape[:axis], size, *x.shape[axis + 1 :])),)


def _pad_rule(types: Sequence[Type], attrs: Attrs) -> str:
    # A pending sum would add the filling once per rank, unless it is zero.
    rule: ShardRule = shard_rules.whole_dim(sums="" if attrs["value"] else "0")
    return rule(types, attrs)


@op("pad", infer=_infer_pad, shard=_pad_rule)
def pad(x: Array, *, dim: int, before: int = 0, after: int = 0, value: float = 0.0) -> Array:
    """Fill one dim up at its ends."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = (before, after)
    return np.pad(x, widths, constant_values=value)


def _infer_gather(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, index = tensor_of(types[0]), integers_of(types[1], "row numbers")
    axis_of(0, x.rank)
    return (x.with_shape((*index.shape, *x.shape[1:])),)


def _gather_bytes(sizes: Sizes) -> int:
    index, result = cast(TensorType, sizes.operands[1]), cast(TensorType, sizes.results[0])
    return index.bytes_at(sizes.env) + 2 * result.bytes_at(sizes.env)


@op("gather", infer=_infer_gather, bytes=_gather_bytes, shard=shard_rules.gather)
def gather(x: Array, index: Array) -> Array:
    """Take rows of the first dim.

    Shapes: x [N, ...], index [I...] of integers in [0, N) -> [I..., ...].
    """
    return x[index]


def _infer_embedding(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    index, table = integers_of(types[0], "row numbers"), floats_of(types[1], "a table")
    if table.rank != 2:
        raise TypeMismatch(f"embedding of {index} in {table}: wanted a table [V, D]")
    return (TensorType((*index.shape, table.shape[1]), scalar_of(attrs["dtype"])),)


def _embedding_bytes(sizes: Sizes) -> int:
    index, result = cast(TensorType, sizes.operands[0]), cast(TensorType, sizes.results[0])
    return index.bytes_at(sizes.env) + 2 * result.bytes_at(sizes.env)


@op(
    "embedding",
    infer=_infer_embedding,
    bytes=_embedding_bytes,
    shard="..., V+ D -> ... D ; sums 1 ; index 0 V",
)
def embedding(index: Array, table: Array, *, dtype: str = "f32") -> Array:
    """Look rows of a table up; the result's type is stated since tables may be quantized.

    A negative index gives a row of zeros: a padded token, or one whose row another rank holds.
    Shapes: index [...] of integers in [-1, V), table [V, D] -> [..., D].
    """
    return np.where(index[..., None] < 0, table.dtype.type(0), table[index])


def _infer_full(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return (TensorType(sizes_of(attrs["shape"]), scalar_of(attrs["dtype"])),)


@op("full", infer=_infer_full)
def full(*, shape: tuple[Attr, ...], value: float | int | bool, dtype: str) -> Array:
    """A tensor of one number; rank 0 is the constant."""
    return np.full(cast(tuple[int, ...], shape), value, scalar_of(dtype).numpy)


def _infer_iota(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return (TensorType((size_of(attrs["size"]),), scalar_of(attrs["dtype"])),)


@op("iota", infer=_infer_iota)
def iota(*, size: Attr, start: int = 0, step: int = 1, dtype: str = "i64") -> Array:
    """``start, start + step, ...``; size may be symbolic."""
    return (start + step * np.arange(cast(int, size))).astype(scalar_of(dtype).numpy)


def _infer_tensor(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    shape = sizes_of(attrs["shape"])
    values = attrs["values"]
    if not isinstance(values, tuple) or product(shape) != dim(len(values)):
        raise TypeMismatch("a constant's values do not fill its shape")
    return (TensorType(shape, scalar_of(attrs["dtype"])),)


@op("constant", infer=_infer_tensor)
def constant(*, shape: tuple[Attr, ...], values: tuple[Attr, ...], dtype: str) -> Array:
    """A small tensor of numbers that stand in the text."""
    return np.array(values).astype(scalar_of(dtype).numpy).reshape(cast(tuple[int, ...], shape))
