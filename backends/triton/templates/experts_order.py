"""Pairs of a token and one of its experts, sorted by expert on the device, and tiles of them.

A *pair* is a number in [0, T * K): token ``pair // K``. Pairs whose expert lies outside [0, E) are
left out. Results:

    order [P]        pairs, those of one expert side by side, in rising order
    tiles [3, LIMIT] per tile of at most ROWS pairs of one expert: the expert (-1: no tile), its
                     first place in ``order``, how many pairs

No count comes to the host: the table has room for any routing, and programs of absent tiles leave.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early


@triton.jit
def experts_of(ids, pair, P, E, NUMBERS: tl.constexpr):
    """The experts of pairs; NUMBERS where there is none."""
    expert = tl.load(ids + pair, mask=pair < P, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < E), expert, NUMBERS)


@triton.jit
def counts_of(expert, NUMBERS: tl.constexpr):
    """How many of some pairs each expert has, [NUMBERS]."""
    hits = expert[:, None] == tl.arange(0, NUMBERS)[None, :]
    return tl.sum(hits.to(tl.int32), axis=0)


@triton.jit
def write_tiles(tiles, counts, LIMIT, ROWS: tl.constexpr, NUMBERS: tl.constexpr):
    """The table of tiles, of how many pairs each expert has."""
    ends = tl.cumsum(counts, axis=0)
    firsts = ends - counts
    numbers = (counts + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(numbers, axis=0)
    total = tl.max(tile_ends, axis=0)
    expert = tl.arange(0, NUMBERS)
    for turn in tl.range(0, tl.max(numbers, axis=0)):
        there = turn < numbers
        at = tiles + tile_ends - numbers + turn
        tl.store(at, expert, mask=there)
        tl.store(at + LIMIT, firsts + turn * ROWS, mask=there)
        tl.store(at + 2 * LIMIT, tl.minimum(counts - turn * ROWS, ROWS), mask=there)
    for tile in tl.range(total, LIMIT, NUMBERS):
        at = tile + expert
        tl.store(tiles + at, -1, mask=at < LIMIT)


@triton.jit
def order_few(
    ids, order, tiles, P, E, LIMIT,
    ROWS: tl.constexpr, ALL: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    NUMBERS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """All in one launch, for at most ALL pairs: every program compares its pairs with all others.

    Program 0 writes the table of tiles, each other one the places of CHUNK pairs.
    """
    early.wait(EARLY)
    if tl.program_id(0) == 0:
        counts = tl.zeros([NUMBERS], tl.int32)
        for begin in tl.range(0, ALL, STEP):
            some = experts_of(ids, begin + tl.arange(0, STEP), P, E, NUMBERS)
            counts += counts_of(some, NUMBERS)
        write_tiles(tiles, counts, LIMIT, ROWS, NUMBERS)
    else:
        every = tl.arange(0, ALL)
        experts = experts_of(ids, every, P, E, NUMBERS)
        pair = (tl.program_id(0) - 1) * CHUNK + tl.arange(0, CHUNK)
        expert = experts_of(ids, pair, P, E, NUMBERS)
        # By expert, then by number.
        before = (experts * ALL + every)[None, :] < (expert * ALL + pair)[:, None]
        place = tl.sum(before.to(tl.int32), axis=1)
        tl.store(order + place, pair, mask=expert < NUMBERS)


@triton.jit
def order_count(
    ids, counts, P, E, CHUNK: tl.constexpr, NUMBERS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """First step for many pairs: counts of each chunk, [chunks, NUMBERS]."""
    early.wait(EARLY)
    chunk = tl.program_id(0)
    expert = experts_of(ids, chunk * CHUNK + tl.arange(0, CHUNK), P, E, NUMBERS)
    tl.store(counts + chunk * NUMBERS + tl.arange(0, NUMBERS), counts_of(expert, NUMBERS))


@triton.jit
def order_scan(
    counts, totals, CHUNKS, STEP: tl.constexpr, SPAN: tl.constexpr, NUMBERS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Second step, SPAN experts a program: counts become the number of pairs in earlier chunks."""
    early.wait(EARLY)
    expert = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    total = tl.zeros([SPAN], tl.int32)
    for begin in tl.range(0, CHUNKS, STEP):
        chunk = begin + tl.arange(0, STEP)
        at = counts + chunk[:, None] * NUMBERS + expert[None, :]
        there = chunk[:, None] < CHUNKS
        found = tl.load(at, mask=there, other=0)
        before = tl.cumsum(found, axis=0) - found + total[None, :]
        tl.store(at, before, mask=there)
        total += tl.sum(found, axis=0)
    tl.store(totals + expert, total)


@triton.jit
def order_place(
    ids, order, counts, totals, tiles, P, E, LIMIT,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, NUMBERS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Third step: program 0 writes the table of tiles, the others put pairs in their places."""
    early.wait(EARLY)
    total = tl.load(totals + tl.arange(0, NUMBERS))
    if tl.program_id(0) == 0:
        write_tiles(tiles, total, LIMIT, ROWS, NUMBERS)
    else:
        chunk = tl.program_id(0) - 1
        index = tl.arange(0, CHUNK)
        pair = chunk * CHUNK + index
        expert = experts_of(ids, pair, P, E, NUMBERS)
        known = expert < NUMBERS
        before = tl.load(counts + chunk * NUMBERS + expert, mask=known, other=0)
        earlier = tl.arange(0, NUMBERS)[None, :] < expert[:, None]
        first = tl.sum(tl.where(earlier, total[None, :], 0), axis=1)
        same = (expert[:, None] == expert[None, :]) & (index[None, :] < index[:, None])
        rank = tl.sum(same.to(tl.int32), axis=1)
        tl.store(order + first + before + rank, pair, mask=known)
