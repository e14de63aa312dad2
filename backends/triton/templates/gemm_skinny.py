"""y = epilogue(x @ w.T) for few rows of x: bound by how fast memory gives the weight.

Programs stream rows of the weight; the products are those of the transpose, so that rows of the
weight are rows of the matrix instruction and few rows of x its columns. Where there are fewer tiles
than processors, SPLIT programs share the sums of a tile: each leaves its own in ``partial``, and
the last one of them to arrive adds them up, in the order of the parts, and stores the result.

With HEAD > 0 a program reads the first HEAD columns of its part of the weight, plain numbers or
e4m3 codes, into registers before it waits for the launch in front: memory is at work while that one
ends.
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
    weight, n_N, first, columns, inner, BK: tl.constexpr, SPLIT: tl.constexpr, HEAD: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """What is read of a part of the weight before the launch in front has ended.

    Its first HEAD columns: plain numbers [BN, HEAD], a number for none; or pairs of words and of
    scales, one for each step, of e4m3 codes, behind the scales of the first step after them.
    """
    end = part_end(first, inner, BK, SPLIT)
    if len(FORMAT) >= 3 and FORMAT[0] == "moved":
        at = first + HEAD
        head = (weight_tiles.step_scales(weight, n_N, at, columns, inner, BK, FORMAT),)
        for i in tl.static_range(HEAD // BK):
            # Steps past the part's end are past the inner dim.
            at = tl.where(first + i * BK < end, first + i * BK, tl.cdiv(inner, BK) * BK)
            at = tl.multiple_of(at, BK)
            words = weight_tiles.moved_words(weight, n_N, at, columns, inner, BK, False)
            scale = weight_tiles.step_scales(weight, n_N, at, columns, inner, BK, FORMAT)
            head += ((words, scale),)  # type: ignore[assignment]
    else:
        head = 0.0  # type: ignore[assignment]
        if HEAD > 0:
            k_K = first + tl.arange(0, HEAD)[None, :]
            inside = (n_N[:, None] < columns) & (k_K < end)
            place_NK = n_N[:, None].to(tl.int64) * inner + k_K
            head = tl.load(weight[0] + place_NK, mask=inside, other=0)
    return head


@triton.jit
def part_end(first, inner, BK: tl.constexpr, SPLIT: tl.constexpr):
    """Where the part of the inner dim ends that begins at ``first``."""
    return tl.minimum(first + tl.cdiv(inner, BK * SPLIT) * BK, inner)


@triton.jit
def rows_read(x, row, at, end, rows, inner, BK: tl.constexpr):
    """Numbers [BM, BK] of rows of x, zeros from ``end`` on."""
    k_K = at + tl.arange(0, BK)[None, :]
    return tl.load(x + row * inner + k_K, mask=(row < rows) & (k_K < end), other=0.0)


@triton.jit
def sums(
    x, weight, head, m_M, n_N, first, rows, columns, inner,
    step: tl.constexpr, FORMAT: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    HEAD: tl.constexpr, REST: tl.constexpr = True,
):  # fmt: skip
    """The float32 sums [BN, BM] of one part of the inner dim, beginning at ``first``.

    head: as `head_of` has it. REST: whether the part goes on behind it.
    """
    if len(FORMAT) >= 3 and FORMAT[0] == "moved":
        acc = moved_sums(
            x, weight, head, m_M, n_N, first, rows, columns, inner, FORMAT, BK, SPLIT, HEAD, REST
        )  # fmt: skip
    else:
        acc = tl.zeros((n_N.shape[0], m_M.shape[0]), tl.float32)
        end = part_end(first, inner, BK, SPLIT)
        row = m_M[:, None].to(tl.int64)
        if HEAD > 0:
            # Read now, multiplied last: nothing waits for it.
            x_MH = rows_read(x, row, first, end, rows, inner, HEAD)
        for at in range(first + HEAD, end, BK):
            x_MK = rows_read(x, row, at, inner, rows, inner, BK)
            acc = step(acc, x_MK, weight, n_N, at, columns, inner, BK, FORMAT, True)
        if HEAD > 0:
            acc = tl.dot(head.to(x_MH.dtype), tl.trans(x_MH), acc)
        acc = weight_tiles.lifted(acc, weight, n_N, columns, FORMAT, True)
    return acc


@triton.jit
def moved_sums(
    x, weight, head, m_M, n_N, first, rows, columns, inner,
    FORMAT: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, HEAD: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """`sums` by e4m3 codes.

    Scales of a step are read a step before: the pipeline of the loop leaves such small reads alone,
    and each would wait for memory.
    """
    acc = tl.zeros((n_N.shape[0], m_M.shape[0]), tl.float32)
    end = part_end(first, inner, BK, SPLIT)
    row = m_M[:, None].to(tl.int64)
    x_head = ()
    for i in tl.static_range(HEAD // BK):
        # Read now, multiplied last: nothing waits for it.
        x_head += (rows_read(x, row, first + i * BK, end, rows, inner, BK),)  # type: ignore[assignment]
    if REST:
        scale = head[0]
        for at in range(first + HEAD, end, BK):
            x_MK = rows_read(x, row, at, inner, rows, inner, BK)
            after = weight_tiles.step_scales(weight, n_N, at + BK, columns, inner, BK, FORMAT)
            words = weight_tiles.moved_words(
                weight, n_N, at, columns, inner, BK, len(FORMAT) == 4
            )  # fmt: skip
            acc = weight_tiles.moved_product(acc, x_MK, words, scale, True)
            scale = after
    for i in tl.static_range(HEAD // BK):
        words, scale = head[i + 1]
        acc = weight_tiles.moved_product(acc, x_head[i], words, scale, True)
    return acc


@triton.jit
def is_last(acc, partial, arrived, tile, tiles, part, m_M, rows, SPLIT: tl.constexpr):
    """Leave the sums of a part for others to read; whether all parts of the tile are there now."""
    BN: tl.constexpr = acc.shape[0]
    BM: tl.constexpr = acc.shape[1]
    at = tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
    there = tl.broadcast_to(m_M[None, :] < rows, (BN, BM))
    tl.store(partial + (part * tiles + tile) * BN * BM + at, acc, mask=there)
    tl.debug_barrier()
    return tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1


@triton.jit
def collected(
    partial, arrived, tile, tiles, m_M, rows,
    BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The sums of all parts; the count goes back to none for the next launch."""
    at = tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
    there = tl.broadcast_to(m_M[None, :] < rows, (BN, BM))
    acc = tl.zeros((BN, BM), tl.float32)
    for part in tl.static_range(SPLIT):
        spot = partial + (part * tiles + tile) * BN * BM + at
        acc += tl.load(spot, mask=there, other=0.0, cache_modifier=".cg")
    tl.store(arrived + tile, 0)
    return acc


# One form for all numbers of rows: they vary from step to step.
@triton.jit(do_not_specialize=["rows"])
def gemm_skinny(
    x, y, weight, operands, partial, arrived, rows, columns, inner,
    step: tl.constexpr, reads: tl.constexpr, epilogue: tl.constexpr, FORMAT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    HEAD: tl.constexpr, REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of y a program, or one of SPLIT parts of it.

    x [M, K]; y [M, N]; weight: pointers for ``step``; operands: what ``reads`` reads before there
    are sums, and ``epilogue`` behind them; partial [SPLIT, tiles, BM, BN]; arrived [tiles], zeros.
    """
    early.let_next(EARLY)
    tile, tile_m, tile_n, part = place(rows, columns, BM, BN, SPLIT)
    m_M, n_N = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    first = part * tl.cdiv(inner, BK * SPLIT) * BK
    head = head_of(weight, n_N, first, columns, inner, BK, SPLIT, HEAD, FORMAT)
    early.wait_for_last(EARLY)
    row, column = m_M[:, None].to(tl.int64), n_N[None, :]
    row_in, column_in = row < rows, column < columns
    found = reads(operands, row, column, row_in, column_in)
    acc = sums(
        x, weight, head, m_M, n_N, first, rows, columns, inner, step, FORMAT, BK, SPLIT, HEAD,
        REST,
    )  # fmt: skip
    tiles = tl.cdiv(rows, BM) * tl.cdiv(columns, BN)
    if SPLIT > 1:
        if is_last(acc, partial, arrived, tile, tiles, part, m_M, rows, SPLIT):
            acc = collected(partial, arrived, tile, tiles, m_M, rows, BN, BM, SPLIT)
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
    HEAD: tl.constexpr, REST: tl.constexpr, EARLY: tl.constexpr,
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
    head = head_of(weight, n_N, first, 2 * columns, inner, BK, SPLIT, HEAD, FORMAT)
    early.wait_for_last(EARLY)
    acc = sums(
        x, weight, head, m_M, n_N, first, rows, 2 * columns, inner, step, FORMAT, BK, SPLIT,
        HEAD, REST,
    )  # fmt: skip
    tiles = tl.cdiv(rows, BM) * tl.cdiv(2 * columns, BN)
    n_H = tile_n * (BN // 2) + tl.arange(0, BN // 2)
    if SPLIT > 1:
        if is_last(acc, partial, arrived, tile, tiles, part, m_M, rows, SPLIT):
            acc = collected(partial, arrived, tile, tiles, m_M, rows, BN, BM, SPLIT)
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
