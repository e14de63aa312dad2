"""q, k, v = split(x @ w.T) for few rows of x: q and k turned, k and v written to their pages.

Rows of the weight are those of query heads, key heads, value heads. Pairs of numbers that turn
together, D / 2 apart, lie side by side in a tile, so that a thread holds both; the product, its
parts and its head are those of `gemm_skinny`.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early
from metainfer.backends.triton.templates.gemm_skinny import (
    collected,
    head_of,
    is_last,
    place,
    sums,
)


@triton.jit
def normed(a, b, weight, pair, EPS: tl.constexpr, D: tl.constexpr, KEPT: tl.constexpr):
    """The rms norm of whole heads [BM, D / 2] of each half; pair: numbers of the first half."""
    share = tl.rsqrt(tl.sum(a * a + b * b, axis=1)[:, None] / D + EPS)
    low = tl.load(weight + pair)[None, :].to(tl.float32)
    high = tl.load(weight + pair + D // 2)[None, :].to(tl.float32)
    # The norm's own rounding, as where it is stored.
    return (a * share * low).to(KEPT).to(tl.float32), (b * share * high).to(KEPT).to(tl.float32)


@triton.jit
def places(
    positions, slots, cos, sin, m_M, rows, head, pair,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Cosines and sines [BM, pairs] of a head that turns, slots [BM] of one that is written."""
    there = m_M < rows
    turns = there[:, None] & (head < H + G)
    at = tl.load(positions + m_M, mask=there, other=0).to(tl.int64)[:, None] * (D // 2)
    c = tl.load(cos + at + pair[None, :], mask=turns, other=0.0)
    s = tl.load(sin + at + pair[None, :], mask=turns, other=0.0)
    return c, s, tl.load(slots + m_M, mask=there & (head >= H), other=0).to(tl.int64)


@triton.jit
def finish_turned(
    acc, q, k, v, q_norm, k_norm, c, s, slot, m_M, rows, head, pair,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    NORMED: tl.constexpr, EPS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Turn the sums back, take the halves apart, norm, rotate, store one head's columns."""
    BM: tl.constexpr = acc.shape[1]
    HALF: tl.constexpr = acc.shape[0] // 2
    a, b = tl.split(tl.reshape(tl.trans(acc), (BM, HALF, 2)))
    # The product's own rounding, as where it is stored.
    a, b = a.to(KEPT).to(tl.float32), b.to(KEPT).to(tl.float32)
    row, inside = m_M[:, None].to(tl.int64), m_M[:, None] < rows
    if head < H + G:
        if NORMED:
            if head < H:
                a, b = normed(a, b, q_norm, pair, EPS, D, KEPT)
            else:
                a, b = normed(a, b, k_norm, pair, EPS, D, KEPT)
        a, b = a * c - b * s, b * c + a * s
    if head < H:
        spot = q + row * (H * D) + head * D + pair[None, :]
    else:
        row = slot[:, None] * (G * D)
        spot = k + row + (head - H) * D + pair[None, :]
        if head >= H + G:
            spot = v + row + (head - H - G) * D + pair[None, :]
    tl.store(spot, a.to(KEPT), mask=inside)
    tl.store(spot + D // 2, b.to(KEPT), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gemm_skinny_turned(
    x, weight, q, k, v, q_norm, k_norm, positions, slots, cos, sin, partial, arrived,
    rows, columns, inner,
    step: tl.constexpr, FORMAT: tl.constexpr, KEPT: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    NORMED: tl.constexpr, EPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    HEAD: tl.constexpr, REST: tl.constexpr, SETTLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN rows of one head of the weight a program, or one of SPLIT parts of their sums.

    Shapes: x [M, K], weight [(H + 2 G) D, K]; q [M, H, D]; k and v [slots, G, D], written at
    ``slots`` [M]; q_norm and k_norm [D], read where NORMED: BN is D then; positions [M]; cos and
    sin [positions, D / 2]; partial and arrived as `gemm_skinny`. KEPT: type of the product, q, k
    and v. SETTLED: positions and slots are the step's own: they, and what lies in tables at them,
    are read before the launch in front has ended.
    """
    early.let_next(EARLY)
    tile, tile_m, tile_n, part = place(rows, columns, BM, BN, SPLIT)
    m_M, both = tile_m * BM + tl.arange(0, BM), tl.arange(0, BN)
    TILES: tl.constexpr = D // BN
    head, begin = tile_n // TILES, tile_n % TILES * (BN // 2)
    n_N = head * D + begin + both // 2 + both % 2 * (D // 2)
    first = part * tl.cdiv(inner, BK * SPLIT) * BK
    ahead = head_of(weight, n_N, first, columns, inner, BK, SPLIT, HEAD, FORMAT)
    pair = begin + tl.arange(0, BN // 2)
    if not SETTLED:
        early.wait_for_last(EARLY)
    c, s, slot = places(positions, slots, cos, sin, m_M, rows, head, pair, H, G, D)
    if SETTLED:
        early.wait_for_last(EARLY)
    acc = sums(
        x, weight, ahead, m_M, n_N, first, rows, columns, inner, step, FORMAT, BK, SPLIT, HEAD,
        REST,
    )  # fmt: skip
    tiles = tl.cdiv(rows, BM) * tl.cdiv(columns, BN)
    if SPLIT > 1:
        if is_last(acc, partial, arrived, tile, tiles, part, m_M, rows, SPLIT):
            acc = collected(partial, arrived, tile, tiles, m_M, rows, BN, BM, SPLIT)
            finish_turned(
                acc, q, k, v, q_norm, k_norm, c, s, slot, m_M, rows, head, pair,
                H, G, D, NORMED, EPS, KEPT,
            )  # fmt: skip
    else:
        finish_turned(
            acc, q, k, v, q_norm, k_norm, c, s, slot, m_M, rows, head, pair,
            H, G, D, NORMED, EPS, KEPT,
        )  # fmt: skip
