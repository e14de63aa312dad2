"""Attention of few new tokens over long states: the keys are shared out evenly over programs.

The work of all sequences, in blocks of keys, is laid end to end: sequence by sequence, tile by
tile, group of heads by group, and cut into equal parts, one for each program. So a long sequence
among short ones keeps no program waiting, and no count is needed on the host. A program finishes
the tiles that lie within its part, and leaves at most two pieces of others, at its begin and at
its end, which `attention_combine` adds up.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early
from metainfer.backends.triton.templates.attention_tile import (
    attend_span,
    find_tile,
    in_f16,
    load_pages,
    load_queries,
    of_head,
    settled,
    store_rows,
)

# Below every score, yet finite: differences of it with itself are zero, not NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def block_span(length, count, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """First block of keys that a sequence's new tokens see, and how many blocks."""
    low = length * 0
    if WINDOW > 0:
        low = tl.maximum(length - count - WINDOW + 1, 0) // KEYS
    return low, tl.maximum((length + KEYS - 1) // KEYS - low, 0)


@triton.jit
def unit_ends(
    starts, lengths, B, groups,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Where each sequence's work ends, in blocks of keys, [MANY]; past the last one: the total."""
    index = tl.arange(0, MANY)
    held = index < B
    begin = tl.load(starts + index, mask=held, other=0)
    count = tl.load(starts + index + 1, mask=held, other=0) - begin
    _, blocks = block_span(tl.load(lengths + index, mask=held, other=0), count, KEYS, WINDOW)
    return tl.cumsum((count + QUERIES - 1) // QUERIES * groups * blocks, axis=0)


@triton.jit
def attention_split(
    q, q_rope, k, v, out, pieces, stats,
    starts, lengths, table, B, groups, factor,
    q_token, q_head, rope_token, rope_head, k_page, k_key, k_head,
    v_page, v_key, v_head, out_token, out_head, table_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, MANY: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, R: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SETTLED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program's part of the work.

    SETTLED: starts and lengths are the step's own: they may be read before the launch in front has
    ended.

    Shapes: q [T, H, D], k and v [pages, PAGE, G, D or E], out [T, H, E], table [B, pages] (over
    latents q_rope [T, H, R], k and v [pages, PAGE, 1, D or R]),
    pieces [2 * programs, ROWS, E], stats [2 * programs, 2, ROWS] (top and total).
    """
    early.let_next(EARLY)
    if not SETTLED:
        early.wait_for_last(EARLY)
    program = tl.program_id(0)
    ends = unit_ends(starts, lengths, B, groups, QUERIES, KEYS, WINDOW, MANY)
    work = tl.max(ends, axis=0)
    part = (work + tl.num_programs(0) - 1) // tl.num_programs(0)
    unit = program * part
    limit = tl.minimum(unit + part, work)
    slot = program * 2
    row = tl.arange(0, ROWS)
    while unit < limit:
        sequence = tl.sum((ends <= unit).to(tl.int32), axis=0)
        before = tl.max(tl.where(ends <= unit, ends, 0), axis=0)
        begin = tl.load(starts + sequence)
        end = tl.load(starts + sequence + 1)
        length = tl.load(lengths + sequence)
        low, blocks = block_span(length, end - begin, KEYS, WINDOW)
        piece = (unit - before) // blocks
        block = (unit - before) % blocks
        count = tl.minimum(blocks - block, limit - unit)
        group = piece % groups
        at_pages = table + sequence.to(tl.int64) * table_row
        low = (low + block) * KEYS
        pages = load_pages(at_pages, low, length, PAGE, KEYS)
        if SETTLED:
            early.wait_for_last(EARLY)
        first = begin + piece // groups * QUERIES
        token = first + row // HEADS
        head = group * HEADS + row % HEADS
        valid = (row < QUERIES * HEADS) & (token < end)
        q0, q1 = load_queries(
            q, q_rope, token, head, valid, q_token, q_head, rope_token, rope_head, D, D0, D1, R
        )  # fmt: skip
        by_score = factor
        if len(v) == 2:
            q0, q1, by_score = in_f16(q0, q1, k, factor, D1)
        top = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc0 = tl.zeros([ROWS, E0], tl.float32)
        acc1 = acc0
        if E1 > 0:
            acc1 = tl.zeros([ROWS, E1], tl.float32)
        key_head = group * HEADS // GROUP
        acc0, acc1, top, total = attend_span(
            q0, q1, acc0, acc1, top, total, token + (length - end), at_pages, pages,
            of_head(k, key_head, k_head), of_head(v, key_head, v_head),
            low, tl.minimum(low + count * KEYS, length), length,
            by_score, k_page, k_key, v_page, v_key,
            D, D0, D1, E, E0, E1, R, PAGE, KEYS, WINDOW, CAP, True, True,
        )  # fmt: skip
        total = settled(total, v)
        if count == blocks:
            share = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
            store_rows(out, acc0 * share, token, head, valid, out_token, out_head, 0, E0, E)
            if E1 > 0:
                store_rows(out, acc1 * share, token, head, valid, out_token, out_head, E0, E1, E)
        else:
            at = slot + (unit > program * part).to(tl.int32)
            zero = row * 0
            spot = pieces + at.to(tl.int64) * ROWS * E
            store_rows(spot, acc0, row, zero, valid, E, 0, 0, E0, E)
            if E1 > 0:
                store_rows(spot, acc1, row, zero, valid, E, 0, E0, E1, E)
            tl.store(stats + at * 2 * ROWS + row, top, mask=valid)
            tl.store(stats + at * 2 * ROWS + ROWS + row, total, mask=valid)
        unit += count
    if SETTLED:
        # Also those that had no part: the next launch relies on all of them.
        early.wait_for_last(EARLY)


@triton.jit
def attention_combine(
    pieces, stats, out, starts, lengths,
    T, B, H, groups, programs, out_token, out_head,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, MANY: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,
    WINDOW: tl.constexpr, PARTS: tl.constexpr, SETTLED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of one token's head; rows that no program finished and none began are zero.

    Shapes: pieces [2 * programs, ROWS, E], stats [2 * programs, 2, ROWS], out [T, H, E].
    """
    early.let_next(EARLY)
    if not SETTLED:
        early.wait_for_last(EARLY)
    token = tl.program_id(0) // H
    head = tl.program_id(0) % H
    column = tl.arange(0, WIDE)
    sequence, begin, _, end = find_tile(token, starts, T, B, 1, MANY)
    ends = unit_ends(starts, lengths, B, groups, QUERIES, KEYS, WINDOW, MANY)
    work = tl.max(ends, axis=0)
    part = tl.maximum((work + programs - 1) // programs, 1)
    own = tl.minimum(sequence, B - 1)
    _, blocks = block_span(tl.load(lengths + own), end - begin, KEYS, WINDOW)
    blocks = tl.where(sequence == B, 0, blocks)
    before = tl.sum(tl.where(tl.arange(0, MANY) == sequence - 1, ends, 0), axis=0)
    piece = (token - begin) // QUERIES * groups + head // HEADS
    row = (token - begin) % QUERIES * HEADS + head % HEADS
    unit = before + piece * blocks
    begins = unit // part
    last = tl.where(blocks > 0, (unit + blocks - 1) // part, begins - 1)
    if SETTLED:
        early.wait_for_last(EARLY)
    if begins == last:
        return
    top = tl.max(tl.full([PARTS], LOWEST, tl.float32), axis=0)
    total = top * 0.0
    acc = tl.zeros([WIDE], tl.float32)
    for chunk in tl.range(begins, last + 1, PARTS):
        program = chunk + tl.arange(0, PARTS)
        there = program <= last
        slot = program * 2 + ((program == begins) & (unit > begins * part)).to(tl.int32)
        at = stats + slot * 2 * ROWS + row
        spot = pieces + (slot.to(tl.int64) * ROWS + row)[:, None] * E + column[None, :]
        # All reads are on their way before the first is waited for.
        tops = tl.load(at, mask=there, other=LOWEST)
        totals = tl.load(at + ROWS, mask=there, other=0.0)
        values = tl.load(spot, mask=there[:, None] & (column[None, :] < E), other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        scale = tl.exp2(tops - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(totals * scale, axis=0)
        acc = acc * shrink + tl.sum(values * scale[:, None], axis=0)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)
    spot = out + token.to(tl.int64) * out_token + head * out_head + column
    tl.store(spot, acc.to(out.dtype.element_ty), mask=column < E)
