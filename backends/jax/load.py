"""Ops of load graphs in JAX: block formats read and written element by element."""

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from metainfer.backends.jax.numbers import Reference, jax_type
from metainfer.ir.dtypes import F8E8M0, Block, BlockArray, Scalar, parse_dtype

_LARGEST = {"f4e2m1": 6.0, "f8e4m3": 448.0, "f8e5m2": 57344.0}
# Half the distance of the two largest codes.
_HALF_STEP = {"f4e2m1": 1.0, "f8e4m3": 16.0, "f8e5m2": 4096.0}


def _dequantize(x: BlockArray, *, dtype: str = "f32") -> Any:
    """Every element looks its own block's scale up."""
    lead = len(x.shape) - len(x.format.block)
    extents = (
        *([1] * lead),
        *(b or n for b, n in zip(x.format.block, x.shape[lead:], strict=True)),
    )
    block = tuple(g // e for g, e in zip(np.indices(x.shape), extents, strict=True))
    values = jnp.asarray(x.codes).astype(jnp.float32) * jnp.asarray(x.scales, jnp.float32)[block]
    if x.row_scales is not None:
        values = values * jnp.asarray(x.row_scales, jnp.float32)
    if x.offsets is not None:
        values = values + jnp.asarray(x.offsets, jnp.float32)[block]
    return values.astype(jax_type(dtype))


def _quantize(x: Any, *, format: str) -> BlockArray:
    """Every block is rounded by itself."""
    format_ = cast(Block, parse_dtype(format))
    values = _dequantize(x) if isinstance(x, BlockArray) else jnp.asarray(x, jnp.float32)
    if format_.row is not None:
        return _by_rows(values, format_)
    scales = np.zeros(format_.scale_shape(values.shape), format_.scale.numpy)
    offsets = None if format_.offset is None else np.zeros(scales.shape, format_.offset.numpy)
    codes = np.zeros(values.shape, format_.element.numpy)
    lead = values.ndim - len(format_.block)
    for place in itertools.product(*(range(n) for n in scales.shape)):
        window = (*place[:lead], *(
            slice(i * e, (i + 1) * e) if e else slice(None)
            for i, e in zip(place[lead:], format_.block, strict=True)
        ))  # fmt: skip
        made, scale, offset = _block(values[window], format_)
        codes[window], scales[place] = np.asarray(made), np.asarray(scale)
        if offsets is not None:
            offsets[place] = np.asarray(offset)
    return BlockArray(format_, codes, scales, offsets)


def _by_rows(values: Any, format: Block) -> BlockArray:
    """Every row is divided by what brings its largest number to the largest code and scale."""
    top = _LARGEST[format.element.name] * _LARGEST[format.scale.name]
    least = np.finfo(np.float32).tiny
    most = jnp.abs(values).max(axis=-1, keepdims=True)
    row = np.maximum(np.asarray(most, np.float32) / np.float32(top), least)
    made = _quantize(np.asarray(values) / row, format=str(replace(format, row=None)))
    return replace(made, format=format, row_scales=row)


def _block(values: Any, format: Block) -> tuple[Any, Any, Any]:
    """Codes, scale and offset of one block."""
    element = format.element
    offset = jnp.float32(0)
    if format.offset is not None:
        top, half = float(2**element.bits - 1), 0.5
        offset = _floor_to(values.min(), format.offset)
        extent = values.max() - offset.astype(jnp.float32)
    elif element.is_float:
        top, half = _LARGEST[element.name], _HALF_STEP[element.name]
        extent = jnp.abs(values).max()
    else:
        top, half = float(2 ** (element.bits - 1) - 1), 0.5
        extent = jnp.abs(values).max()
    scale = _scale(extent, top, half, format.scale)
    wide = scale.astype(jnp.float32)
    safe = jnp.where(wide > 0, wide, 1)
    ratio = (values - offset.astype(jnp.float32)) / safe
    low = 0.0 if format.offset is not None else -top
    if not element.is_float:
        ratio = jnp.round(ratio)
    return jnp.clip(ratio, low, top).astype(jax_type(element.name)), scale, offset


def _scale(extent: Any, top: float, half: float, type_: Scalar) -> Any:
    """The nearest scale, or the next one where the largest value would be cut by half a step."""
    wanted = extent / jnp.float32(top)
    if type_ is F8E8M0:
        exponent = math.ceil(math.log2(float(wanted))) if float(wanted) > 0 else 0
        return jnp.float32(2.0 ** max(exponent, -127)).astype(jax_type(type_.name))
    nearest = wanted.astype(jax_type(type_.name))
    if extent <= nearest.astype(jnp.float32) * jnp.float32(top + half):
        return nearest
    return _neighbour(nearest, 1)


def _floor_to(value: Any, type_: Scalar) -> Any:
    nearest = value.astype(jax_type(type_.name))
    if nearest.astype(jnp.float32) <= value:
        return nearest
    return _neighbour(nearest, -1 if float(nearest) > 0 else 1)


def _neighbour(x: Any, step: int) -> Any:
    """The number whose bits are those of ``x``, counted on: away from 0 for 1."""
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    pattern = lax.bitcast_convert_type(x, bits)
    return lax.bitcast_convert_type((pattern + step).astype(bits), x.dtype)


def _refine_scales(x: BlockArray, *, format: str) -> BlockArray:
    """Every scale is written out to all elements; a block takes that of its first one."""
    format_ = cast(Block, parse_dtype(format))
    rank = len(x.shape)

    def spread(sides: Any) -> Any:
        for dim, extent in enumerate(x.format.extents(rank)):
            sides = np.repeat(sides, extent or x.shape[dim], axis=dim)
        firsts = tuple(
            slice(0, n, e or n) for n, e in zip(x.shape, format_.extents(rank), strict=True)
        )
        return sides[firsts]

    offsets = None if x.offsets is None else spread(x.offsets)
    return BlockArray(format_, x.codes, spread(x.scales), offsets, x.row_scales)


def _rows(x: Any, index: Any) -> Any:
    return np.asarray(x)[np.asarray(index)]


def _unpermute_rope(x: Any, *, heads: int) -> Any:
    """Row (head, half, pair) of the result is row (head, pair, half) of the operand."""
    total = x.shape[0]
    pairs = total // heads // 2
    row = jnp.arange(total)
    head, half, pair = row // (2 * pairs), row % (2 * pairs) // pairs, row % pairs
    index = head * 2 * pairs + pair * 2 + half
    if not isinstance(x, BlockArray):
        return jnp.take(x, index, axis=0)
    return x.by_rows(lambda a: _rows(a, index))


def _take_rows(x: Any, index: Any) -> Any:
    if not isinstance(x, BlockArray):
        return jnp.take(x, index, axis=0)
    return x.by_rows(lambda a: _rows(a, index))


def _concat_rows(*xs: Any) -> Any:
    if not isinstance(xs[0], BlockArray):
        return jnp.vstack(xs) if xs[0].ndim > 1 else jnp.hstack(xs)
    return BlockArray.joined(xs, np.vstack)


def _repeat_rows(x: Any, *, groups: int, times: int) -> Any:
    def repeated(a: Any) -> Any:
        size = a.shape[0] // groups
        rows = np.concatenate(
            [np.tile(np.arange(g * size, g * size + size), times) for g in range(groups)]
        )
        return a[rows]

    if not isinstance(x, BlockArray):
        return repeated(x)
    return x.by_rows(repeated)


def _pack(x: Any, *, layout: str) -> Any:
    """The order of bytes changes, no value does."""
    return x


LOAD: dict[str, Reference] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "refine_scales": _refine_scales,
    "concat_rows": _concat_rows,
    "unpermute_rope": _unpermute_rope,
    "take_rows": _take_rows,
    "repeat_rows": _repeat_rows,
    "pack": _pack,
}
