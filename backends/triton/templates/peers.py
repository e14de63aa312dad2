"""Rounds of collectives over windows: one launch writes to all peers, or reads from all of them.

Where a peer's memory lies comes as a table of addresses, the first row; its second row is an
element of the tensor at hand that goes there, or comes from there. Each window has two halves; how
often it was used, which decides the half, is on the device (`turns`), so that a captured graph goes
on with the next half when it is replayed. Round r reads turns[r] and writes turns[r + 1], the last
one turns[0]: no launch writes the number that others of its programs read.
"""

import triton
import triton.language as tl


@triton.jit
def _half(turns, half_bytes, ROUND: tl.constexpr, LAST: tl.constexpr):
    """Bytes to the half in use; leaves the turn to the next round."""
    turn = tl.load(turns + ROUND)
    if tl.program_id(0) == 0:
        if LAST:
            tl.store(turns, turn + 1)
        else:
            tl.store(turns + ROUND + 1, turn)
    return (turn & 1).to(tl.int64) * half_bytes


@triton.jit
def _place(address, like, VECTOR: tl.constexpr):
    """A pointer to elements of the type of another pointer's; VECTOR of them fill 16 bytes."""
    found = address.to(tl.pointer_type(like.dtype.element_ty), bitcast=True)
    if VECTOR > 1:
        found = tl.multiple_of(found, [16])
    return found


@triton.jit
def _start(starts, number: tl.constexpr, VECTOR: tl.constexpr):
    """An element that a copy begins at."""
    found = tl.load(starts + number)
    if VECTOR > 1:
        found = tl.multiple_of(found, [VECTOR])
    return found


@triton.jit
def send(
    x, targets, turns, half_bytes, count, size,
    TARGETS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Copy ``size`` elements of x to each target, each from its own start; behind x come zeros.

    Shapes: x [count], targets [2, TARGETS]: address and start.
    """
    half = _half(turns, half_bytes, ROUND, False)
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        for target in tl.static_range(TARGETS):
            start = _start(targets + TARGETS, target, VECTOR)
            held = tl.load(x + start + at, mask=(at < size) & (start + at < count), other=0)
            to = _place(tl.load(targets + target) + half, x, VECTOR)
            tl.store(to + at, held, mask=at < size)


@triton.jit
def total(
    out, sources, targets, turns, half_bytes, size,
    SOURCES: tl.constexpr, TARGETS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    ROUND: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Sum over sources in their order, floats in float32, rounded once; to out, or to targets.

    Shapes: out [size] or, with TARGETS, any of its type; sources and targets [2, ...] of addresses.
    """
    half = _half(turns, half_bytes, ROUND, LAST)
    kept = out.dtype.element_ty
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        held = tl.load(_place(tl.load(sources) + half, out, VECTOR) + at, mask=at < size, other=0)
        if kept.is_floating():
            held = held.to(tl.float32)
        for source in tl.static_range(1, SOURCES):
            begin = _place(tl.load(sources + source) + half, out, VECTOR)
            more = tl.load(begin + at, mask=at < size, other=0)
            if kept.is_floating():
                more = more.to(tl.float32)
            held = held + more
        made = held.to(kept)
        if TARGETS == 0:
            tl.store(out + at, made, mask=at < size)
        for target in tl.static_range(TARGETS):
            to = _place(tl.load(targets + target) + half, out, VECTOR)
            tl.store(to + at, made, mask=at < size)


@triton.jit
def receive(
    out, sources, turns, half_bytes, count, size,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Copy ``size`` elements from each source, each to its own start of out; the last round.

    Shapes: out [count], sources [2, SOURCES]: address and start.
    """
    half = _half(turns, half_bytes, ROUND, True)
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        for source in tl.static_range(SOURCES):
            start = _start(sources + SOURCES, source, VECTOR)
            wanted = (at < size) & (start + at < count)
            begin = _place(tl.load(sources + source) + half, out, VECTOR)
            tl.store(out + start + at, tl.load(begin + at, mask=wanted, other=0), mask=wanted)
