"""y = epilogue(x @ w.T) for few rows of x: bound by how fast memory gives the weight.

Programs stream rows of the weight; the products are those of the transpose, so that rows of the
weight are rows of the matrix instruction and few rows of x its columns. Where there are fewer tiles
than processors, SPLIT programs share the sums of a tile: each leaves its own in ``partial``, and
the last one of them to arrive adds them up, in the order of the parts, and stores the result.

With HEAD > 0 a program reads the first HEAD columns of its part of the weight, plain numbers, into
registers before it waits for the launch in front: memory is at work while that one ends.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early, functions, weight_tiles


@triton.jit
def place(rows, columns, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """What a program has: (tile of y, that of rows, that of columns, part of the sums).

    Programs of one tile of columns come one after the other: they read the same rows of the weight.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(columns, BN)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    return tile, tile % tiles_m, tile // tiles_m, tl.program_id(0) // (tiles_m * tiles_n)


@triton.jit
def head_of(
    weight, n_N, first, columns, inner, BK: tl.constexpr, SPLIT: tl.constexpr, HEAD: tl.constexpr
):  # fmt: skip
    """The first columns of a part of a weight of plain numbers: [BN, HEAD]; a number for none."""
    head_NK = 0.0
    if HEAD > 0:
        k_K = first + tl.arange(0, HEAD)[None, :]
        inside = (n_N[:, None] < columns) & (k_K < part_end(first, inner, BK, SPLIT))
        head_NK = tl.load(weight[0] + n_N[:, None].to(tl.int64) * inner + k_K, mask=inside, other=0)
    return head_NK


@triton.jit
def part_end(first, inner, BK: tl.constexpr, SPLIT: tl.constexpr):
    """Where the part of the inner dim ends that begins at ``first``."""
    return tl.minimum(first + tl.cdiv(inner, BK * SPLIT) * BK, inner)


@triton.jit
def sums(
    x, weight, head_NK, m_M, n_N, first, rows, columns, inner,
    step: tl.constexpr, FORMAT: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """The float32 sums [BN, BM] of one part of the inner dim, beginning at ``first``."""
    acc = tl.zeros((n_N.shape[0], m_M.shape[0]), tl.float32)
    end = part_end(first, inner, BK, SPLIT)
    row = m_M[:, None].to(tl.int64)
    if HEAD > 0:
        # Read now, multiplied last: nothing waits for it.
        k_H = first + tl.arange(0, HEAD)[None, :]
        x_MH = tl.load(x + row * inner + k_H, mask=(row < rows) & (k_H < end), other=0.0)
    for at in range(first + HEAD, end, BK):
        k_K = at + tl.arange(0, BK)[None, :]
        x_MK = tl.load(x + row * inner + k_K, mask=(row < rows) & (k_K < inner), other=0.0)
        acc = step(acc, x_MK, weight, n_N, at, columns, inner, BK, FORMAT, True)
    if HEAD > 0:
        acc = tl.dot(head_NK.to(x_MH.dtype), tl.trans(x_MH), acc)
    return weight_tiles.lifted(acc, weight, n_N, columns, FORMAT, True)


@triton.jit
def is_last(acc, partial, arrived, tile, tiles, part, SPLIT: tl.constexpr):
    """Leave the sums of a part for others to read; whether all parts of the tile are there now."""
    BN: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[1]
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(partial + (part * tiles + tile) * BN * BM + at, acc)
    tl.debug_barrier()
    return tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1


@triton.jit
def collected(
    partial, arrived, tile, tiles, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr
):
    """The sums of all parts; the count goes back to none for the next launch."""
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for part in tl.static_range(SPLIT):
        acc += tl.load(partial + (part * tiles + tile) * BN * BM + at, cache_modifier=".cg")
    tl.store(arrived + tile, 0)
    return acc


# One form for all numbers of rows: they vary from step to step.
@triton.jit(do_not_specialize=["rows"])
def gemm_skinny(
    x, y, weight, operands, partial, arrived, rows, columns, inner,
    step: tl.constexpr, reads: tl.constexpr, epilogue: tl.constexpr, FORMAT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    HEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of y a program, or one of SPLIT parts of it.

    x [M, K]; y [M, N]; weight: pointers for ``step``; operands: what ``reads`` reads before there
    are sums, and ``epilogue`` after it, beside the
    float32 tile; partial [SPLIT, tiles, BN, BM]; arrived [tiles], zeros.
    """
    early.let_next(EARLY)
    tile, tile_m, tile_n, part = place(rows, columns, BM, BN, SPLIT)
    m_M, n_N = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    first = part * tl.cdiv(inner, BK * SPLIT) * BK
    head_NK = head_of(weight, n_N, first, columns, inner, BK, SPLIT, HEAD)
    early.wait_for_last(EARLY)
    row, column = m_M[:, None].to(tl.int64), n_N[None, :]
    row_in, column_in = row < rows, column < columns
    found = reads(operands, row, column, row_in, column_in)
    acc = sums(
        x, weight, head_NK, m_M, n_N, first, rows, columns, inner, step, FORMAT, BK, SPLIT, HEAD
    )  # fmt: skip
    tiles = tl.cdiv(rows, BM) * tl.cdiv(columns, BN)
    if SPLIT > 1:
        if is_last(acc, partial, arrived, tile, tiles, part, SPLIT):
            acc = collected(partial, arrived, tile, tiles, BN, BM, SPLIT)
            finish(acc, y, operands, found, row, column, row_in, column_in, columns, epilogue)
    else:
        finish(acc, y, operands, found, row, column, row_in, column_in, columns, epilogue)


@triton.jit
def finish(
    acc, y, operands, found, row, column, row_in, column_in, columns, epilogue: tl.constexpr
):
    """Turn the sums back, do what follows them, store."""
    made = epilogue(tl.trans(acc), operands, found, row, column, row_in, column_in)
    tl.store(y + row * columns + column, made.to(y.dtype.element_ty), mask=row_in & column_in)


@triton.jit(do_not_specialize=["rows"])
def gemm_skinny_gated(
    x, y, weight, partial, arrived, rows, columns, inner,
    step: tl.constexpr, FORMAT: tl.constexpr, KEPT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    HEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = silu(x @ gate.T) * (x @ up.T) [M, N], gate and up the halves of the weight's 2 N rows.

    One tile [BM, BN / 2] of y a program, or one of SPLIT parts of it; gate and up lie side by side
    row by row of the tile of the weight. KEPT: type that the product is rounded to.
    """
    early.let_next(EARLY)
    tile, tile_m, tile_n, part = place(rows, 2 * columns, BM, BN, SPLIT)
    m_M, both = tile_m * BM + tl.arange(0, BM), tl.arange(0, BN)
    # Gates past the end are rows of up: read in vain, never stored. Rows of up past it are masked.
    n_N = tile_n * (BN // 2) + both // 2 + tl.where(both % 2 == 1, columns, 0)
    first = part * tl.cdiv(inner, BK * SPLIT) * BK
    head_NK = head_of(weight, n_N, first, 2 * columns, inner, BK, SPLIT, HEAD)
    early.wait_for_last(EARLY)
    acc = sums(
        x, weight, head_NK, m_M, n_N, first, rows, 2 * columns, inner, step, FORMAT, BK, SPLIT,
        HEAD,
    )  # fmt: skip
    tiles = tl.cdiv(rows, BM) * tl.cdiv(2 * columns, BN)
    n_H = tile_n * (BN // 2) + tl.arange(0, BN // 2)
    if SPLIT > 1:
        if is_last(acc, partial, arrived, tile, tiles, part, SPLIT):
            acc = collected(partial, arrived, tile, tiles, BN, BM, SPLIT)
            finish_gated(acc, y, m_M, n_H, rows, columns, KEPT)
    else:
        finish_gated(acc, y, m_M, n_H, rows, columns, KEPT)


@triton.jit
def finish_gated(acc, y, m_M, n_H, rows, columns, KEPT: tl.constexpr):
    """Turn the sums back, take gate and up apart, multiply, store."""
    BM: tl.constexpr = acc.shape[1]
    HALF: tl.constexpr = acc.shape[0] // 2
    gate, up = tl.split(tl.reshape(tl.trans(acc), (BM, HALF, 2)))
    # The product's own rounding, as where it is stored.
    gate, up = gate.to(KEPT).to(tl.float32), up.to(KEPT).to(tl.float32)
    row, column = m_M[:, None].to(tl.int64), n_H[None, :]
    made = (functions.silu(gate) * up).to(KEPT)
    tl.store(y + row * columns + column, made, mask=(row < rows) & (column < columns))
