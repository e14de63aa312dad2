"""Parts of weights: which elements of every checkpoint tensor a rank needs, and no others.

`take_shard` at the end of a load graph asks for a part of what was made; the question is handed
down through ops that work element by element, so that only that part is read and made.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from metainfer.ir.dtypes import Block, BlockArray
from metainfer.ir.graph import Op
from metainfer.ir.ops.collective import block_extent, rows_of
from metainfer.ir.ops.infer import axis_of, size_of
from metainfer.ir.ops.record import Array

# (start, stop) by dim; dims that are not named are whole.
Region = Mapping[int, tuple[int, int]]

# Ops whose every element, or every block, depends on that of their operand alone.
_ELEMENTWISE = frozenset({"cast", "quantize", "dequantize", "refine_scales"})


def shard_region(op: Op, number: int, region: Region) -> Region:
    """The region of a `take_shard`'s operand that holds a region of its result.

    Args:
        op: the `take_shard`, in local form.
        number: of the rank along the op's axis.
        region: of the result.
    """
    dim, ranks = int(cast(int, op.attr["dim"])), int(cast(int, op.attr["ranks"]))
    parts = int(cast(int, op.attr.get("parts", 0))) or ranks
    size = op.operands[0].tensor.shape[dim].static // parts
    base = number * parts // ranks * size
    start, stop = region.get(dim, (0, size))
    return {**region, dim: (base + start, base + stop)}


def needed_region(op: Op, region: Region) -> Region | None:
    """The region of an op's operand from which that of its result can be made; None if all is.

    It is larger where blocks of a format would be cut.
    """
    if op.name not in _ELEMENTWISE:
        return None
    return {dim: _whole_blocks(op, dim, bounds) for dim, bounds in region.items()}


def sliced_region(op: Op, region: Region) -> Region:
    """The region of a `slice`'s operand that is a region of its result."""
    dim = axis_of(op.attr["dim"], op.operands[0].tensor.rank)
    first, last = (size_of(op.attr[name]).static for name in ("start", "stop"))
    start, stop = region.get(dim, (0, last - first))
    return {**region, dim: (first + start, first + stop)}


def split_rows(op: Op) -> int:
    """How many rows of a `reshape`'s operand are one of its result; 0 if it does otherwise."""
    before, after = (v.tensor.concrete({}) for v in (op.operands[0], op.result))
    splits = len(after) == len(before) + 1 and after[2:] == before[1:]
    return after[1] if splits and after[0] * after[1] == before[0] else 0


def _whole_blocks(op: Op, dim: int, bounds: tuple[int, int]) -> tuple[int, int]:
    start, stop = bounds
    for type_ in (op.operands[0].tensor, op.result.tensor):
        extent, size = block_extent(type_, dim), type_.shape[dim].static
        dtype = type_.dtype
        if (
            op.name == "quantize"
            and isinstance(dtype, Block)
            and dim in dtype.whole_dims(type_.rank)
        ):
            # A scale is that of the whole dim, of which every part keeps a copy.
            extent = size
        extent = extent or 1
        start, stop = start // extent * extent, min(-(-stop // extent) * extent, size)
    return start, stop


def cut(data: Array | BlockArray, region: Region, held: Region | None = None) -> Array | BlockArray:
    """A region of a tensor.

    Args:
        data: the tensor, or a region of it.
        region: what is wanted, in places of the whole tensor.
        held: the region that ``data`` is; None if it is the whole tensor.

    Raises: TypeMismatch if blocks of a format would be cut.
    """
    for dim, (start, stop) in region.items():
        base = held[dim][0] if held is not None else 0
        if (start - base, stop - base) != (0, data.shape[dim]):
            data = rows_of(data, dim, start - base, stop - base)
    return data


def region_shape(shape: Sequence[int], region: Region) -> tuple[int, ...]:
    """Shape of a region of a tensor."""
    whole = ((0, size) for size in shape)
    return tuple(stop - start for start, stop in (region.get(d, w) for d, w in enumerate(whole)))
