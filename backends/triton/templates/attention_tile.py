"""Blocks of paged attention that its kernels share.

A *tile* is a few tokens of one sequence times the query heads of one key head: its rows go through
the matrix units together, so grouped heads cost no more reads of keys than one head does.
Row m is token ``m // HEADS`` and head ``m % HEADS`` of the tile.

Head widths that are no power of two are cut in two: 96 is read as 64 and 32 (``D0``, ``D1``;
``E0``, ``E1`` for values; 0: no second part).

Keys and values are tuples of pointers: numbers, or fp8 codes and the exponents of their scales, one
for each token and head (`ir.entries`). Codes times powers of two are exact in 16 bits.

Latents (R > 0) are keys and values at once: ``k`` holds them, D wide, ``v`` the rotary keys, R
wide, and a block of latents that was read for the scores is multiplied by the weights, too.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import functions


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
def of_head(entries, head, stride_head, WIDTH: tl.constexpr):
    """Pointers of one key head's entries."""
    if len(entries) == 2:
        moved = (entries[0] + head * stride_head, entries[1] + head * stride_head // WIDTH)
    else:
        moved = (entries[0] + head * stride_head,)  # type: ignore[assignment]
    return moved


@triton.jit
def load_scales(
    base, pages, key, stop, stride_page, stride_key,
    PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scales of the keys (or values) of one block, [KEYS]."""
    offset = tl.arange(0, KEYS)
    if PAGE >= KEYS:
        at = base + pages * stride_page + (key % PAGE + offset) * stride_key
    else:
        at = base + pages * stride_page + (key + offset) % PAGE * stride_key
    if MASKED:
        found = tl.load(at, mask=key + offset < stop, other=0)
    else:
        found = tl.load(at)
    return functions.e8m0(found)


@triton.jit
def load_entries(
    state, pages, key, stop, stride_page, stride_key,
    FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Columns FROM .. FROM + SIZE of the keys (or values) of one block, [KEYS, SIZE].

    NOTE: masked ones are zero, never what lies in the cache: zero weights times NaN are NaN.
    """
    base = state[0]
    offset = tl.arange(0, KEYS)
    column = FROM + tl.arange(0, SIZE)
    if PAGE >= KEYS:
        at = base + pages * stride_page + (key % PAGE + offset)[:, None] * stride_key
    else:
        inside = (key + offset) % PAGE
        at = base + (pages * stride_page + inside * stride_key)[:, None]
    at += column[None, :]
    if MASKED:
        seen = (key + offset)[:, None] < stop
        if FROM + SIZE > WIDTH:
            seen = seen & (column[None, :] < WIDTH)
        entries = tl.load(at, mask=seen, other=0.0)
    elif FROM + SIZE > WIDTH:
        entries = tl.load(at, mask=column[None, :] < WIDTH, other=0.0)
    else:
        entries = tl.load(at)
    if len(state) == 2:
        scales = load_scales(
            state[1], pages, key, stop, stride_page // WIDTH, stride_key // WIDTH,
            PAGE, KEYS, MASKED,
        )  # fmt: skip
        entries = (entries.to(tl.float32) * scales[:, None]).to(TYPE)
    return entries


@triton.jit
def scores_of(
    q0, q1, k0, k1, factor, D1: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """Scores [rows, keys] before masking; times ``factor`` (1 where capped) in units of log2."""
    s = tl.dot(q0, tl.trans(k0))
    if D1 > 0:
        s = tl.dot(q1, tl.trans(k1), s)
    if CAP > 0:
        # tanh by one exponential; exp2 at infinity gives the right limits.
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (factor * (2.0 / CAP))))
        s = s * (CAP * 1.4426950408889634)
    return s


@triton.jit
def attend(
    q0, q1, acc0, acc1, top, total, position, pages,
    k, v, key, stop, factor,
    k_page, k_key, v_page, v_key,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, R: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys added to a tile's running softmax.

    ``top`` starts at a finite number, so that rows which see nothing of a block keep it and add
    exact zeros. Shapes: q [rows, D], acc [rows, E], top and total and position [rows].
    """
    k0 = load_entries(k, pages, key, stop, k_page, k_key, 0, D0, D, PAGE, KEYS, MASKED, q0.dtype)
    k1 = k0
    if R > 0:
        k1 = load_entries(
            v, pages, key, stop, v_page, v_key, 0, D1, R, PAGE, KEYS, MASKED, q0.dtype
        )  # fmt: skip
    elif D1 > 0:
        k1 = load_entries(
            k, pages, key, stop, k_page, k_key, D0, D1, D, PAGE, KEYS, MASKED, q0.dtype
        )  # fmt: skip
    s = scores_of(q0, q1, k0, k1, factor, D1, CAP)
    if MASKED:
        at = key + tl.arange(0, KEYS)
        seen = (at[None, :] <= position[:, None]) & (at[None, :] < stop)
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    unit = factor
    if CAP > 0:
        unit = 1.0
    new_top = tl.maximum(top, tl.max(s, axis=1) * unit)
    p = tl.exp2(s * unit - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, axis=1)
    if R > 0:
        v0 = k0
    else:
        v0 = load_entries(
            v, pages, key, stop, v_page, v_key, 0, E0, E, PAGE, KEYS, MASKED, q0.dtype
        )  # fmt: skip
    weights = p.to(v0.dtype)
    acc0 = tl.dot(weights, v0, acc0 * shrink[:, None])
    if E1 > 0:
        v1 = load_entries(
            v, pages, key, stop, v_page, v_key, E0, E1, E, PAGE, KEYS, MASKED, q0.dtype
        )  # fmt: skip
        acc1 = tl.dot(weights, v1, acc1 * shrink[:, None])
    return acc0, acc1, new_top, total


@triton.jit
def attend_span(
    q0, q1, acc0, acc1, top, total, position, table,
    k, v, low, high, stop, factor,
    k_page, k_key, v_page, v_key,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, R: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """All blocks of keys from ``low`` (a multiple of KEYS) to ``high``; none past ``stop`` is seen.

    The next block's page numbers are read a step ahead: the reads of keys wait for no table.
    """
    pages = load_pages(table, low, tl.minimum(high, stop), PAGE, KEYS)
    for key in tl.range(low, high, KEYS):
        ahead = load_pages(table, key + KEYS, tl.minimum(high, stop), PAGE, KEYS)
        acc0, acc1, top, total = attend(
            q0, q1, acc0, acc1, top, total, position, pages, k, v, key, stop, factor,
            k_page, k_key, v_page, v_key,
            D, D0, D1, E, E0, E1, R, PAGE, KEYS, WINDOW, CAP, MASKED,
        )  # fmt: skip
        pages = ahead
    return acc0, acc1, top, total
