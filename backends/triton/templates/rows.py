"""Activations of a product: plain numbers, or fp8 codes with scales.

M rows, K inner; ``x`` is a tuple of pointers: numbers or codes [M, K], then scales. GROUP is how
many numbers along K share a scale: 0 for a whole row, -1 for plain numbers, which have none.
"""

import triton
import triton.language as tl


@triton.jit
def accumulate(
    acc, x, row, rows, weight, n_N, first, columns, inner,
    step: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """acc += x[row, first : first + BK] @ w.T, w as ``step`` reads it.

    Codes are multiplied as they are; the float32 sums over one group are scaled and added up.
    """
    k_K = first + tl.arange(0, BK)[None, :]
    x_MK = tl.load(x[0] + row * inner + k_K, mask=(row < rows) & (k_K < inner), other=0.0)
    if GROUP > 0:
        part = step(
            tl.zeros(acc.shape, tl.float32), x_MK, weight, n_N, first, columns, inner, BK, FORMAT,
            False,
        )  # fmt: skip
        groups = tl.cdiv(inner, GROUP)
        acc += part * tl.load(x[1] + row * groups + first // GROUP, mask=row < rows, other=0.0)
    else:
        acc = step(acc, x_MK, weight, n_N, first, columns, inner, BK, FORMAT, False)
    return acc


@triton.jit
def finish(acc, x, row, rows, GROUP: tl.constexpr):
    """The sums over whole rows, scaled where rows have one scale each."""
    if GROUP == 0:
        acc *= tl.load(x[1] + row, mask=row < rows, other=0.0)
    return acc
