"""y = silu(x @ gate.T) * (x @ up.T), gate and up the halves of one weight's rows.

The result is stored as plain numbers, or rounded to fp8 codes while it is in registers.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import functions, rounding
from metainfer.backends.triton.templates import rows as activations


# One form for all numbers of rows: they vary from step to step.
@triton.jit(do_not_specialize=["rows"])
def gemm_gated(
    x, y, weight, rows, columns, inner,
    step: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, KEPT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    ALIKE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN / 2] of y a program, of a product [BM, BN].

    x [M, K]: pointers and GROUP as in `rows`; y: a pointer to numbers [M, N], or to codes of them
    and to scales, one for the BN / 2 numbers of a row of the tile; weight of 2 N rows: pointers for
    ``step``; KEPT: type that product and result are rounded to. Gate and up lie side by side column
    by column, so that a thread holds both numbers of a pair when it multiplies them.
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
    acc = tl.zeros((BN, BM) if TURNED else (BM, BN), tl.float32)
    for first in range(0, inner, BK):
        acc = activations.accumulate(
            acc, x, row, rows, weight, n_N, first_column, columns + first_column, first,
            2 * columns, inner, step, BK, FORMAT, GROUP, ALIKE, TURNED,
        )  # fmt: skip
    acc = activations.finish(
        acc, x, row, rows, weight, n_N, 2 * columns, FORMAT, GROUP, TURNED
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    # The product's own rounding, as where it is stored.
    gate, up = gate.to(KEPT).to(tl.float32), up.to(KEPT).to(tl.float32)
    made = (functions.silu(gate) * up).to(KEPT)
    column = first_column + tl.arange(0, BN // 2)[None, :]
    mask = (row < rows) & (column < columns)
    if len(y) == 2:
        made, scale = rounding.round_rows(tl.where(mask, made.to(tl.float32), 0.0))
        place = row * tl.cdiv(columns, BN // 2) + first_column // (BN // 2)
        tl.store(y[1] + place, scale, mask=row < rows)
    tl.store(y[0] + row * columns + column, made, mask=mask)
