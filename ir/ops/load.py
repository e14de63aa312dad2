"""Ops of load graphs: from a checkpoint's tensors to the weights that kernels want.

`quantize` rounds activations in a step, too.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from metainfer.ir import dtypes
from metainfer.ir.dtypes import Block, BlockArray, parse_dtype
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops import shard_rules
from metainfer.ir.ops.infer import axis_of, floats_of, integers_of, scalar_of, tensor_of
from metainfer.ir.ops.record import MOVES, RAW, Array, Attrs, Sizes, op
from metainfer.ir.refine import check_refines, refine
from metainfer.ir.types import TensorType, Type


def _infer_quantize(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = floats_of(types[0], "quantize")
    format_ = parse_dtype(str(attrs["format"]))
    if not isinstance(format_, Block):
        raise TypeMismatch(f"quantize to {format_}: wanted a block format", advice="use cast")
    # Sizes vary from step to step in leading dims only: those that blocks lie along are numbers.
    format_.scale_shape(tuple(n.static for n in x.shape[-len(format_.block) :]))
    return (x.with_dtype(format_),)


def _quantize_flops(sizes: Sizes) -> int:
    # The largest magnitude, the quotient, its rounding.
    return 3 * sizes.num_results()


@op(
    "quantize",
    infer=_infer_quantize,
    flops=_quantize_flops,
    shard=shard_rules.quantize,
    traits=[RAW],
)
def quantize(x: Array | BlockArray, *, format: str) -> BlockArray:
    """Round to a block format (`ir.dtypes.quantize`): weights as they load, or activations."""
    values = x.dequantize() if isinstance(x, BlockArray) else x
    return dtypes.quantize(values, cast(Block, parse_dtype(format)))


def _infer_dequantize(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, target = tensor_of(types[0]), scalar_of(attrs["dtype"])
    if not isinstance(x.dtype, Block):
        raise TypeMismatch(f"dequantize of {x}: wanted a block format", advice="use cast")
    if not target.is_float:
        raise TypeMismatch(f"dequantize to {target}: wanted floating point")
    return (x.with_dtype(target),)


@op("dequantize", infer=_infer_dequantize, shard="...=", traits=[RAW])
def dequantize(x: BlockArray, *, dtype: str = "f32") -> Array:
    """Values of a block format as plain numbers."""
    return x.dequantize().astype(scalar_of(dtype).numpy)


def _infer_refine(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, format_ = tensor_of(types[0]), parse_dtype(str(attrs["format"]))
    if not isinstance(x.dtype, Block) or not isinstance(format_, Block):
        raise TypeMismatch(f"refine_scales of {x} to {format_}: wanted block formats")
    check_refines(format_, x.dtype, tuple(n.static for n in x.shape))
    return (x.with_dtype(format_),)


@op("refine_scales", infer=_infer_refine, shard="...=", traits=[RAW])
def refine_scales(x: BlockArray, *, format: str) -> BlockArray:
    """Repeat scales so that blocks become smaller; no value changes (`ir.refine.refine`)."""
    return refine(x, cast(Block, parse_dtype(format)))


def _infer_rows(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    tensors = [tensor_of(t) for t in types]
    if not tensors:
        raise TypeMismatch("concat_rows of nothing")
    first = tensors[0]
    for other in tensors[1:]:
        same = other.dtype == first.dtype and other.rank == first.rank >= 1
        if not same or other.shape[1:] != first.shape[1:]:
            raise TypeMismatch(f"concat_rows of {first} and {other}")
    extent = _rows_of_block(first)
    if extent == 0 or any(t.shape[0].static % extent for t in tensors[:-1]):
        raise TypeMismatch(
            f"concat_rows of {first.dtype}: its blocks span rows", advice="dequantize first"
        )
    total = sum((t.shape[0] for t in tensors[1:]), start=tensors[0].shape[0])
    return (first.with_shape((total, *first.shape[1:])),)


def _rows_of_block(x: TensorType) -> int:
    """Rows that one block covers: 0 means all of them, 1 that blocks lie within rows."""
    if not isinstance(x.dtype, Block) or len(x.dtype.block) < x.rank:
        return 1
    return x.dtype.block[0]


@op("concat_rows", infer=_infer_rows, shard=shard_rules.whole_rows, traits=[RAW, MOVES])
def concat_rows(*xs: Array | BlockArray) -> Array | BlockArray:
    """Join weights [out, in] by their output rows, codes and scales alike.

    Blocks that cover several rows must end where a weight ends.
    """
    blocks = [x for x in xs if isinstance(x, BlockArray)]
    if not blocks:
        return np.concatenate(cast(tuple[Array, ...], xs), axis=0)
    return BlockArray.joined(blocks, np.concatenate)


def _infer_taken(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, index = tensor_of(types[0]), integers_of(types[1], "row numbers")
    axis_of(0, x.rank)
    if index.rank != 1:
        raise TypeMismatch(f"take_rows by {index}: wanted a list of rows")
    if _rows_of_block(x) != 1:
        raise TypeMismatch(
            f"take_rows of {x.dtype}: its blocks span rows", advice="dequantize first"
        )
    return (x.with_shape((*index.shape, *x.shape[1:])),)


@op("take_rows", infer=_infer_taken, shard=shard_rules.gather, traits=[RAW, MOVES])
def take_rows(x: Array | BlockArray, index: Array) -> Array | BlockArray:
    """Rows of a weight in another order, some of them several times, codes and scales alike.

    The index is a tensor, so that layers that differ in it alone stay one block.
    Shapes: x [N, ...], index [I] of integers in [0, N) -> [I, ...].
    """
    if not isinstance(x, BlockArray):
        return x[index]
    return x.by_rows(lambda a: a[index])


def _infer_unpermute(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    heads = int(cast(int, attrs["heads"]))
    axis_of(0, x.rank)
    if heads < 1 or x.shape[0].static % (2 * heads):
        raise TypeMismatch(f"{x.shape[0]} rows are not {heads} heads of pairs")
    if _rows_of_block(x) != 1:
        raise TypeMismatch(f"unpermute_rope of {x.dtype}: its blocks span rows")
    return (x,)


@op("unpermute_rope", infer=_infer_unpermute, shard=shard_rules.whole_rows, traits=[RAW, MOVES])
def unpermute_rope(x: Array | BlockArray, *, heads: int) -> Array | BlockArray:
    """Undo GGUF's interleaving of rotary pairs in the rows of q and k.

    GGUF stores row (head, pair, half) where half-split rope wants (head, half, pair).
    Shapes: x [heads * D, ...] -> the same.
    """

    def rows(a: Array) -> Array:
        split = a.reshape(heads, a.shape[0] // heads // 2, 2, *a.shape[1:])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(a.shape)

    if not isinstance(x, BlockArray):
        return rows(x)
    return x.by_rows(rows)


def _infer_repeat(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    groups, times = (int(cast(int, attrs[k])) for k in ("groups", "times"))
    if groups < 1 or times < 1 or x.shape[0].static % groups:
        raise TypeMismatch(
            f"{x.shape[0]} rows are not {groups} groups to be repeated {times} times"
        )
    extent = _rows_of_block(x)
    if extent == 0 or x.shape[0].static // groups % extent:
        raise TypeMismatch(f"repeat_rows of {x.dtype}: its blocks span groups")
    return (x.with_shape((x.shape[0] * times, *x.shape[1:])),)


@op("repeat_rows", infer=_infer_repeat, shard=shard_rules.whole_rows, traits=[RAW, MOVES])
def repeat_rows(x: Array | BlockArray, *, groups: int, times: int) -> Array | BlockArray:
    """Repeat each group of rows: ``a b`` becomes ``a a b b``. Codes and scales alike.

    Shapes: x [groups * N, ...] -> [groups * times * N, ...].
    """

    def repeated(a: Array) -> Array:
        rows = a.reshape(groups, 1, -1, *a.shape[1:])
        wide = np.broadcast_to(rows, (groups, times, *rows.shape[2:]))
        return np.ascontiguousarray(wide).reshape(-1, *a.shape[1:])

    if not isinstance(x, BlockArray):
        return repeated(x)
    return x.by_rows(repeated)


def _infer_pack(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    return (TensorType(x.shape, x.dtype, layout=str(attrs["layout"])),)


@op("pack", infer=_infer_pack, shard="...=", traits=[RAW])
def pack(x: Array | BlockArray, *, layout: str) -> Array | BlockArray:
    """Order a weight's bytes as a kernel wants them.

    Packing never changes a value, so the reference is the identity; backends hold the packers, each
    with its exact inverse.
    """
    return x
