"""How the kernels of its readers hold a weight in some format, and what that takes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import DType
from metainfer.ir.graph import Op
from metainfer.ir.types import TensorType
from metainfer.passes.candidates import candidates_of, query_of
from metainfer.passes.packings import cheapest_layouts
from metainfer.passes.target import Target
from metainfer.passes.weight_items import WEIGHTS, Item, retyped

# Large enough that what a packing fills up does not count.
_SAMPLE = (dim(4096), dim(4096))


@dataclass(frozen=True)
class Held:
    """How one reader holds the weights of an item.

    Attributes:
        kernel: made kernel of the cheapest packing.
        resident_bytes: of the weights in that packing.
        is_widened: whether the packing takes more for each number than the format.
    """

    kernel: str
    resident_bytes: int
    is_widened: bool


def widest(
    item: Item, dtype: DType, target: Target, limits: Mapping[str, tuple[int, int]]
) -> Held | None:
    """How the reader that needs most memory holds the item in a format.

    None if a reader has no kernel that is made for it (not a generic one).
    """
    found = [_held(retyped(op, dtype), target, limits) for op in item.readers]
    made = [held for held in found if held is not None]
    return max(made, key=lambda h: h.resident_bytes) if len(made) == len(found) else None


def _held(op: Op, target: Target, limits: Mapping[str, tuple[int, int]]) -> Held | None:
    chosen = cheapest_layouts(op, target, limits, frozenset())
    places = [i for i in WEIGHTS[op.name] if op.operands[i].is_weight]
    query = query_of(op, target, limits, frozenset())
    made = [
        c.kernel.name
        for c in candidates_of(op, query, target)
        if c.is_usable and not c.kernel.generic
        if all(c.kernel.layouts.get(i, "") == chosen.get(i, "") for i in places)
    ]
    if not made:
        return None
    packed = [replace(op.operands[i].tensor, layout=chosen.get(i, "")) for i in places]
    total = sum(target.costs.resident_bytes(t) for t in packed)
    return Held(made[0], total, any(_is_widened(t, target) for t in packed))


def _is_widened(packed: TensorType, target: Target) -> bool:
    sample = replace(packed, shape=(*packed.shape[:-2], *_SAMPLE))
    plain = replace(sample, layout="").bytes_at({})
    return target.costs.resident_bytes(sample) > plain * 1.1


def bytes_as(item: Item, dtype: DType) -> int:
    """Bytes of the item's weights in a format, not packed."""
    return sum(v.tensor.with_dtype(dtype).bytes_at({}) for v in item.stored)
