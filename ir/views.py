"""Views: ops that move no number, and where what they show lies."""

from collections.abc import Collection, Iterable

from metainfer.ir.graph import Op

VIEW_OPS = frozenset({"reshape", "transpose", "broadcast", "slice"})


def strided_values(ops: Iterable[Op]) -> frozenset[str]:
    """Values that are views with gaps: their rows do not lie densely one after the other."""
    strided: set[str] = set()
    for op in ops:
        if op.name not in VIEW_OPS or _copies(op, strided):
            continue
        if op.operands[0].name in strided or _makes_gaps(op):
            strided.add(op.result.name)
    return frozenset(strided)


def moving_values(ops: Iterable[Op]) -> frozenset[str]:
    """Views that begin at a place which depends on sizes, as ``x[T//2:]`` does.

    Kernels that are given addresses once for all sizes must not see them.
    """
    moving: set[str] = set()
    for op in ops:
        if op.name in VIEW_OPS:
            start = op.attr["start"] if op.name == "slice" else 0
            if op.operands[0].name in moving or not isinstance(start, int):
                moving.add(op.result.name)
    return frozenset(moving)


def is_view(op: Op, strided: Collection[str]) -> bool:
    """Whether an op only reads its operand's storage in another order."""
    return op.name in VIEW_OPS and not _copies(op, strided)


def _copies(op: Op, strided: Collection[str]) -> bool:
    """A reshape of a view with gaps is a copy, unless it only cuts the last dim."""
    if op.name != "reshape" or op.operands[0].name not in strided:
        return False
    before, after = op.operands[0].tensor.shape, op.result.tensor.shape
    lead = len(before) - 1
    return after[:lead] != before[:lead] or len(after) <= lead


def _makes_gaps(op: Op) -> bool:
    if op.name == "broadcast":
        return True
    if op.name == "transpose":
        perm = op.attr["perm"]
        return isinstance(perm, tuple) and perm != tuple(range(len(perm)))
    if op.name == "slice":
        axis = op.attr["dim"]
        lead = op.operands[0].tensor.shape[: axis if isinstance(axis, int) else 0]
        first = all(n.is_static and n.constant == 1 for n in lead)
        return not first or op.attr.get("step", 1) != 1
    return False
