"""Where each value of a step lives: views share storage, the rest is packed by lifetime.

Where ops run on several streams, a value lives until every op that may write its storage anew is
sure to begin after its last reader: reuse follows the order of the streams, not that of the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metainfer.ir.dtypes import Block
from metainfer.ir.flatten import FlatModule
from metainfer.ir.graph import Value
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
        last: number of the last op that reads it, or may run beside one that does.
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
        workspace_offset: where scratch space begins that kernels may use while they run: one part
            for each stream.
        workspace_size: bytes of one part.
        streams: number of parts.
    """

    buffers: Mapping[str, Buffer]
    owner: Mapping[str, str]
    size: int
    workspace_offset: int
    workspace_size: int
    streams: int = 1

    def workspace_of(self, stream: int) -> int:
        """Where the scratch space of a stream begins."""
        return self.workspace_offset + stream * self.workspace_size


def plan_arena(
    flat: FlatModule, limits: Mapping[str, tuple[int, int]], workspace: int = 0
) -> Arena:
    """Assign offsets so that no two buffers that are live at once overlap.

    Buffers are placed largest first into the lowest gap that is free over their whole life.
    """
    owner = _owners(flat)
    ops = [item.op for item in flat.ops]
    lives = _lives(flat, owner, order_of(ops).releases())
    sizes = {name: _round(_bytes(value, limits)) for name, value in _owned(flat, owner).items()}
    placed: list[Buffer] = []
    for name in sorted(sizes, key=lambda n: (-sizes[n], lives[n])):
        first, last = lives[name]
        offset = _lowest_gap(sizes[name], first, last, placed)
        placed.append(Buffer(name, offset, sizes[name], first, last))
    top = max((b.offset + b.size for b in placed), default=0)
    space, streams = _round(workspace), num_streams(ops)
    return Arena({b.name: b for b in placed}, owner, top + space * streams, top, space, streams)


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


def _lives(
    flat: FlatModule, owner: Mapping[str, str], releases: Sequence[int]
) -> dict[str, tuple[int, int]]:
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
