"""y = epilogue(x @ w.T) for few rows of x, codes by codes: as `gemm_skinny`, weights and x of fp8.

Codes are multiplied as they are; the float32 sums of a step, which lies under one scale of either
side, are scaled and added up.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early, weight_tiles
from metainfer.backends.triton.templates.gemm_skinny import (
    collected,
    finish,
    is_last,
    part_end,
    place,
)


@triton.jit
def scales_of_rows(scales, m_M, at, rows, inner, GROUP: tl.constexpr):
    """Scales of the tokens for the step at ``at``, [M]; a number where a whole row has one."""
    scale_M = 1.0
    if GROUP > 0:
        groups = tl.cdiv(inner, GROUP)
        inside = (m_M < rows) & (at < inner)
        place_M = m_M * groups + at // GROUP
        scale_M = tl.load(scales + place_M, mask=inside, other=0.0)[None, :]
    return scale_M


@triton.jit
def rounded_sums(
    x, x_scales, weight, scale_N, m_M, n_N, first, rows, columns, inner,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The float32 sums [BN, BM] of one part of the inner dim, beginning at ``first``.

    scale_N: the weight's scales of the first step. Those of a later one, and the tokens', are read
    a step before: the pipeline of the loop leaves such small reads alone, each would wait.
    """
    acc = tl.zeros((n_N.shape[0], m_M.shape[0]), tl.float32)
    row, column = m_M[:, None].to(tl.int64) * inner, n_N[:, None].to(tl.int64) * inner
    scale_M = scales_of_rows(x_scales, m_M, first, rows, inner, GROUP)
    for at in range(first, part_end(first, inner, BK, SPLIT), BK):
        k_K = at + tl.arange(0, BK)[None, :]
        x_MK = tl.load(x + row + k_K, mask=(m_M[:, None] < rows) & (k_K < inner), other=0.0)
        inside = (n_N[:, None] < columns) & (k_K < inner)
        w_NK = tl.load(weight[0] + column + k_K, mask=inside, other=0.0)
        next_N = weight_tiles.step_scales(weight, n_N, at + BK, columns, inner, BK, FORMAT)
        next_M = scales_of_rows(x_scales, m_M, at + BK, rows, inner, GROUP)
        part = tl.dot(w_NK, tl.trans(x_MK))
        acc += part * (scale_N[:, None] * scale_M)
        scale_N, scale_M = next_N, next_M
    if GROUP == 0:
        acc *= tl.load(x_scales + m_M, mask=m_M < rows, other=0.0)[None, :]
    return acc


# One form for all numbers of rows: they vary from step to step.
@triton.jit(do_not_specialize=["rows"])
def gemm_skinny_rounded(
    x, x_scales, y, weight, operands, partial, arrived, rows, columns, inner,
    reads: tl.constexpr, epilogue: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of y a program, or one of SPLIT parts of it.

    x [M, K] and its scales, GROUP as in `rows`; weight: codes [N, K], and scales for blocks of
    FORMAT = ("rounded", rows, inner), 0 for all; the others as `gemm_skinny`.
    """
    early.let_next(EARLY)
    tile, tile_m, tile_n, part = place(rows, columns, BM, BN, SPLIT)
    m_M, n_N = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    first = part * tl.cdiv(inner, BK * SPLIT) * BK
    scale_N = weight_tiles.step_scales(weight, n_N, first, columns, inner, BK, FORMAT)
    early.wait_for_last(EARLY)
    row, column = m_M[:, None].to(tl.int64), n_N[None, :]
    row_in, column_in = row < rows, column < columns
    found = reads(operands, row, column, row_in, column_in)
    acc = rounded_sums(
        x, x_scales, weight, scale_N, m_M, n_N, first, rows, columns, inner, FORMAT, GROUP, BK,
        SPLIT,
    )  # fmt: skip
    tiles = tl.cdiv(rows, BM) * tl.cdiv(columns, BN)
    if SPLIT > 1:
        if is_last(acc, partial, arrived, tile, tiles, part, m_M, rows, SPLIT):
            acc = collected(partial, arrived, tile, tiles, m_M, rows, BN, BM, SPLIT)
            finish(acc, y, operands, found, row, column, row_in, column_in, columns, epilogue)
    else:
        finish(acc, y, operands, found, row, column, row_in, column_in, columns, epilogue)
