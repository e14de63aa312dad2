"""Ops of load graphs: from a checkpoint's tensors to the weights that kernels want."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from metainfer.ir import dtypes
from metainfer.ir.dtypes import Block, BlockArray, parse_dtype
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops.infer import scalar_of, tensor_of
from metainfer.ir.ops.record import RAW, Array, Attrs, op
from metainfer.ir.types import TensorType, Type


def _infer_quantize(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    format_ = parse_dtype(str(attrs["format"]))
    if not isinstance(format_, Block):
        raise TypeMismatch(f"quantize to {format_}: wanted a block format", advice="use cast")
    format_.scale_shape(tuple(n.static for n in x.shape))
    return (x.with_dtype(format_),)


@op("quantize", infer=_infer_quantize, traits=[RAW])
def quantize(x: Array | BlockArray, *, format: str) -> BlockArray:
    """Round to a block format (`ir.dtypes.quantize`)."""
    values = x.dequantize() if isinstance(x, BlockArray) else x
    return dtypes.quantize(values, cast(Block, parse_dtype(format)))


def _infer_dequantize(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return (tensor_of(types[0]).with_dtype(scalar_of(attrs["dtype"])),)


@op("dequantize", infer=_infer_dequantize, traits=[RAW])
def dequantize(x: BlockArray, *, dtype: str = "f32") -> Array:
    """Values of a block format as plain numbers."""
    return x.dequantize().astype(scalar_of(dtype).numpy)


def _infer_rows(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    tensors = [tensor_of(t) for t in types]
    first = tensors[0]
    for other in tensors[1:]:
        if other.dtype != first.dtype or other.shape[1:] != first.shape[1:]:
            raise TypeMismatch(f"concat_rows of {first} and {other}")
    if isinstance(first.dtype, Block) and len(first.dtype.block) >= first.rank:
        raise TypeMismatch(
            f"concat_rows of {first.dtype}: its blocks span rows", advice="dequantize first"
        )
    total = sum((t.shape[0] for t in tensors[1:]), start=tensors[0].shape[0])
    return (first.with_shape((total, *first.shape[1:])),)


@op("concat_rows", infer=_infer_rows, traits=[RAW])
def concat_rows(*xs: Array | BlockArray) -> Array | BlockArray:
    """Join weights [out, in] by their output rows, codes and scales alike."""
    blocks = [x for x in xs if isinstance(x, BlockArray)]
    if not blocks:
        return np.concatenate(cast(tuple[Array, ...], xs), axis=0)
    offsets = None
    if blocks[0].offsets is not None:
        offsets = np.concatenate([cast(Array, b.offsets) for b in blocks])
    return BlockArray(
        blocks[0].format,
        np.concatenate([b.codes for b in blocks]),
        np.concatenate([b.scales for b in blocks]),
        offsets,
    )


def _infer_unpermute(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    heads = int(cast(int, attrs["heads"]))
    if x.shape[0].static % (2 * heads):
        raise TypeMismatch(f"{x.shape[0]} rows are not {heads} heads of pairs")
    if isinstance(x.dtype, Block) and len(x.dtype.block) >= x.rank:
        raise TypeMismatch(f"unpermute_rope of {x.dtype}: its blocks span rows")
    return (x,)


@op("unpermute_rope", infer=_infer_unpermute, traits=[RAW])
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
    offsets = None if x.offsets is None else rows(x.offsets)
    return BlockArray(x.format, rows(x.codes), rows(x.scales), offsets)


def _infer_pack(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    return (TensorType(x.shape, x.dtype, layout=str(attrs["layout"])),)


@op("pack", infer=_infer_pack, traits=[RAW])
def pack(x: Array | BlockArray, *, layout: str) -> Array | BlockArray:
    """Order a weight's bytes as a kernel wants them.

    Packing never changes a value, so the reference is the identity; backends hold the packers, each
    with its exact inverse.
    """
    return x
