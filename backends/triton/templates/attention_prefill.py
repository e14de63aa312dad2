"""Attention of many new tokens: one program for each tile and all keys that it sees."""

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
def attention_prefill(
    q, q_rope, k, v, out, starts, lengths, table,
    T, B, groups, factor,
    q_token, q_head, rope_token, rope_head, k_page, k_key, k_head,
    v_page, v_key, v_head, out_token, out_head, table_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, MANY: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, R: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Attention of one tile: QUERIES tokens times HEADS query heads that share a key head.

    Late tiles, which see the most keys, come first, so that short ones fill the end.
    Shapes: q [T, H, D], k and v [pages, PAGE, G, D or E], out [T, H, E], table [B, pages]; over
    latents q_rope [T, H, R], k and v [pages, PAGE, 1, D or R].
    """
    early.wait(EARLY)
    program = tl.program_id(0)
    group = program % groups
    tile = (tl.num_programs(0) - 1 - program) // groups
    sequence, _, first, end = find_tile(tile, starts, T, B, QUERIES, MANY)
    if first >= end:
        return
    row = tl.arange(0, ROWS)
    token = first + row // HEADS
    head = group * HEADS + row % HEADS
    valid = (row < QUERIES * HEADS) & (token < end)
    q0, q1 = load_queries(
        q, q_rope, token, head, valid, q_token, q_head, rope_token, rope_head, D, D0, D1, R
    )  # fmt: skip
    by_score = factor
    if len(v) == 2:
        q0, q1, by_score = in_f16(q0, q1, k, factor, D1)
    own = tl.minimum(sequence, B - 1)
    shift = tl.load(lengths + own) - end  # from token to position
    # Rows past the last sequence see nothing and become zeros.
    stop = tl.where(sequence == B, 0, shift + tl.minimum(first + QUERIES, end))
    low = 0
    inner = 0
    if WINDOW > 0:
        low = tl.maximum(shift + first - WINDOW + 1, 0) // KEYS * KEYS
        inner = tl.maximum((stop - WINDOW + KEYS - 1) // KEYS * KEYS, low)
    # Keys in [inner, full) are seen by all rows: no mask there. Over latents, whose sums take the
    # registers, there is one loop only.
    full = inner
    if R == 0:
        full = tl.minimum(shift + first + 1, stop) // KEYS * KEYS
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, E0], tl.float32)
    acc1 = acc0
    if E1 > 0:
        acc1 = tl.zeros([ROWS, E1], tl.float32)
    table += own.to(tl.int64) * table_row
    k = of_head(k, group * HEADS // GROUP, k_head)
    v = of_head(v, group * HEADS // GROUP, v_head)
    position = shift + token
    if WINDOW > 0:
        pages = load_pages(table, low, tl.minimum(inner, stop), PAGE, KEYS)
        acc0, acc1, top, total = attend_span(
            q0, q1, acc0, acc1, top, total, position, table, pages, k, v,
            low, tl.minimum(inner, stop), stop, by_score, k_page, k_key, v_page, v_key,
            D, D0, D1, E, E0, E1, R, PAGE, KEYS, WINDOW, CAP, True, False,
        )  # fmt: skip
    if R == 0:
        pages = load_pages(table, inner, tl.minimum(full, stop), PAGE, KEYS)
        acc0, acc1, top, total = attend_span(
            q0, q1, acc0, acc1, top, total, position, table, pages, k, v,
            inner, full, stop, by_score, k_page, k_key, v_page, v_key,
            D, D0, D1, E, E0, E1, R, PAGE, KEYS, WINDOW, CAP, False, False,
        )  # fmt: skip
    pages = load_pages(table, tl.maximum(inner, full), stop, PAGE, KEYS)
    acc0, acc1, top, total = attend_span(
        q0, q1, acc0, acc1, top, total, position, table, pages, k, v,
        tl.maximum(inner, full), stop, stop, by_score, k_page, k_key, v_page, v_key,
        D, D0, D1, E, E0, E1, R, PAGE, KEYS, WINDOW, CAP, True, False,
    )  # fmt: skip
    total = settled(total, v)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out, acc0 * share, token, head, valid, out_token, out_head, 0, E0, E)
    if E1 > 0:
        store_rows(out, acc1 * share, token, head, valid, out_token, out_head, E0, E1, E)
