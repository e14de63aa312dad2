"""Matrix products and convolution."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import Scalar
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Attr
from metainfer.ir.ops import shard_rules
from metainfer.ir.ops.infer import (
    broadcast_shapes,
    floats_of,
    floats_only,
    ints_of,
    numbers_only,
    product_dtype,
    tensor_of,
)
from metainfer.ir.ops.record import Array, Attrs, Sizes, op
from metainfer.ir.types import TensorType, Type


def _infer_linear(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, weight = floats_of(types[0], "linear"), floats_of(types[1], "linear")
    if x.rank < 1 or weight.rank != 2:
        raise TypeMismatch(f"linear of {x} by {weight}")
    made = product_dtype("linear", x, weight, attrs["dtype"])
    if x.shape[-1] != weight.shape[1]:
        hint = " (it is stored [out, in])" if x.shape[-1] == weight.shape[0] else ""
        raise TypeMismatch(f"linear: inner sizes differ, {x.shape[-1]} and {weight.shape[1]}{hint}")
    # A weight kept in a narrower float is a format choice, as block formats are.
    if isinstance(weight.dtype, Scalar) and weight.dtype != made:
        if weight.dtype.bits >= made.bits:
            raise TypeMismatch(
                f"linear: {made} by {weight.dtype}, which is no narrower",
                advice="insert a cast",
            )
    if len(types) > 2 and floats_of(types[2], "linear").shape != (weight.shape[0],):
        raise TypeMismatch(f"linear: bias {types[2]} for {weight.shape[0]} outputs")
    return (TensorType((*x.shape[:-1], weight.shape[0]), made, x.sharding),)


def _linear_flops(sizes: Sizes) -> int:
    return 2 * sizes.num_results() * sizes.shape(1)[1]


@op("linear", infer=_infer_linear, flops=_linear_flops, shard=shard_rules.linear)
def linear(x: Array, weight: Array, bias: Array | None = None, *, dtype: str = "") -> Array:
    """Multiply by a weight stored [out, in] and add a bias. Accumulates in float32.

    Activations may be of a block format (`quantize`) where the weight is of one, too: their exact
    values are multiplied, and ``dtype`` is the type of the result, which plain ones have already.

    Shapes: x [..., K], weight [N, K], bias [N] -> [..., N].
    """
    y = np.matmul(x, weight.T)
    return y if bias is None else y + bias


def _infer_matmul(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    a, b = tensor_of(types[0]), tensor_of(types[1])
    if a.rank < 2 or b.rank < 2:
        raise TypeMismatch(f"matmul of {a} by {b}: both need two dims")
    if a.dtype != b.dtype:
        raise TypeMismatch(f"element types differ: {a.dtype}, {b.dtype}", advice="insert a cast")
    inner, outer = (
        (b.shape[-1], b.shape[-2]) if attrs["transpose_b"] else (b.shape[-2], b.shape[-1])
    )
    if a.shape[-1] != inner:
        advice = ""
        if not attrs["transpose_b"] and a.shape[-1] == b.shape[-1]:
            advice = (
                "the second operand is stored [out, in]; did you mean matmul(transpose_b=true)?"
            )
        raise TypeMismatch(f"matmul: inner sizes differ, {a.shape[-1]} and {inner}", advice=advice)
    batch = broadcast_shapes([a.shape[:-2], b.shape[:-2]]) if a.rank > 2 or b.rank > 2 else ()
    return (a.with_shape((*batch, a.shape[-2], outer)),)


def _matmul_flops(sizes: Sizes) -> int:
    return 2 * sizes.num_results() * sizes.shape(0)[-1]


@op("matmul", infer=numbers_only(_infer_matmul), flops=_matmul_flops, shard=shard_rules.matmul)
def matmul(a: Array, b: Array, *, transpose_b: bool = False) -> Array:
    """Batched matrix product, batch dims broadcast. Accumulates in float32.

    Shapes: a [..., M, K], b [..., K, N] (or [..., N, K] with transpose_b) -> [..., M, N].
    """
    return np.matmul(a, np.swapaxes(b, -1, -2) if transpose_b else b)


def _conv_size(size: Dim, kernel: int, stride: int, padding: int) -> Dim:
    return (size + (2 * padding - kernel)) // stride + 1


def _infer_conv2d(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, w = tensor_of(types[0]), tensor_of(types[1])
    if x.rank != 4 or w.rank != 4:
        raise TypeMismatch(f"conv2d of {x} by {w}: both need four dims")
    if x.dtype != w.dtype:
        raise TypeMismatch(f"element types differ: {x.dtype}, {w.dtype}", advice="insert a cast")
    if len(types) > 2 and tensor_of(types[2]) != TensorType((w.shape[0],), w.dtype):
        raise TypeMismatch(f"conv2d: bias {types[2]} for {w.shape[0]} {w.dtype} outputs")
    groups = int(cast(int, attrs["groups"]))
    if groups < 1 or w.shape[0].static % groups:
        raise TypeMismatch(f"conv2d: {w.shape[0]} outputs in {groups} groups")
    if x.shape[1] != w.shape[1] * groups:
        raise TypeMismatch(f"conv2d: {x.shape[1]} channels by a kernel for {w.shape[1]} x {groups}")
    stride, padding = ints_of(attrs["stride"]), ints_of(attrs["padding"])
    if len(stride) != 2 or len(padding) != 2 or min(stride) < 1 or min(padding) < 0:
        raise TypeMismatch(f"conv2d: stride {stride}, padding {padding}: wanted two numbers each")
    sizes = tuple(
        _conv_size(x.shape[2 + i], w.shape[2 + i].static, stride[i], padding[i]) for i in (0, 1)
    )
    if any(n.is_static and n.static < 1 for n in sizes):
        raise TypeMismatch(f"conv2d: kernel {w} is larger than the padded image {x}")
    return (x.with_shape((x.shape[0], w.shape[0], *sizes)),)


def _conv_flops(sizes: Sizes) -> int:
    return 2 * sizes.num_results() * int(np.prod(sizes.shape(1)[1:]))


@op("conv2d", infer=floats_only(_infer_conv2d), flops=_conv_flops, shard=shard_rules.conv2d)
def conv2d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    stride: tuple[Attr, ...] = (1, 1),
    padding: tuple[Attr, ...] = (0, 0),
    groups: int = 1,
) -> Array:
    """Cross-correlate images with kernels.

    Shapes: x [N, C, H, W], weight [O, C/groups, h, w], bias [O] -> [N, O, H', W'].
    """
    (sh, sw), (ph, pw) = ints_of(stride), ints_of(padding)
    padded = np.pad(x, [(0, 0), (0, 0), (ph, ph), (pw, pw)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], axis=(2, 3))
    windows = windows[:, :, ::sh, ::sw]
    per_group = weight.shape[0] // groups
    outs = [
        np.einsum(
            "nchwij,ocij->nohw",
            windows[:, g * weight.shape[1] : (g + 1) * weight.shape[1]],
            weight[g * per_group : (g + 1) * per_group],
        )
        for g in range(groups)
    ]
    y = np.concatenate(outs, axis=1)
    return y if bias is None else y + bias[:, None, None]


def symbolic_rows(type_: TensorType) -> Dim:
    """Product of all dims but the last: the M of a linear."""
    rows = dim(1)
    for size in type_.shape[:-1]:
        rows = rows * size
    return rows
