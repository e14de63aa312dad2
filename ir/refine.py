"""Finer scale blocks by repeated scales: exact, and what lets a shard end inside a block.

A block of 128 rows with one scale is two blocks of 64 rows with that scale twice. So 1536 rows in
blocks of 128 can be shared by 8 ranks, 192 rows each, once their blocks are 64 high.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from metainfer.ir.dtypes import Block, BlockArray
from metainfer.ir.errors import TypeMismatch


def check_refines(fine: Block, coarse: Block, shape: tuple[int, ...]) -> None:
    """Check that every block of ``fine`` lies within one block of ``coarse``.

    Raises: TypeMismatch naming the dim and both extents, or what else differs.
    """
    if replace(fine, block=coarse.block) != coarse:
        raise TypeMismatch(
            f"{fine} is no refinement of {coarse}: only the blocks may differ",
            advice="dequantize and quantize, if a loss is meant",
        )
    pairs = zip(shape, fine.extents(len(shape)), coarse.extents(len(shape)), strict=True)
    for dim, (size, new, old) in enumerate(pairs):
        if old == 0 or old >= size or (new and old % new == 0):
            continue
        raise TypeMismatch(
            f"{fine} is no refinement of {coarse}: blocks of {new or size} in dim {dim} "
            f"do not lie within blocks of {old}",
            advice=f"take a divisor of {old}",
        )


def refine(array: BlockArray, format: Block) -> BlockArray:
    """The same values in finer blocks: codes as they are, scales and offsets repeated.

    Raises: TypeMismatch if the blocks of ``format`` do not lie within those of the array.
    """
    shape = array.shape
    check_refines(format, array.format, shape)
    scales, offsets = array.scales, array.offsets
    pairs = zip(
        format.scale_shape(shape),
        format.extents(len(shape)),
        array.format.extents(len(shape)),
        strict=True,
    )
    for dim, (count, new, old) in enumerate(pairs):
        # The block that a new block's first element lies in; a whole dim has one.
        index = np.arange(count) * new // old if old else np.zeros(count, np.intp)
        scales = scales.take(index, axis=dim)
        offsets = None if offsets is None else offsets.take(index, axis=dim)
    return BlockArray(format, array.codes, scales, offsets, array.row_scales)


def refined_format(format: Block, shape: tuple[int, ...], parts: Mapping[int, int]) -> Block:
    """The coarsest refinement of a format whose blocks end wherever a part does.

    A dim with one scale stays so: each part keeps a copy of it.

    Args:
        format: blocks as they are.
        shape: of the whole tensor.
        parts: dim -> size of the equal parts that it is cut into.
    """
    extents = list(format.extents(len(shape)))
    for dim, part in parts.items():
        if extents[dim] and part < shape[dim]:
            extents[dim] = math.gcd(extents[dim], part)
    return replace(format, block=tuple(extents))


def row_blocks(format: Block, shape: tuple[int, ...], rows: int) -> Block:
    """The coarsest refinement whose blocks end after every ``rows`` rows; one for all is one each.

    So pieces of that many rows can be joined or repeated as blocks.
    """
    if len(format.block) < len(shape):
        return format
    if format.block[0] == 0:
        return replace(format, block=format.block[1:])
    return refined_format(format, shape, {0: rows})
