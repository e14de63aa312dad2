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


@triton.jit
def count_pairs(ids, place, P, E, CHUNK: tl.constexpr, NUMBERS: tl.constexpr):
    """How many of a chunk's pairs each expert has, [NUMBERS], and the experts of the chunk."""
    pair = place + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < P, other=-1).to(tl.int32)
    known = (expert >= 0) & (expert < E)
    expert = tl.where(known, expert, NUMBERS)
    hits = (expert[:, None] == tl.arange(0, NUMBERS)[None, :]).to(tl.int32)
    return expert, hits, tl.sum(hits, axis=0)


@triton.jit
def rank_pairs(expert, CHUNK: tl.constexpr):
    """For each pair, how many before it in the chunk go to the same expert."""
    index = tl.arange(0, CHUNK)
    same = (expert[:, None] == expert[None, :]) & (index[None, :] < index[:, None])
    return tl.sum(same.to(tl.int32), axis=1)


@triton.jit
def write_tiles(tiles, counts, LIMIT, ROWS: tl.constexpr, NUMBERS: tl.constexpr):
    """The table of tiles; returns each expert's first place in the order."""
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
    return firsts


@triton.jit
def order_few(
    ids, order, tiles, P, E, LIMIT,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """All in one program, for few pairs."""
    counts = tl.zeros([NUMBERS], tl.int32)
    for place in tl.range(0, P, CHUNK):
        _, _, more = count_pairs(ids, place, P, E, CHUNK, NUMBERS)
        counts += more
    next_place = write_tiles(tiles, counts, LIMIT, ROWS, NUMBERS)
    for place in tl.range(0, P, CHUNK):
        expert, hits, more = count_pairs(ids, place, P, E, CHUNK, NUMBERS)
        at = tl.sum(hits * next_place[None, :], axis=1) + rank_pairs(expert, CHUNK)
        tl.store(order + at, place + tl.arange(0, CHUNK), mask=expert < NUMBERS)
        next_place += more


@triton.jit
def order_count(ids, counts, P, E, CHUNK: tl.constexpr, NUMBERS: tl.constexpr):
    """First step for many pairs: counts of each chunk, [chunks, NUMBERS]."""
    chunk = tl.program_id(0)
    _, _, found = count_pairs(ids, chunk * CHUNK, P, E, CHUNK, NUMBERS)
    tl.store(counts + chunk * NUMBERS + tl.arange(0, NUMBERS), found)


@triton.jit
def order_scan(
    counts, firsts, tiles, CHUNKS, LIMIT,
    ROWS: tl.constexpr, STEP: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Second step, one program: counts become the number of pairs in earlier chunks."""
    expert = tl.arange(0, NUMBERS)
    total = tl.zeros([NUMBERS], tl.int32)
    for begin in tl.range(0, CHUNKS, STEP):
        chunk = begin + tl.arange(0, STEP)
        at = counts + chunk[:, None] * NUMBERS + expert[None, :]
        there = chunk[:, None] < CHUNKS
        found = tl.load(at, mask=there, other=0)
        before = tl.cumsum(found, axis=0) - found + total[None, :]
        tl.store(at, before, mask=there)
        total += tl.sum(found, axis=0)
    tl.store(firsts + expert, write_tiles(tiles, total, LIMIT, ROWS, NUMBERS))


@triton.jit
def order_place(
    ids, order, counts, firsts, P, E, CHUNK: tl.constexpr, NUMBERS: tl.constexpr
):  # fmt: skip
    """Third step: each chunk puts its pairs in their places."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < P, other=-1).to(tl.int32)
    known = (expert >= 0) & (expert < E)
    expert = tl.where(known, expert, NUMBERS)
    before = tl.load(counts + chunk * NUMBERS + expert, mask=known, other=0)
    first = tl.load(firsts + expert, mask=known, other=0)
    tl.store(order + first + before + rank_pairs(expert, CHUNK), pair, mask=known)
