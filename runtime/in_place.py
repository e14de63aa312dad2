"""Results that take the place of an operand, as all kernels of their op allow."""

from collections.abc import Mapping

from metainfer.backends.registry import Backends
from metainfer.ir.arena import overlaid
from metainfer.ir.flatten import FlatModule
from metainfer.ir.graph import Op


def in_place(flat: FlatModule, backends: Backends, *, over_inputs: bool = False) -> dict[str, str]:
    """Result -> owner of the storage whose place it takes (`ir.arena.overlaid`).

    A kernel table has one place for a result, whatever the size: every row must allow it.

    Args:
        flat: a compiled module.
        backends: its kernels.
        over_inputs: whether inputs may be overwritten, where each run brings new ones.
    """
    allowed = [_allowed(item.op, backends) for item in flat.ops]
    return overlaid(flat, allowed, over_inputs=over_inputs)


def _allowed(op: Op, backends: Backends) -> Mapping[int, int]:
    if not op.choices:
        return {}
    first, *rest = (backends.kernels.get(c.kernel).in_place.items() for c in op.choices)
    return {r: o for r, o in first if all((r, o) in items for items in rest)}
