"""Weights of codes as plain numbers in memory, for a library product: N rows, K inner."""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import order, weight_tiles, widen


@triton.jit
def widen_rows(
    out, weight, start, count, columns, inner,
    FORMAT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows ``start`` to ``start + count`` of a weight of ``columns`` rows, rounded to out's type.

    Shapes: weight: pointers, and FORMAT, as steps of `weight_tiles` take them, of words or ordered
    bytes; out [count, K].
    """
    across = tl.cdiv(inner, BK)
    n_N = tl.program_id(0) // across * BN + tl.arange(0, BN)
    first = tl.program_id(0) % across * BK
    row_N = tl.minimum(start + n_N, columns - 1)
    if FORMAT[0] == "lifted":
        value = weight_tiles.words_numbers(weight, row_N, first, columns, inner, BK, FORMAT, False)
        value = value.to(tl.float32) * order.LIFT
        if len(weight) == 3:
            value *= tl.load(weight[2] + row_N).to(tl.float32)[:, None]
    else:
        if FORMAT[0] == "moved":
            words = weight_tiles.moved_words(weight, row_N, first, columns, inner, BK, False)
            value = widen.e4m3_floats(words, BN, BK)
        else:
            value = weight_tiles.ordered_values(weight, row_N, first, columns, inner, BK, False)
        # The last two of either form: sizes of a block.
        HIGH: tl.constexpr = FORMAT[-2]
        WIDE: tl.constexpr = FORMAT[-1]
        scale = weight_tiles.ordered_scales(weight, row_N, first, columns, inner, BK, HIGH, WIDE)
        value *= scale if len(scale.shape) == 2 else scale[:, None]
    k_K = first + tl.arange(0, BK)[None, :]
    place = n_N[:, None].to(tl.int64) * inner + k_K
    mask = (n_N[:, None] < count) & (k_K < inner)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)
