"""Blocks of paged attention that its kernels share.

A *tile* is a few tokens of one sequence times the query heads of one key head: its rows go through
the matrix units together, so grouped heads cost no more reads of keys than one head does.
Row m is token ``m // HEADS`` and head ``m % HEADS`` of the tile.

Head widths that are no power of two are cut in two: 96 is read as 64 and 32 (``D0``, ``D1``;
``E0``, ``E1`` for values; 0: no second part).

Keys and values are tuples of pointers: numbers, or fp8 codes (single, or four in a word) and the
exponents of their scales, one for each token and head (`ir.entries`). Codes are multiplied as they
are, in f16; scales multiply scores and weights.

Latents (R > 0) are keys and values at once: ``k`` holds them, D wide, ``v`` the rotary keys, R
wide, and a block of latents that was read for the scores is multiplied by the weights, too. Codes
of latents are multiplied by their scales before: the sums with rotary keys are those of numbers.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import widen


@triton.jit
def find_tile(tile, starts, T, B, QUERIES: tl.constexpr, MANY: tl.constexpr):
    """Which tokens a tile holds: its sequence, its first token, where the sequence's tokens end.

    Tiles are numbered so that none needs a count from the device: sequence b begins with tile
    ``starts[b] // QUERIES + b``. Rows after the last sequence are one more sequence, number B.
    Tiles without tokens get a first token past the end.
    """
    index = tl.arange(0, MANY)
    begins = tl.load(starts + index, mask=index <= B, other=0)
    first = begins
    if QUERIES > 1:
        first = begins // QUERIES + index
    sequence = tl.sum(((first <= tile) & (index <= B)).to(tl.int32), axis=0) - 1
    begin = tl.load(starts + sequence)
    end = tl.load(starts + tl.minimum(sequence + 1, B))
    end = tl.where(sequence == B, T, end)
    own = tile - begin
    if QUERIES > 1:
        own = (tile - begin // QUERIES - sequence) * QUERIES
    return sequence, begin, begin + own, end


@triton.jit
def load_rows(
    base, token, head, valid, stride_token, stride_head,
    FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Columns FROM .. FROM + SIZE of a tile's query rows, zeros past WIDTH."""
    column = FROM + tl.arange(0, SIZE)
    at = base + token.to(tl.int64)[:, None] * stride_token + head[:, None] * stride_head
    return tl.load(at + column[None, :], mask=valid[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit
def load_queries(
    q, q_rope, token, head, valid, q_token, q_head, rope_token, rope_head,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A tile's query rows in two parts, the second one that of the rotary keys beside latents."""
    q0 = load_rows(q, token, head, valid, q_token, q_head, 0, D0, D)
    q1 = q0
    if R > 0:
        q1 = load_rows(q_rope, token, head, valid, rope_token, rope_head, 0, D1, R)
    elif D1 > 0:
        q1 = load_rows(q, token, head, valid, q_token, q_head, D0, D1, D)
    return q0, q1


@triton.jit
def store_rows(
    base, value, token, head, valid, stride_token, stride_head,
    FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store columns FROM .. FROM + SIZE of a tile's rows."""
    column = FROM + tl.arange(0, SIZE)
    at = base + token.to(tl.int64)[:, None] * stride_token + head[:, None] * stride_head
    tl.store(
        at + column[None, :],
        value.to(base.dtype.element_ty),
        mask=valid[:, None] & (column[None, :] < WIDTH),
    )


@triton.jit
def load_pages(table, key, stop, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Page numbers of keys ``key .. key + KEYS``: one number if a page holds them all."""
    at = key
    if PAGE < KEYS:
        at = key + tl.arange(0, KEYS)
    return tl.load(table + at // PAGE, mask=at < stop, other=0).to(tl.int64)


@triton.jit
def of_head(entries, head, stride_head):
    """Pointers of one key head's entries."""
    if len(entries) == 2:
        moved = (entries[0] + head * stride_head, entries[1] + head)
    else:
        moved = (entries[0] + head * stride_head,)
    return moved


@triton.jit
def in_f16(q0, q1, k, factor, D1: tl.constexpr):
    """Query rows for products with codes: f16, each row times a power of two, and what undoes it.

    Numbers of sixteen bits lose nothing in it that counts beside their row's largest.
    """
    most = tl.max(tl.abs(q0.to(tl.float32)), axis=1)
    if D1 > 0:
        most = tl.maximum(most, tl.max(tl.abs(q1.to(tl.float32)), axis=1))
    exponent = most.to(tl.int32, bitcast=True) >> 23
    inverse = power(tl.maximum(254 - exponent, 1))
    q0 = (q0.to(tl.float32) * inverse[:, None]).to(tl.float16)
    if D1 > 0:
        q1 = (q1.to(tl.float32) * inverse[:, None]).to(tl.float16)
    else:
        q1 = q0
    by_score = factor / inverse
    if k[0].dtype.element_ty == tl.int32:
        by_score *= 256.0
    return q0, q1, by_score


@triton.jit
def settled(total, v):
    """The total of a tile's weights that fits its sums of values."""
    if v[0].dtype.element_ty == tl.int32:
        total = total * (1.0 / 256.0)
    return total


@triton.jit
def power(exponent):
    """2 ** (exponent - 127) of 1 .. 254; 0 gives 0."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_scales(
    base, pages, key, stop, stride_page, stride_key,
    PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Biased exponents of the scales of one block's keys (or values), i32 [KEYS]."""
    offset = tl.arange(0, KEYS)
    if PAGE >= KEYS:
        at = base + pages * stride_page + (key % PAGE + offset) * stride_key
    else:
        at = base + pages * stride_page + (key + offset) % PAGE * stride_key
    if MASKED:
        found = tl.load(at, mask=key + offset < stop, other=0)
    else:
        found = tl.load(at)
    return found.to(tl.int32)


@triton.jit
def load_entries(
    state, pages, key, stop, stride_page, stride_key,
    FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Columns FROM .. FROM + SIZE of the keys (or values) of one block, [KEYS, SIZE].

    Of codes, what they are in f16, without scales; of words, 2^-8 of it (`widen.e4m3`).

    NOTE: masked ones are zero, never what lies in the cache: zero weights times NaN are NaN.
    """
    # Codes may come four in a word.
    EACH: tl.constexpr = 4 if state[0].dtype.element_ty == tl.int32 else 1
    ZERO: tl.constexpr = 0 if EACH == 4 else 0.0
    offset = tl.arange(0, KEYS)
    column = FROM // EACH + tl.arange(0, SIZE // EACH)
    if PAGE >= KEYS:
        at = state[0] + pages * stride_page + (key % PAGE + offset)[:, None] * stride_key
    else:
        inside = (key + offset) % PAGE
        at = state[0] + (pages * stride_page + inside * stride_key)[:, None]
    at += column[None, :]
    if MASKED:
        seen = (key + offset)[:, None] < stop
        if FROM + SIZE > WIDTH:
            seen = seen & (column[None, :] < WIDTH // EACH)
        entries = tl.load(at, mask=seen, other=ZERO)
    elif FROM + SIZE > WIDTH:
        entries = tl.load(at, mask=column[None, :] < WIDTH // EACH, other=ZERO)
    else:
        entries = tl.load(at)
    if EACH == 4:
        entries = widen.e4m3(entries)
    elif len(state) == 2:
        entries = entries.to(tl.float16)
    return entries


@triton.jit
def load_latents(
    state, pages, key, stop, stride_page, stride_key,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The latents of one block, codes times their scales: exact in 16 bits. [KEYS, SIZE]."""
    entries = load_entries(
        state, pages, key, stop, stride_page, stride_key, 0, SIZE, WIDTH, PAGE, KEYS, MASKED
    )  # fmt: skip
    if len(state) == 2:
        found = load_scales(
            state[1], pages, key, stop, stride_page // WIDTH, stride_key // WIDTH,
            PAGE, KEYS, MASKED,
        )  # fmt: skip
        entries = (entries.to(tl.float32) * power(found)[:, None]).to(TYPE)
    return entries


@triton.jit
def capped(s, CAP: tl.constexpr):
    """Scores in units of log2, capped."""
    if CAP > 0:
        # tanh by one exponential; exp2 at infinity gives the right limits.
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 / CAP)))
        s = s * (CAP * 1.4426950408889634)
    return s


@triton.jit
def scores_of(
    q0, q1, k, v, scales, pages, key, stop, factor, k_page, k_key,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores [rows, keys] before masking, and what they take to units of log2.

    The factor (of codes: of each row) is taken in where there are scales or a cap.
    """
    k0 = load_entries(k, pages, key, stop, k_page, k_key, 0, D0, D, PAGE, KEYS, MASKED)
    s = tl.dot(q0, tl.trans(k0))
    if D1 > 0:
        k1 = load_entries(k, pages, key, stop, k_page, k_key, D0, D1, D, PAGE, KEYS, MASKED)
        s = tl.dot(q1, tl.trans(k1), s)
    unit = factor
    if len(v) == 2:
        s = s * power(scales[0])[None, :] * factor[:, None]
        unit = 1.0
    elif CAP > 0:
        s = s * factor
        unit = 1.0
    return capped(s, CAP), unit


@triton.jit
def attend(
    q0, q1, acc0, acc1, top, total, position, pages, scales,
    k, v, key, stop, factor,
    k_page, k_key, v_page, v_key,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys added to a tile's running softmax.

    ``top`` starts at a finite number, so that rows which see nothing of a block keep it and add
    exact zeros. Scales of values are part of the exponents, so that weights of codes are at most 1,
    and are taken out of the total again.
    Shapes: q [rows, D], acc [rows, E], top and total and position [rows].
    """
    s, unit = scores_of(
        q0, q1, k, v, scales, pages, key, stop, factor, k_page, k_key,
        D, D0, D1, PAGE, KEYS, CAP, MASKED,
    )  # fmt: skip
    if len(v) == 2:
        # Values below 2^-71 count as a little more: exponents stay within those of float32.
        exponents = tl.maximum(scales[1], 47)
        s += exponents.to(tl.float32)[None, :]
    if MASKED:
        at = key + tl.arange(0, KEYS)
        seen = (at[None, :] <= position[:, None]) & (at[None, :] < stop)
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, axis=1) * unit)
    p = tl.exp2(s * unit - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    if len(v) == 2:
        total = total * shrink + tl.sum(p * power(254 - exponents)[None, :], axis=1)
    else:
        total = total * shrink + tl.sum(p, axis=1)
    v0 = load_entries(v, pages, key, stop, v_page, v_key, 0, E0, E, PAGE, KEYS, MASKED)
    weights = p.to(v0.dtype)
    acc0 = tl.dot(weights, v0, acc0 * shrink[:, None])
    if E1 > 0:
        v1 = load_entries(v, pages, key, stop, v_page, v_key, E0, E1, E, PAGE, KEYS, MASKED)
        acc1 = tl.dot(weights, v1, acc1 * shrink[:, None])
    return acc0, acc1, new_top, total


@triton.jit
def weigh_latents(
    q0, q1, latents, keys, top, total, position, key, stop, factor, KEYS: tl.constexpr
):  # fmt: skip
    """Weights of a block's latents against the new running maximum, and what older ones shrink by.

    Both parts of the scores are products of their own, scaled before they are added: as one sum
    they would be one product followed by another.
    """
    s = tl.dot(q0, tl.trans(latents)) * factor + tl.dot(q1, tl.trans(keys)) * factor
    at = key + tl.arange(0, KEYS)
    s = tl.where((at[None, :] <= position[:, None]) & (at[None, :] < stop), s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, axis=1))
    p = tl.exp2(s - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return p.to(q0.dtype), shrink, new_top, total * shrink + tl.sum(p, axis=1)


@triton.jit
def attend_latents(
    q0, q1, acc, top, total, position, pages, k, v, key, stop, factor,
    k_page, k_key, v_page, v_key,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, R: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One block of latents, read once for scores and values, added to a tile's running softmax.

    Shapes: q0 [rows, D], q1 [rows, R], acc [rows, D], top and total and position [rows].
    """
    latents = load_latents(k, pages, key, stop, k_page, k_key, D0, D, PAGE, KEYS, True, q0.dtype)
    keys = load_entries(v, pages, key, stop, v_page, v_key, 0, D1, R, PAGE, KEYS, True)
    if KEYS == D1 and q0.shape[0] == KEYS:
        weights = keys  # of the right shape, and in shared memory already
    else:
        weights = tl.zeros([q0.shape[0], KEYS], q0.dtype)
    shrink = top
    # Always so. Behind a branch the compiler does not see that a second product follows, and shares
    # the columns of the scores out over warps as well as their rows.
    if key < stop:
        weights, shrink, top, total = weigh_latents(
            q0, q1, latents, keys, top, total, position, key, stop, factor, KEYS
        )  # fmt: skip
    return tl.dot(weights, latents, acc * shrink[:, None]), top, total


@triton.jit
def attend_span(
    q0, q1, acc0, acc1, top, total, position, table, pages,
    k, v, low, high, stop, factor,
    k_page, k_key, v_page, v_key,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, R: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    MASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """All blocks of keys from ``low`` (a multiple of KEYS) to ``high``; none past ``stop`` is seen.

    The next block's page numbers are read a step ahead: the reads of keys wait for no table; the
    first ones (``pages``) are the caller's, which may have them before it has queries. With AHEAD
    scales are too: where few rows leave registers for those of two blocks.
    """
    last = tl.minimum(high, stop)
    scales = scales_of(
        k, v, pages, low, stop, k_page, k_key, v_page, v_key, D, E, PAGE, KEYS, MASKED
    )  # fmt: skip
    for key in tl.range(low, high, KEYS):
        ahead = load_pages(table, key + KEYS, last, PAGE, KEYS)
        if AHEAD:
            coming = scales_of(
                k, v, ahead, key + KEYS, stop, k_page, k_key, v_page, v_key,
                D, E, PAGE, KEYS, MASKED,
            )  # fmt: skip
        else:
            scales = scales_of(
                k, v, pages, key, stop, k_page, k_key, v_page, v_key, D, E, PAGE, KEYS, MASKED
            )  # fmt: skip
        if R > 0:
            acc0, top, total = attend_latents(
                q0, q1, acc0, top, total, position, pages, k, v, key, stop, factor,
                k_page, k_key, v_page, v_key, D, D0, D1, R, PAGE, KEYS,
            )  # fmt: skip
        else:
            acc0, acc1, top, total = attend(
                q0, q1, acc0, acc1, top, total, position, pages, scales, k, v, key, stop, factor,
                k_page, k_key, v_page, v_key,
                D, D0, D1, E, E0, E1, PAGE, KEYS, WINDOW, CAP, MASKED,
            )  # fmt: skip
        pages = ahead
        if AHEAD:
            scales = coming
    return acc0, acc1, top, total


@triton.jit
def scales_of(
    k, v, pages, key, stop, k_page, k_key, v_page, v_key,
    D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Scales of a block's keys and of its values; of plain numbers what stands in for them."""
    of_keys = key
    of_values = key
    if len(v) == 2:
        EACH: tl.constexpr = 4 if k[0].dtype.element_ty == tl.int32 else 1
        of_keys = load_scales(
            k[1], pages, key, stop, k_page * EACH // D, k_key * EACH // D, PAGE, KEYS, MASKED
        )  # fmt: skip
        of_values = load_scales(
            v[1], pages, key, stop, v_page * EACH // E, v_key * EACH // E, PAGE, KEYS, MASKED
        )  # fmt: skip
    return of_keys, of_values
