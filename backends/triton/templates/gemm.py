"""y = epilogue(x @ w.T), the weight stored in any way that `weight_tiles` has a step for."""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import rows as activations


# One form for all numbers of rows: they vary from step to step.
@triton.jit(do_not_specialize=["rows"])
def gemm(
    x, y, weight, operands, rows, columns, inner,
    step: tl.constexpr, epilogue: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    ALIKE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of y a program.

    x [M, K]: pointers and GROUP as in `rows`; y [M, N]; weight: pointers for ``step``; operands:
    what ``epilogue`` reads beside the float32 tile. Programs go down BAND tiles of rows before they
    go to the next columns, so that both operands stay in the last cache.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(columns, BN)
    program = tl.program_id(0)
    band = program // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = program % (BAND * tiles_n)
    m_M = (band * BAND + within % height) * BM + tl.arange(0, BM)
    start = (within // height) * BN
    n_N = start + tl.arange(0, BN)
    row = m_M[:, None].to(tl.int64)
    acc = tl.zeros((BN, BM) if TURNED else (BM, BN), tl.float32)
    for first in range(0, inner, BK):
        acc = activations.accumulate(
            acc, x, row, rows, weight, n_N, start, start, first, columns, inner, step, BK, FORMAT,
            GROUP, ALIKE, TURNED,
        )  # fmt: skip
    acc = activations.finish(
        acc, x, row, rows, weight, n_N, columns, FORMAT, GROUP, TURNED
    )  # fmt: skip
    column = n_N[None, :]
    row_in, column_in = row < rows, column < columns
    made = epilogue(acc, operands, row, column, row_in, column_in)
    tl.store(y + row * columns + column, made.to(y.dtype.element_ty), mask=row_in & column_in)
