"""Where each value of a step lives: views share storage, the rest is packed by lifetime."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from metainfer.ir.flatten import FlatModule
from metainfer.ir.graph import Op, Value
from metainfer.ir.types import TensorType

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load
VIEW_OPS = frozenset({"reshape", "transpose", "broadcast", "slice"})


@dataclass(frozen=True)
class Buffer:
    """Storage of one value.

    Units: bytes.

    Attributes:
        name: value that owns it.
        offset: from the start of the arena.
        size: at the upper bounds of the symbols.
        first: number of the op that writes it (-1: an input).
        last: number of the last op that reads it.
    """

    name: str
    offset: int
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """All buffers of a step.

    Attributes:
        buffers: by the name of the owning value.
        owner: value -> value whose storage it shares.
        size: total bytes.
        workspace_offset: scratch space that every kernel may use while it runs.
        workspace_size: its bytes.
    """

    buffers: Mapping[str, Buffer]
    owner: Mapping[str, str]
    size: int
    workspace_offset: int
    workspace_size: int


def plan_arena(
    flat: FlatModule, limits: Mapping[str, tuple[int, int]], workspace: int = 0
) -> Arena:
    """Assign offsets so that no two buffers that are live at once overlap.

    Buffers are placed largest first into the lowest gap that is free over their whole life.
    """
    owner = _owners(flat)
    lives = _lives(flat, owner)
    highs = {name: high for name, (_, high) in limits.items()}
    sizes = {name: _round(_bytes(value, highs)) for name, value in _owned(flat, owner).items()}
    placed: list[Buffer] = []
    for name in sorted(sizes, key=lambda n: (-sizes[n], lives[n])):
        first, last = lives[name]
        offset = _lowest_gap(sizes[name], first, last, placed)
        placed.append(Buffer(name, offset, sizes[name], first, last))
    top = max((b.offset + b.size for b in placed), default=0)
    return Arena(
        {b.name: b for b in placed}, owner, top + _round(workspace), top, _round(workspace)
    )


def strided_values(ops: Iterable[Op]) -> frozenset[str]:
    """Values that are views with gaps: their rows do not lie densely one after the other."""
    strided: set[str] = set()
    for op in ops:
        if op.name not in VIEW_OPS or _copies(op, strided):
            continue
        if op.operands[0].name in strided or _makes_gaps(op):
            strided.add(op.result.name)
    return frozenset(strided)


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
        axis, start = op.attr["dim"], op.attr["start"]
        lead = op.operands[0].tensor.shape[: axis if isinstance(axis, int) else 0]
        first = all(n.is_static and n.constant == 1 for n in lead)
        # A symbolic start has no fixed address: kernels that take addresses must not see it.
        return not first or op.attr.get("step", 1) != 1 or not isinstance(start, int)
    return False


def _owners(flat: FlatModule) -> dict[str, str]:
    owner: dict[str, str] = {v.name: v.name for v in flat.inputs}
    strided = strided_values(item.op for item in flat.ops)
    for item in flat.ops:
        for value in item.op.results:
            owner[value.name] = value.name
        if is_view(item.op, strided):
            source = item.op.operands[0].name
            # A view of a weight or of the step record owns nothing.
            owner[item.op.result.name] = owner.get(source, source)
    return owner


def _owned(flat: FlatModule, owner: Mapping[str, str]) -> dict[str, Value]:
    values = [*flat.inputs, *(v for item in flat.ops for v in item.op.results)]
    return {v.name: v for v in values if owner[v.name] == v.name and not v.is_state}


def _lives(flat: FlatModule, owner: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    lives = {v.name: (-1, 0) for v in flat.inputs}
    for number, item in enumerate(flat.ops):
        for value in item.op.operands:
            name = owner.get(value.name)
            if name in lives:
                lives[name] = (lives[name][0], number)
        for value in item.op.results:
            if owner[value.name] == value.name:
                lives[value.name] = (number, number)
    end = len(flat.ops)
    for value in flat.outputs:
        name = owner.get(value.name, "")
        if name in lives:
            lives[name] = (lives[name][0], end)
    return lives


def _lowest_gap(size: int, first: int, last: int, placed: Sequence[Buffer]) -> int:
    """First offset where ``size`` bytes are free from op ``first`` to op ``last``."""
    busy = sorted(
        (b.offset, b.offset + b.size) for b in placed if b.first <= last and first <= b.last
    )
    offset = 0
    for start, end in busy:
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset


def _bytes(value: Value, highs: Mapping[str, int]) -> int:
    assert isinstance(value.type, TensorType)
    return value.type.bytes_at(highs)


def _round(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
