"""y = silu(x @ gate.T) * (x @ up.T), gate and up the halves of one weight's rows."""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import functions


# One form for all numbers of rows: they vary from step to step.
@triton.jit(do_not_specialize=["rows"])
def gemm_gated(
    x, y, weight, rows, columns, inner,
    step: tl.constexpr, FORMAT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN / 2] of y a program, of a product [BM, BN].

    x [M, K], y [M, N], weight of 2 N rows: pointers for ``step``. Gate and up lie side by side
    column by column, so that a thread holds both numbers of a pair when it multiplies them.
    Programs go down BAND tiles of rows before they go to the next columns, as those of `gemm`.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(2 * columns, BN)
    program = tl.program_id(0)
    band = program // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = program % (BAND * tiles_n)
    m_M = (band * BAND + within % height) * BM + tl.arange(0, BM)
    first_column = (within // height) * (BN // 2)
    both = tl.arange(0, BN)
    # Gates past the end are rows of up: read in vain, never stored. Rows of up past it are masked.
    n_N = first_column + both // 2 + tl.where(both % 2 == 1, columns, 0)
    row = m_M[:, None].to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, inner, BK):
        k_K = first + tl.arange(0, BK)[None, :]
        x_MK = tl.load(x + row * inner + k_K, mask=(row < rows) & (k_K < inner), other=0.0)
        acc = step(acc, x_MK, weight, n_N, first, 2 * columns, inner, BK, FORMAT)
    gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    # The product's own rounding, as where it is stored.
    kept = y.dtype.element_ty
    made = functions.silu(gate.to(kept).to(tl.float32)) * up.to(kept).to(tl.float32)
    column = first_column + tl.arange(0, BN // 2)[None, :]
    tl.store(y + row * columns + column, made.to(kept), mask=(row < rows) & (column < columns))
