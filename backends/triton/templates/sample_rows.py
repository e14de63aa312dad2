"""The next token of each row: filters by narrowing where they cut, then a race of what they keep.

A row is shared by many programs, a block each; nothing is sorted. Where something is made of all
blocks, the last program of a row to arrive does it. Numbers are compared by a *key*: their rank,
whole numbers ordered as they are, above their index from the end, so that of equal numbers the
lower index comes first and no two keys are equal. A filter keeps the keys from its *cut* on.

A cut is enclosed in an interval of keys: `scatter` adds up its parts in bins, and `narrow` replaces
it by the part where the filter's amount is reached, level by level, until it holds one key. Weights
are whole numbers of 2^-42: their sums are the same in whatever order programs add.
"""

import triton
import triton.language as tl

_ONE: tl.constexpr = tl.constexpr(4398046511104.0)  # weight of the most likely token: 2^42
# Whole numbers kept of a row: its top, the interval that encloses its cut (low, bits), the amount
# above the interval, and the amount that is wanted.
FIELDS: tl.constexpr = tl.constexpr(5)
_TOP: tl.constexpr = tl.constexpr(0)
_LOW: tl.constexpr = tl.constexpr(1)
_BITS: tl.constexpr = tl.constexpr(2)
_ABOVE: tl.constexpr = tl.constexpr(3)
_WANTED: tl.constexpr = tl.constexpr(4)
# Weights fall by this factor of e from one threshold of `coarse` to the next.
_STEP: tl.constexpr = tl.constexpr(1.75)


@triton.jit
def rank_of(x, RANKS: tl.constexpr):
    """Unsigned whole numbers that are ordered as floats are, of RANKS bits from the highest on.

    -0 and 0 are equal.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.uint32, bitcast=True) ^ 0x80000000) >> (32 - RANKS)


@triton.jit
def key_of(rank, index, PLACES: tl.constexpr):
    """Rank above index from the end; index 0 gives the highest key of a rank."""
    past = tl.full([], 1, tl.int64) << PLACES
    return (rank.to(tl.int64) << PLACES) | (past - 1 - index)


@triton.jit
def bit_length(number):
    """How many bits a whole number takes."""
    return tl.sum((number >> tl.arange(0, 64).to(tl.int64) > 0).to(tl.int64), axis=0)


@triton.jit
def block_of(logits, V, row_stride, parts, BLOCK: tl.constexpr):
    """What a program has: (row, part, its numbers in float32, -inf past the end, their indices)."""
    r, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    index = part * BLOCK + tl.arange(0, BLOCK)
    row = logits + r.to(tl.int64) * row_stride
    x = tl.load(row + index, mask=index < V, other=float("-inf")).to(tl.float32)
    return r, part, x, index


@triton.jit
def is_last(arrived, r, parts):
    """Whether all parts of a row have arrived; the count goes back to none for the next launch."""
    tl.debug_barrier()
    last = tl.atomic_add(arrived + r, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(arrived + r, 0)
    return last


@triton.jit
def top_of(most):
    """The largest of some numbers, NaN where one is NaN."""
    top = tl.max(tl.where(most == most, most, float("-inf")), axis=0)
    return tl.where(tl.max((most != most).to(tl.int32), axis=0) > 0, float("nan"), top)


@triton.jit
def sharpness_of(temperature):
    """By what differences of logits are multiplied; finite, so that none stays none."""
    return tl.minimum(1.0 / temperature, 1.0e30)


@triton.jit
def fraction(amount, p):
    """The least whole number that is at least p * amount, and 1."""
    exact = amount.to(tl.float64) * p.to(tl.float64)
    below = exact.to(tl.int64)
    return tl.maximum(below + (below.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def enclose(state, low, bits, above, wanted):
    """Keep 2 ** bits keys from ``low`` on as those that hold a row's cut.

    The amount above them, and the one that is wanted, are kept with them.
    """
    tl.store(state + _LOW, low)
    tl.store(state + _BITS, bits)
    tl.store(state + _ABOVE, above)
    tl.store(state + _WANTED, wanted)


@triton.jit
def survey(
    logits, numbers, words, state, maxima, arrived, V, row_stride, parts,
    RANKS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, LOOSE: tl.constexpr,
):  # fmt: skip
    """The top of each row that has filters, and an interval for the cut of its top_k.

    The k-th of the largest numbers of some groups is at most the k-th of all. LOOSE: how many bits
    of its rank are found.

    Shapes: maxima f32 [R, groups of GROUP numbers], GROUPS at most; state i64 [R, FIELDS].
    """
    r, part, x, _ = block_of(logits, V, row_stride, parts, BLOCK)
    nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    most = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
    most = tl.where(nan, float("nan"), most)
    own = maxima + r * parts * (BLOCK // GROUP)
    tl.store(own + part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), most)
    if not is_last(arrived, r, parts):
        return
    at = tl.arange(0, GROUPS)
    inside = at < parts * (BLOCK // GROUP)
    found = tl.load(own + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
    top = top_of(found)
    state += r * FIELDS
    tl.store(state + _TOP, top.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(state + _LOW, tl.zeros([], tl.int64))
    tl.store(state + _BITS, tl.zeros([], tl.int64))
    top_k = tl.load(words + r * 4)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    if (tl.load(numbers + r * 3) > 0) & (top_k > 0) & (top_k < V) & is_finite:
        ranks = tl.where(inside, rank_of(found, LOOSE), 0)
        bound = tl.zeros([], tl.uint32)
        for step in tl.range(0, LOOSE):
            tried = bound | (tl.full([], 1 << (LOOSE - 1), tl.uint32) >> step)
            bound = tl.where(tl.sum((ranks >= tried).to(tl.int32), axis=0) >= top_k, tried, bound)
        low = bound.to(tl.int64) << (RANKS - LOOSE + PLACES)
        past = (rank_of(top, RANKS).to(tl.int64) + 1) << PLACES
        bits = bit_length(past - 1 - low)
        enclose(state, low, bits, tl.zeros([], tl.int64), top_k.to(tl.int64))


@triton.jit
def coarse(
    logits, numbers, words, state, sums, arrived, V, row_stride, parts,
    RANKS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    PARTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """An interval for the cut of top_p in each row without top_k, by WAYS thresholds.

    Shapes: sums f32 [R, parts, WAYS], PARTS parts at most.
    """
    r, own = tl.program_id(0) // parts, tl.program_id(0) % parts
    state += r * FIELDS
    temperature, top_p = tl.load(numbers + r * 3), tl.load(numbers + r * 3 + 1)
    top_k = tl.load(words + r * 4)
    top = tl.load(state + _TOP).to(tl.int32).to(tl.float32, bitcast=True)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    is_limited = (top_k > 0) & (top_k < V)
    if (temperature == 0) | (top_p >= 1.0) | is_limited | (not is_finite):
        return
    way = tl.arange(0, WAYS)
    ranks = rank_of(top - (way + 1).to(tl.float32) * _STEP * temperature, RANKS)
    # The last part takes all that is left.
    ranks = tl.where(way == WAYS - 1, 0, ranks)
    sharpness = sharpness_of(temperature)
    total = tl.zeros((WAYS, SLICE), tl.float32)
    row = logits + r.to(tl.int64) * row_stride
    for first in tl.range(own * BLOCK, own * BLOCK + BLOCK, SLICE):
        index = first + tl.arange(0, SLICE)
        x = tl.load(row + index, mask=index < V, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - top) * sharpness)
        reached = rank_of(x, RANKS)[None, :] >= ranks[:, None]
        total = tl.where(reached, total + weight[None, :], total)
    tl.store(sums + (r * parts + own) * WAYS + way, tl.sum(total, axis=1))
    if not is_last(arrived, r, parts):
        return
    p = tl.arange(0, PARTS)[:, None]
    sums += r * parts * WAYS
    found = tl.load(sums + p * WAYS + way[None, :], mask=p < parts, other=0.0, cache_modifier=".cg")
    amounts = tl.sum((found * _ONE).to(tl.int64), axis=0)
    wanted = fraction(tl.max(amounts, axis=0), top_p)
    # Thresholds above the cut are those whose amounts do not reach what is wanted.
    reached = amounts >= wanted
    above = tl.max(tl.where(reached, 0, amounts), axis=0)
    low = tl.max(tl.where(reached, ranks, 0), axis=0).to(tl.int64) << PLACES
    past = (rank_of(top, RANKS).to(tl.int64) + 1) << PLACES
    missed = tl.where(reached, past, ranks.to(tl.int64) << PLACES)
    past = tl.min(missed, axis=0)
    bits = bit_length(past - 1 - low)
    # It ends where the amount above begins; what is more than enough lies below.
    enclose(state, past - (tl.full([], 1, tl.int64) << bits), bits, above, wanted)


@triton.jit
def interval_of(
    numbers, words, state, r, V,
    OPENS: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The interval of a row's cut: (its first key, bits, what is above, what is wanted).

    OPENS: first level for top_p: of rows with top_k, whatever that keeps is the interval, and what
    is wanted is still to be found: 0. No bits: there is nothing to do.
    """
    state += r * FIELDS
    low, bits = tl.load(state + _LOW), tl.load(state + _BITS)
    above, wanted = tl.load(state + _ABOVE), tl.load(state + _WANTED)
    if OPENS:
        top = tl.load(state + _TOP).to(tl.int32).to(tl.float32, bitcast=True)
        top_p, top_k = tl.load(numbers + r * 3 + 1), tl.load(words + r * 4)
        is_finite = (top > float("-inf")) & (top < float("inf"))
        is_both = (tl.load(numbers + r * 3) > 0) & (top_p < 1.0) & (top_k > 0) & (top_k < V)
        if is_both & is_finite:
            past = (rank_of(top, RANKS).to(tl.int64) + 1) << PLACES
            bits = bit_length(past - 1 - low)
            above, wanted = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    return low, bits, above, wanted


@triton.jit
def scatter(
    logits, numbers, words, state, bins, V, row_stride, parts,
    COUNT: tl.constexpr, OPENS: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr, BINS_BITS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Add a block's amounts to the bins of its row's interval.

    COUNT: amounts are numbers of tokens, else their weights.

    Shapes: bins i64 [R, 2 ** BINS_BITS], zeros, the highest keys first.
    """
    r = tl.program_id(0) // parts
    low, bits, _, _ = interval_of(numbers, words, state, r, V, OPENS, RANKS, PLACES)
    if bits == 0:
        return
    shift = tl.maximum(bits - BINS_BITS, 0)
    _, own, x, _ = block_of(logits, V, row_stride, parts, BLOCK)
    # Few blocks hold any: the others are done when their ranks are seen.
    ranks = rank_of(x, RANKS)
    lowest = tl.maximum(low, 0) >> PLACES
    highest = (low + (tl.full([], 1, tl.int64) << bits) - 1) >> PLACES
    lowest, highest = lowest.to(tl.uint32), tl.minimum(highest, 0xFFFFFFFF).to(tl.uint32)
    if tl.max(((ranks >= lowest) & (ranks <= highest)).to(tl.int32), axis=0) == 0:
        return
    row = logits + r.to(tl.int64) * row_stride
    top = tl.load(state + r * FIELDS + _TOP).to(tl.int32).to(tl.float32, bitcast=True)
    sharpness = sharpness_of(tl.load(numbers + r * 3))
    for begin in tl.range(own * BLOCK, own * BLOCK + BLOCK, SLICE):
        at = begin + tl.arange(0, SLICE)
        y = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        place = key_of(rank_of(y, RANKS), at, PLACES) - low
        inside = (place >= 0) & (place >> bits == 0) & (at < V)
        if COUNT:
            amount = tl.full([SLICE], 1, tl.int64)
        else:
            amount = (tl.exp((y - top) * sharpness) * _ONE).to(tl.int64)
        bin = tl.where(inside, (1 << BINS_BITS) - 1 - (place >> shift), 0)
        tl.atomic_add(bins + r * (1 << BINS_BITS) + bin, amount, mask=inside, sem="relaxed")


@triton.jit
def narrow(
    numbers, words, state, bins, V,
    COUNT: tl.constexpr, OPENS: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr,
    BINS_BITS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Replace the interval of a row's cut by that one of its bins where the cut is; empty them.

    A launch of its own, a program a row: it begins when all amounts are there.
    """
    r = tl.program_id(0)
    low, bits, above, wanted = interval_of(numbers, words, state, r, V, OPENS, RANKS, PLACES)
    if bits == 0:
        return
    shift = tl.maximum(bits - BINS_BITS, 0)
    bins += r * (1 << BINS_BITS)
    if wanted == 0:
        whole = tl.zeros([], tl.int64)
        for begin in tl.range(0, 1 << BINS_BITS, SLICE):
            whole += tl.sum(tl.load(bins + begin + tl.arange(0, SLICE)), axis=0)
        wanted = fraction(whole, tl.load(numbers + r * 3 + 1))
    through = above
    first = 1 << BINS_BITS
    kept = tl.zeros([], tl.int64)
    for begin in tl.range(0, 1 << BINS_BITS, SLICE):
        at = begin + tl.arange(0, SLICE)
        amounts = tl.load(bins + at)
        reached = through + tl.cumsum(amounts, axis=0) >= wanted
        # Sums of rounded weights may stay below what is wanted: then all are kept.
        reached |= at == (1 << BINS_BITS) - 1
        here = tl.min(tl.where(reached, at, 1 << BINS_BITS), axis=0)
        is_here = (first == 1 << BINS_BITS) & (here < 1 << BINS_BITS)
        above = tl.where(is_here, through + tl.sum(tl.where(at < here, amounts, 0), axis=0), above)
        kept = tl.where(is_here, tl.sum(tl.where(at == here, amounts, 0), axis=0), kept)
        first = tl.where(is_here, here, first)
        through += tl.sum(amounts, axis=0)
        tl.debug_barrier()
        tl.store(bins + at, tl.zeros([SLICE], tl.int64))
    low += ((1 << BINS_BITS) - 1 - first).to(tl.int64) << shift
    if COUNT:
        # All of them are wanted: the cut is below them.
        shift = tl.where(above + kept == wanted, 0, shift)
    enclose(state + r * FIELDS, low, shift, above, wanted)


@triton.jit
def noise_of(key, position, first, BLOCK: tl.constexpr):
    """Exponentially distributed numbers of BLOCK tokens from ``first`` on, a multiple of four."""
    four = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros([BLOCK // 4], tl.uint32)
    c0, c1, c2, c3 = tl.philox(key, four, zero + position, zero, zero)
    word = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (BLOCK,))
    # -log(1 - u), with what the difference lost: exact for small u, by which the race is won.
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = 1.0 - u
    return (u - (1.0 - rest)) - tl.log(tl.maximum(rest, 1.1641532182693481e-10))


@triton.jit
def race(
    logits, ids, numbers, words, state, best, where, arrived, V, row_stride, parts,
    FILTERED: tl.constexpr, RANKS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """The token of each row, or what its logits have instead of a finite largest one.

    The token of the least cost wins: its noise over its weight, or without noise its logit's
    opposite. FILTERED: some row has filters, and ``state`` their cuts. RANKS: bits in which the
    logits' type tells numbers apart; PLACES: bits of an index.

    Shapes: logits [R, V]; ids i32 [R], negative for a row whose largest logit is NaN (-1) or
    infinite (-2: +inf, -3: -inf); numbers f32 [R, 3] (temperature, top_p, min_p); words i32 [R, 4]
    (top_k, position, two halves of the key); best f32 [R, parts, 2], where i32 [R, parts], PARTS
    parts at most.
    """
    r, own, x, index = block_of(logits, V, row_stride, parts, BLOCK)
    temperature, min_p = tl.load(numbers + r * 3), tl.load(numbers + r * 3 + 2)
    top_p, top_k = tl.load(numbers + r * 3 + 1), tl.load(words + r * 4)
    most = top_of(x)
    # Weights are relative to the top of the block, or of the row where filters ask for it.
    relative = tl.where(most == float("-inf"), 0.0, most)
    least = tl.min(-x, axis=0)
    token = tl.min(tl.where(-x == least, index, V - 1), axis=0)
    if temperature > 0:
        low = tl.zeros([], tl.int64)
        if FILTERED:
            if (top_p < 1.0) | (min_p > 0) | ((top_k > 0) & (top_k < V)):
                state += r * FIELDS
                low = tl.load(state + _LOW)
                relative = tl.load(state + _TOP).to(tl.int32).to(tl.float32, bitcast=True)
        position = tl.load(words + r * 4 + 1).to(tl.uint32, bitcast=True)
        half = tl.load(words + r * 4 + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
        key = half | (tl.load(words + r * 4 + 3).to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
        sharpness = sharpness_of(temperature)
        row = logits + r.to(tl.int64) * row_stride
        costs = tl.full([SLICE], float("inf"), tl.float32)
        tokens = tl.full([SLICE], V - 1, tl.int32)
        for begin in tl.range(own * BLOCK, own * BLOCK + BLOCK, SLICE):
            at = begin + tl.arange(0, SLICE)
            y = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
            scaled = (y - relative) * sharpness
            some = 1
            if FILTERED:
                kept = key_of(rank_of(y, RANKS), at, PLACES) >= low
                kept &= tl.exp(scaled) >= min_p
                some = tl.max(kept.to(tl.int32), axis=0)
            if some > 0:
                cost = noise_of(key, position, begin, SLICE) * tl.exp(-scaled)
                if FILTERED:
                    cost = tl.where(kept, cost, float("inf"))
                # Later slices hold higher indices: only what is better replaces.
                tokens = tl.where(cost < costs, at, tokens)
                costs = tl.minimum(costs, cost)
        least = tl.min(costs, axis=0)
        token = tl.min(tl.where(costs == least, tokens, V - 1), axis=0)
    tl.store(where + r * parts + own, token)
    tl.store(best + (r * parts + own) * 2, most)
    tl.store(best + (r * parts + own) * 2 + 1, least)
    if not is_last(arrived, r, parts):
        return
    p = tl.arange(0, PARTS)
    at, inside = r * parts + p, p < parts
    tops = tl.load(best + at * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
    costs = tl.load(best + at * 2 + 1, mask=inside, other=float("inf"), cache_modifier=".cg")
    tokens = tl.load(where + at, mask=inside, other=V - 1, cache_modifier=".cg")
    top = top_of(tops)
    if temperature > 0:
        is_whole = True
        if FILTERED:
            is_whole = (top_p >= 1.0) & (min_p == 0) & ((top_k <= 0) | (top_k >= V))
        if is_whole:
            costs *= tl.exp((top - tops) * sharpness_of(temperature))
    costs = tl.where(inside, costs, float("inf"))
    won = tl.min(costs, axis=0)
    token = tl.min(tl.where(costs == won, tokens, V - 1), axis=0)
    token = tl.where(top == float("inf"), -2, tl.where(top == float("-inf"), -3, token))
    tl.store(ids + r, tl.where(top != top, -1, token))
