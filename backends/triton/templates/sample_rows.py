"""The next token of each row: filters by searching for thresholds, then a race of what they keep.

One program a row; nothing is sorted. Numbers are compared by their *rank*, whole numbers ordered as
they are; of equal numbers the lower index comes first. A cut (rank, index) keeps what is above
it in that order, itself included.
"""

import triton
import triton.language as tl

_LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def rank_of(x, RANKS: tl.constexpr):
    """Unsigned whole numbers that are ordered as floats are, of RANKS bits from the highest on.

    -0 and 0 are equal.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.uint32, bitcast=True) ^ 0x80000000) >> (32 - RANKS)


@triton.jit
def load_block(row, first, V, BLOCK: tl.constexpr):
    """A block of a row in float32, -inf past its end, and its indices."""
    index = first + tl.arange(0, BLOCK)
    return tl.load(row + index, mask=index < V, other=float("-inf")).to(tl.float32), index


@triton.jit
def is_kept(rank, index, cut_rank, cut_index):
    """What a cut keeps."""
    return (rank > cut_rank) | ((rank == cut_rank) & (index <= cut_index))


@triton.jit
def amount(
    row, V, top, sharpness, cut_rank, cut_index, rank, index,
    COUNT: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of the weights (or how many there are) that both cuts keep."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, V, BLOCK):
        x, at = load_block(row, first, V, BLOCK)
        own = rank_of(x, RANKS)
        kept = is_kept(own, at, cut_rank, cut_index) & is_kept(own, at, rank, index) & (at < V)
        if COUNT:
            total += kept.to(tl.float32)
        else:
            total += tl.where(kept, tl.exp((x - top) * sharpness), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def cut_at(
    row, V, top, sharpness, cut_rank, cut_index, wanted,
    COUNT: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest cut within another one above which there is as much as is wanted.

    Bit by bit: first the rank, then the index among equals.
    """
    rank = tl.zeros([], tl.uint32)
    for step in tl.range(0, RANKS):
        tried = rank | (tl.full([], 1 << (RANKS - 1), tl.uint32) >> step)
        found = amount(
            row, V, top, sharpness, cut_rank, cut_index, tried, _LAST, COUNT, RANKS, BLOCK
        )
        rank = tl.where(found >= wanted, tried, rank)
    # How many of the equal ones are not enough: the next one is the last that is kept.
    index = tl.zeros([], tl.int32)
    for step in tl.range(0, PLACES):
        tried = index | (tl.full([], 1 << (PLACES - 1), tl.int32) >> step)
        found = amount(
            row, V, top, sharpness, cut_rank, cut_index, rank, tried - 1, COUNT, RANKS, BLOCK
        )
        index = tl.where((found < wanted) & (tried < V), tried, index)
    return rank, index


@triton.jit
def sample_rows(
    logits, ids, numbers, words, V, row_stride,
    RANKS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of each row, or what its logits have instead of a finite largest one.

    RANKS: bits in which the logits' type tells numbers apart; PLACES: bits of an index.

    Shapes: logits [R, V]; ids i32 [R], negative for a row whose largest logit is NaN (-1) or
    infinite (-2: +inf, -3: -inf); numbers f32 [R, 3] (temperature, top_p, min_p); words i32 [R, 4]
    (top_k, position, two halves of the key).
    """
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * row_stride
    temperature = tl.load(numbers + r * 3)
    top_p = tl.load(numbers + r * 3 + 1)
    min_p = tl.load(numbers + r * 3 + 2)
    top_k = tl.load(words + r * 4)
    position = tl.load(words + r * 4 + 1).to(tl.uint32, bitcast=True)
    low = tl.load(words + r * 4 + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    key = low | (tl.load(words + r * 4 + 3).to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, V, BLOCK):
        x, _ = load_block(row, first, V, BLOCK)
        broken |= (x != x).to(tl.int32)
        most = tl.maximum(most, x)
    top = tl.max(most, axis=0)
    fault = 0
    if top == float("-inf"):
        fault = -3
    if top == float("inf"):
        fault = -2
    if tl.max(broken, axis=0) > 0:
        fault = -1
    if fault < 0:
        tl.store(ids + r, fault)
        return
    sharpness = 0.0
    if temperature > 0:
        sharpness = 1.0 / temperature
    rank, index = tl.zeros([], tl.uint32), tl.full([], 0x7FFFFFFF, tl.int32)
    if (temperature > 0) & (top_k > 0) & (top_k < V):
        rank, index = cut_at(
            row, V, top, sharpness, rank, index, top_k.to(tl.float32), True, RANKS, PLACES, BLOCK
        )
    if (temperature > 0) & (top_p < 1.0):
        whole = amount(row, V, top, sharpness, rank, index, rank, index, False, RANKS, BLOCK)
        rank, index = cut_at(
            row, V, top, sharpness, rank, index, whole * top_p, False, RANKS, PLACES, BLOCK
        )
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, V, BLOCK):
        x, at = load_block(row, first, V, BLOCK)
        score = x + 0.0
        if temperature > 0:
            scaled = (x - top) * sharpness
            zero = tl.zeros([BLOCK], tl.uint32)
            c0, c1, c2, c3 = tl.philox(key, (at // 4).to(tl.uint32), zero + position, zero, zero)
            odd, high = at % 2 == 1, at % 4 > 1
            word = tl.where(high, tl.where(odd, c3, c2), tl.where(odd, c1, c0))
            # -log(1 - u), exact for small u, by which the race is won.
            u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
            rest = 1.0 - u
            near = tl.where(rest == 1.0, 1.0, u / tl.where(rest == 1.0, 1.0, 1.0 - rest))
            noise = tl.where(rest == 1.0, u, -tl.log(tl.maximum(rest, 1.0e-30)) * near)
            kept = is_kept(rank_of(x, RANKS), at, rank, index) & (tl.exp(scaled) >= min_p)
            score = tl.where(kept, scaled - tl.log(noise), float("-inf"))
        score = tl.where(at < V, score, float("-inf"))
        # Later blocks hold higher indices: only what is better replaces.
        where = tl.where(score > best, at, where)
        best = tl.maximum(best, score)
    won = tl.max(best, axis=0)
    tl.store(ids + r, tl.min(tl.where(best == won, where, V - 1), axis=0))
