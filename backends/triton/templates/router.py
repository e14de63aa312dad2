"""Scores of few tokens and what is made of them, in one launch: a router's product and its choice.

Programs share the sums of a tile of tokens, by rows of the weight and by parts of the inner dim.
Of them the last to arrive adds all up, in the order of the parts, and has whole rows of scores.
HEAD columns of the weight's part are read before the launch in front has ended (`gemm_skinny`).
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early, gemm_skinny


# One form for all numbers of rows: they vary from step to step.
@triton.jit(do_not_specialize=["rows"])
def linear_route(
    x, weight, operands, partial, arrived, rows, columns, inner,
    step: tl.constexpr, epilogue: tl.constexpr, FORMAT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    HEAD: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One of SPLIT parts of the sums of BM tokens and BN columns; ``epilogue`` stores the results.

    x [M, K]; weight: pointers for ``step``; operands: what ``epilogue`` reads and writes beside
    float32 rows [BM, WIDE] of scores; partial [tiles, SPLIT, BM, columns]; arrived [tiles], zeros.
    """
    early.let_next(EARLY)
    across = tl.cdiv(columns, BN) * SPLIT
    tile, share = tl.program_id(0) // across, tl.program_id(0) % across
    part = share % SPLIT
    m_M, n_N = tile * BM + tl.arange(0, BM), share // SPLIT * BN + tl.arange(0, BN)
    first = part * tl.cdiv(inner, BK * SPLIT) * BK
    head = gemm_skinny.head_of(weight, n_N, first, columns, inner, BK, SPLIT, HEAD, FORMAT)
    early.wait_for_last(EARLY)
    acc = gemm_skinny.sums(
        x, weight, head, m_M, n_N, first, rows, columns, inner, step, FORMAT, BK, SPLIT, HEAD
    )  # fmt: skip
    row = m_M[:, None].to(tl.int64)
    at = partial + ((tile * SPLIT + part) * BM + tl.arange(0, BM)[None, :]) * columns + n_N[:, None]
    tl.store(at, acc, mask=(n_N[:, None] < columns) & (m_M[None, :] < rows))
    tl.debug_barrier()
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == across - 1:
        tl.store(arrived + tile, 0)
        every = tl.arange(0, WIDE)[None, :]
        there = (row < rows) & (every < columns)
        scores = tl.zeros((BM, WIDE), tl.float32)
        for number in tl.static_range(SPLIT):
            place = (tile * SPLIT + number) * BM + tl.arange(0, BM)[:, None]
            found = partial + place * columns + every
            scores += tl.load(found, mask=there, other=0.0, cache_modifier=".cg")
        # Read row by row: each lies within a warp, which finds maxima without shared memory.
        epilogue(scores, operands, row, row < rows)
