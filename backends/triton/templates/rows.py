"""Activations of a product: plain numbers, or fp8 codes with scales.

M rows, K inner; ``x`` is a tuple of pointers: numbers or codes [M, K], then scales. GROUP is how
many numbers along K share a scale: 0 for a whole row, -1 for plain numbers, which have none.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import weight_tiles


@triton.jit
def accumulate(
    acc, x, row, rows, weight, n_N, even, odd, first, columns, inner,
    step: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    ALIKE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """acc += x[row, first : first + BK] @ w.T, w as ``step`` reads it; or its transpose (TURNED).

    Codes are multiplied as they are; the float32 sums over one group are scaled and added up.
    even, odd: rows of the weight that share scales with the tile's even and odd ones where ALIKE.
    """
    k_K = first + tl.arange(0, BK)[None, :]
    x_MK = tl.load(x[0] + row * inner + k_K, mask=(row < rows) & (k_K < inner), other=0.0)
    if GROUP >= 0:
        scale = tl.full(row.shape, 1.0, tl.float32)
        if GROUP > 0:
            groups = tl.cdiv(inner, GROUP)
            scale = tl.load(x[1] + row * groups + first // GROUP, mask=row < rows, other=0.0)
        acc = step(
            acc, x_MK, tl.trans(scale) if TURNED else scale, weight, n_N, even, odd, first,
            columns, inner, BK, FORMAT, ALIKE, TURNED,
        )  # fmt: skip
    else:
        acc = step(acc, x_MK, weight, n_N, first, columns, inner, BK, FORMAT, TURNED)
    return acc


@triton.jit
def finish(
    acc, x, row, rows, weight, n_N, columns,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The sums [M, N] over whole rows, scaled where rows have one scale each."""
    acc = weight_tiles.lifted(acc, weight, n_N, columns, FORMAT, TURNED)
    if TURNED:
        acc = tl.trans(acc)
    if GROUP == 0:
        acc *= tl.load(x[1] + row, mask=row < rows, other=0.0)
    return acc
