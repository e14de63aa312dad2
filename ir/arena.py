"""Where each value of a step lives: views share storage, the rest is packed by lifetime.

A result may take the place of an operand that nobody reads after its op, where the op's kernels
allow it: a residual that products are added to stays where it is through all layers.

Where ops run on several streams, a value lives until every op that may write its storage anew is
sure to begin after its last reader: reuse follows the order of the streams, not that of the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metainfer.ir.dtypes import Block
from metainfer.ir.flatten import FlatModule
from metainfer.ir.graph import Op, Value
from metainfer.ir.streams import num_streams, order_of
from metainfer.ir.types import TensorType
from metainfer.ir.views import is_view, strided_values

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load
# Activations of a block format lie in one buffer: codes, then scales from the next such multiple.
SCALES_ALIGNMENT = 16


@dataclass(frozen=True)
class Buffer:
    """Storage of one value.

    Units: bytes.

    Attributes:
        name: value that owns it.
        offset: from the start of the arena.
        size: at the upper bounds of the symbols.
        first: number of the op that writes it (-1: an input).
        last: number of the last op that reads it, or may run beside one that does; an op whose
            result takes its place does not count.
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
        in_place: result -> owner of the storage whose place it takes.
        size: total bytes.
        workspace_offset: where scratch space begins that kernels may use while they run: one part
            for each stream.
        workspace_size: bytes of one part.
        streams: number of parts.
    """

    buffers: Mapping[str, Buffer]
    owner: Mapping[str, str]
    in_place: Mapping[str, str]
    size: int
    workspace_offset: int
    workspace_size: int
    streams: int = 1

    def workspace_of(self, stream: int) -> int:
        """Where the scratch space of a stream begins."""
        return self.workspace_offset + stream * self.workspace_size


def plan_arena(
    flat: FlatModule,
    limits: Mapping[str, tuple[int, int]],
    workspace: int = 0,
    in_place: Mapping[str, str] | None = None,
) -> Arena:
    """Assign offsets so that no two buffers that are live at once overlap.

    Buffers are placed largest first into the lowest gap that is free over their whole life; those
    that take each other's place are one buffer, from the first's beginning to the last's end.

    Args:
        flat: what runs.
        limits: bounds of the size symbols.
        workspace: scratch bytes of each stream.
        in_place: results that take an operand's place (`overlaid`).
    """
    owner = _owners(flat)
    ops = [item.op for item in flat.ops]
    sizes = {name: _round(_bytes(value, limits)) for name, value in _owned(flat, owner).items()}
    known = _lives(flat, owner, order_of(ops).releases())
    lives = {name: known[name] for name in sizes}
    placed: list[Buffer] = []
    over = dict(in_place or {})
    shared = _whole_lives(lives, over)
    for name in sorted(shared, key=lambda n: (-sizes[n], shared[n])):
        first, last = shared[name]
        offset = _lowest_gap(sizes[name], first, last, placed)
        placed.append(Buffer(name, offset, sizes[name], first, last))
    top = max((b.offset + b.size for b in placed), default=0)
    space, streams = _round(workspace), num_streams(ops)
    buffers = _apart({b.name: b for b in placed}, sizes, lives, over)
    return Arena(buffers, owner, over, top + space * streams, top, space, streams)


def overlaid(
    flat: FlatModule, allowed: Sequence[Mapping[int, int]], *, over_inputs: bool = False
) -> dict[str, str]:
    """Results that take the place of an operand: result -> owner of the operand's storage.

    The operand is of the result's type, whole, and read by nobody else from then on; it is nothing
    that outlives the step or that the caller gave, and the op reads it once.

    Args:
        flat: what runs.
        allowed: per op, result number -> number of the operand whose place it may take.
        over_inputs: whether inputs may be overwritten, where each run brings new ones.
    """
    owner, ops = _owners(flat), [item.op for item in flat.ops]
    releases = order_of(ops).releases()
    kept = {owner.get(v.name, "") for v in flat.outputs}
    made = {v.name: v for op in ops for v in op.results}
    made |= {v.name: v for v in flat.inputs} if over_inputs else {}
    readers: dict[str, list[int]] = {}
    for number, op in enumerate(ops):
        for value in op.operands:
            readers.setdefault(owner.get(value.name, ""), []).append(number)
    whole = _whole_views(ops)
    found: dict[str, str] = {}
    for number, (op, pairs) in enumerate(zip(ops, allowed, strict=True)):
        for result, operand in pairs.items():
            value, target = op.operands[operand], op.results[result]
            root = owner.get(value.name, "")
            if root in kept or root not in made or whole.get(value.name, value.name) != root:
                continue
            if not _is_alike(value, target) or readers[root].count(number) != 1:
                continue
            if all(releases[r] <= number for r in readers[root] if r != number):
                found[target.name] = root
    return found


def _whole_views(ops: Sequence[Op]) -> dict[str, str]:
    """Reshapes, through any number of them -> the value of which they show every number."""
    strided, found = strided_values(ops), dict[str, str]()
    for op in ops:
        if op.name == "reshape" and is_view(op, strided):
            source = op.operands[0].name
            found[op.result.name] = found.get(source, source)
    return found


def _is_alike(value: Value, target: Value) -> bool:
    if not isinstance(value.type, TensorType) or not isinstance(target.type, TensorType):
        return False
    return (value.type.shape, value.type.dtype) == (target.type.shape, target.type.dtype)


Lives = dict[str, tuple[int, int]]


def _whole_lives(lives: Lives, over: Mapping[str, str]) -> Lives:
    """Lives of storage by its first owner, to the end of the last that takes its place."""
    found: Lives = {}
    for name in sorted(lives, key=lambda n: lives[n]):
        head = _head(name, over)
        first, last = found.get(head, lives[name])
        found[head] = (first, max(last, lives[name][1]))
    return found


def _head(name: str, over: Mapping[str, str]) -> str:
    while name in over:
        name = over[name]
    return name


def _apart(
    buffers: Mapping[str, Buffer], sizes: Mapping[str, int], lives: Lives, over: Mapping[str, str]
) -> dict[str, Buffer]:
    """A buffer for each of those that share storage, one after the other."""
    ends = {source: lives[result][0] - 1 for result, source in over.items()}
    return {
        name: Buffer(
            name, buffers[_head(name, over)].offset, sizes[name], first, ends.get(name, last)
        )
        for name, (first, last) in lives.items()
    }


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


def _lives(flat: FlatModule, owner: Mapping[str, str], releases: Sequence[int]) -> Lives:
    lives = {v.name: (-1, 0) for v in flat.inputs}
    for number, item in enumerate(flat.ops):
        for value in item.op.operands:
            name = owner.get(value.name)
            if name in lives:
                first, last = lives[name]
                lives[name] = (first, max(last, releases[number] - 1))
        for value in item.op.results:
            if owner[value.name] == value.name:
                lives[value.name] = (number, releases[number] - 1)
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


def _bytes(value: Value, limits: Mapping[str, tuple[int, int]]) -> int:
    assert isinstance(value.type, TensorType)
    gap = SCALES_ALIGNMENT if isinstance(value.type.dtype, Block) else 0
    return value.type.most_bytes(limits) + gap


def _round(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
