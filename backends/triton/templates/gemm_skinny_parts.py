"""Parts of the sums of x @ w.T for few rows of x, and the launch that adds up and finishes rows.

The parts are those of `gemm_skinny`, which no program waits for: the next launch has whole rows.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early
from metainfer.backends.triton.templates.gemm_skinny import head_of, place, sums


# One form for all numbers of rows: they vary from step to step.
@triton.jit(do_not_specialize=["rows"])
def gemm_skinny_parts(
    x, weight, partial, rows, columns, inner,
    step: tl.constexpr, FORMAT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    HEAD: tl.constexpr, REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One of SPLIT parts of a tile [BM, BN]: x [M, K], partial [SPLIT, M, N]."""
    early.let_next(EARLY)
    _, tile_m, tile_n, part = place(rows, columns, BM, BN, SPLIT)
    m_M, n_N = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    first = part * tl.cdiv(inner, BK * SPLIT) * BK
    head = head_of(weight, n_N, first, columns, inner, BK, SPLIT, HEAD, FORMAT)
    early.wait_for_last(EARLY)
    acc = sums(
        x, weight, head, m_M, n_N, first, rows, columns, inner, step, FORMAT, BK, SPLIT, HEAD,
        REST,
    )  # fmt: skip
    at = (part * rows + m_M[None, :]).to(tl.int64) * columns + n_N[:, None]
    tl.store(partial + at, acc, mask=(n_N[:, None] < columns) & (m_M[None, :] < rows))


@triton.jit(do_not_specialize=["rows"])
def finish_rows(
    partial, operands, rows, columns,
    epilogue: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row a program: its parts added up in their order, then ``epilogue``, which stores.

    Shapes: partial [SPLIT, M, N]; operands: what ``epilogue`` reads and writes beside the row.
    """
    early.wait(EARLY)
    row = tl.zeros([1, 1], tl.int64) + tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros([1, COLUMNS], tl.float32)
    for part in tl.static_range(SPLIT):
        spot = partial + (part * rows + row) * columns + column
        acc += tl.load(spot, mask=column < columns, other=0.0)
    epilogue(acc, operands, row, row >= 0)
