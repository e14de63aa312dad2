"""Steps of a product for each way that a weight is stored: acc += x_MK @ w_NK.T.

M rows, N columns, K inner; ``weight`` is a tuple of pointers: codes, then scales and offsets.
With TURNED the sums are those of the transposed product, acc_NM += w_NK @ x_MK.T: matrix units take
64 rows of their first operand and any few columns of the second.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import functions, order, widen


@triton.jit
def product(x_MK, w_NK, acc, TURNED: tl.constexpr):
    """The product of two tiles, added to sums."""
    if TURNED:
        acc = tl.dot(w_NK, tl.trans(x_MK), acc)
    else:
        acc = tl.dot(x_MK, tl.trans(w_NK), acc)
    return acc


@triton.jit
def product_told(x_MK, w_NK, acc, TURNED: tl.constexpr, FOURS: tl.constexpr):
    """The same of widened codes, in the order that they are told in."""
    return product(widen.told(x_MK, FOURS), w_NK, acc, TURNED)


@triton.jit
def added_told(x_MK, w_NK, acc, TURNED: tl.constexpr, FOURS: tl.constexpr):
    """The same, added by itself where that is better (`order.apart`)."""
    if TURNED and order.apart(acc.shape[0], acc.shape[1]):
        part = product_told(x_MK, w_NK, tl.zeros(acc.shape, tl.float32), TURNED, FOURS)
        # NOTE: Triton would make a plain sum the product's own again.
        acc = tl.fma(part, 1.0, acc)
    else:
        acc = product_told(x_MK, w_NK, acc, TURNED, FOURS)
    return acc


@triton.jit
def along(scale_N, TURNED: tl.constexpr):
    """A number for each row of the weight, as it lies in the sums."""
    if TURNED:
        made = scale_N[:, None]
    else:
        made = scale_N[None, :]
    return made


@triton.jit
def load_scale(pointer, mask):
    """Scales as float32; bytes are powers of two."""
    if pointer.dtype.element_ty == tl.uint8:
        return functions.e8m0(tl.load(pointer, mask=mask, other=0))
    return load_float(pointer, mask)


@triton.jit
def scale_at(pointer):
    """A single scale as float32."""
    if pointer.dtype.element_ty == tl.uint8:
        return functions.e8m0(tl.load(pointer))
    return tl.load(pointer).to(tl.float32)


@triton.jit
def load_float(pointer, mask):
    """Numbers of any type as float32."""
    other = 0.0 if pointer.dtype.element_ty.is_floating() else 0
    return tl.load(pointer, mask=mask, other=other).to(tl.float32)


@triton.jit
def plain_step(
    acc, x_MK, weight, n_N, first, columns, inner,
    BK: tl.constexpr, FORMAT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A weight of plain numbers [N, K]."""
    k_K = first + tl.arange(0, BK)
    mask = (n_N[:, None] < columns) & (k_K[None, :] < inner)
    place = n_N[:, None].to(tl.int64) * inner + k_K[None, :]
    w_NK = tl.load(weight[0] + place, mask=mask, other=0.0)
    return product(x_MK, w_NK.to(x_MK.dtype), acc, TURNED)


@triton.jit
def rounded_step(
    acc, x_MK, x_scale, weight, n_N, even, odd, first, columns, inner,
    BK: tl.constexpr, FORMAT: tl.constexpr, ALIKE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """fp8 codes [N, K] by codes, a scale for each block of FORMAT = (rows, inner), 0 for all.

    Codes are multiplied as they are, and scales multiply float32 sums; ``x_scale``: those of the
    tokens, as they lie in the sums, or 1. ALIKE: even rows of the tile share a scale, that of row
    ``even``, and odd ones that of row ``odd``.
    """
    k_K = first + tl.arange(0, BK)
    at = first // FORMAT[1] if FORMAT[1] > 0 else 0
    across = tl.cdiv(inner, FORMAT[1]) if FORMAT[1] > 0 else 1
    if ALIKE:
        # Few numbers: they meet the tokens' scales before they meet the sums.
        one = scale_at(weight[1] + even // FORMAT[0] * across + at) * x_scale
        other = scale_at(weight[1] + odd // FORMAT[0] * across + at) * x_scale
        is_odd = tl.arange(0, n_N.shape[0]) % 2 == 1
        factor = tl.where(along(is_odd, TURNED), other, one)
    else:
        row_N = n_N // FORMAT[0] if FORMAT[0] > 0 else n_N * 0
        scale_N = load_scale(weight[1] + row_N * across + at, n_N < columns)
        factor = along(scale_N, TURNED) * x_scale
    mask = (n_N[:, None] < columns) & (k_K[None, :] < inner)
    place = n_N[:, None].to(tl.int64) * inner + k_K[None, :]
    w_NK = tl.load(weight[0] + place, mask=mask, other=0.0)
    part = product(x_MK, w_NK.to(x_MK.dtype), tl.zeros(acc.shape, tl.float32), TURNED)
    return acc + part * factor


@triton.jit
def spread(per_group, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """[BN, BK // GROUP] -> [BN, BK], each number GROUP times."""
    wide = tl.broadcast_to(per_group[:, :, None], [BN, BK // GROUP, GROUP])
    return tl.reshape(wide, [BN, BK])


@triton.jit
def load_rows(pointer, n_N, across, w_W, columns, WHOLE: tl.constexpr):
    """Words [N, W] of rows of ``across``: zeros past them, and past the last row.

    WHOLE: there are none past them; instead of rows past the last one that is read again, and no
    read needs a mask.
    """
    if WHOLE:
        place_NW = tl.minimum(n_N, columns - 1)[:, None].to(tl.int64) * across + w_W
        found = tl.load(pointer + place_NW)
    else:
        place_NW = n_N[:, None].to(tl.int64) * across + w_W
        mask = (n_N[:, None] < columns) & (w_W < across)
        found = tl.load(pointer + place_NW, mask=mask, other=0)
    return found.to(tl.uint32, bitcast=True)


@triton.jit
def load_words(pointer, n_N, first, columns, inner, BK: tl.constexpr, WHOLE: tl.constexpr = False):
    """Words [N, BK / 8] of codes of 4 bits, of whole chunks: zeros past the inner dim."""
    across = tl.cdiv(inner, order.CHUNK) * (order.CHUNK // 8)
    w_W = first // 8 + tl.arange(0, BK // 8)[None, :]
    return load_rows(pointer, n_N, across, w_W, columns, WHOLE)


@triton.jit
def words_numbers(
    weight, n_N, first, columns, inner, BK: tl.constexpr, FORMAT: tl.constexpr,
    FOURS: tl.constexpr,
):  # fmt: skip
    """Numbers of bf16 [N, BK], 2^-32 of what they mean, of e2m1 codes in words [N, K' / 8].

    FORMAT = ("lifted", group, powers): codes that share a scale, and whether scales are powers of
    two; they lie in words [32 / group, K' / 128, N]. One more, of any kind: steps are WHOLE.
    """
    BN: tl.constexpr = n_N.shape[0]
    GROUP: tl.constexpr = FORMAT[1]
    POWERS: tl.constexpr = FORMAT[2]
    inside = n_N[:, None] < columns
    chunks = tl.cdiv(inner, order.CHUNK)
    words = load_words(weight[0], n_N, first, columns, inner, BK, len(FORMAT) == 4)
    c_C = first // order.CHUNK + tl.arange(0, BK // order.CHUNK)[None, :]
    place = weight[1] + c_C * columns + n_N[:, None]
    there = inside & (c_C < chunks)
    even = tl.load(place, mask=there, other=0)
    even_NW = widen.e2m1_scales(even.to(tl.uint32, bitcast=True), BN, BK, POWERS)
    odd_NW = even_NW
    if GROUP == 16:
        odd = tl.load(place + chunks * columns, mask=there, other=0)
        odd_NW = widen.e2m1_scales(odd.to(tl.uint32, bitcast=True), BN, BK, POWERS)
    return widen.e2m1(words, even_NW, odd_NW, BN, BK, FOURS)


@triton.jit
def words_step(
    acc, x_MK, weight, n_N, first, columns, inner,
    BK: tl.constexpr, FORMAT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """e2m1 codes in words, FORMAT as in `words_numbers`; `lifted` brings the sums to their size."""
    FOURS: tl.constexpr = order.fours(acc.shape[0])
    w_NK = words_numbers(weight, n_N, first, columns, inner, BK, FORMAT, FOURS)
    return added_told(x_MK, w_NK, acc, TURNED, FOURS)


@triton.jit
def lifted(acc, weight, n_N, columns, FORMAT: tl.constexpr, TURNED: tl.constexpr):
    """Sums of all steps at their size: numbers of e2m1 codes were 2^-32 of theirs (`order.LIFT`).

    ``weight`` may have scales of rows: they are multiplied here, codes by scales were exact.
    """
    if len(FORMAT) >= 3 and FORMAT[0] == "lifted":
        if len(weight) == 3:
            rows = load_float(weight[2] + n_N, n_N < columns) * order.LIFT
            acc *= along(rows, TURNED)
        else:
            acc *= order.LIFT
    return acc


@triton.jit
def ordered_scales(
    weight, n_N, first, columns, inner,
    BK: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scales of blocks of HIGH rows x WIDE, 0 for all: [N], or [N, BK] of narrow blocks."""
    BN: tl.constexpr = n_N.shape[0]
    across = tl.cdiv(inner, WIDE) if WIDE > 0 else 1
    high_N = n_N // HIGH if HIGH > 0 else n_N * 0
    if WIDE > 0 and WIDE < BK:
        g_G = first // WIDE + tl.arange(0, BK // WIDE)
        mask = (n_N[:, None] < columns) & (g_G[None, :] < across)
        found = load_scale(weight[1] + high_N[:, None] * across + g_G[None, :], mask)
        made = spread(found, BN, BK, WIDE)
    else:
        at = first // WIDE if WIDE > 0 else 0
        made = load_scale(weight[1] + high_N * across + at, (n_N < columns) & (first < inner))
    return made


@triton.jit
def ordered_values(
    weight, n_N, first, columns, inner, BK: tl.constexpr, FOURS: tl.constexpr
):  # fmt: skip
    """Float32 values [N, BK] of codes of a byte [N, K'] in order, without their scales."""
    whole = tl.cdiv(inner, order.BYTES) * order.BYTES
    k_K = first + tl.arange(0, BK)[None, :]
    place_NK = n_N[:, None].to(tl.int64) * whole + k_K
    mask = (n_N[:, None] < columns) & (k_K < whole)
    none = 0.0 if weight[0].dtype.element_ty.is_floating() else 0
    codes = tl.load(weight[0] + place_NK, mask=mask, other=none)
    return widen.bytes_in_order(codes, n_N.shape[0], BK, FOURS)


@triton.jit
def ordered_step(
    acc, x_MK, weight, n_N, first, columns, inner,
    BK: tl.constexpr, FORMAT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """e4m3 codes [N, K'] in order, a scale for each block of FORMAT = (rows, inner), 0 for all.

    Scales of whole steps multiply float32 sums: the product is exact up to them. Others multiply
    the numbers, which are then rounded to 16 bits.
    """
    # Read first: they come while codes are widened.
    FOURS: tl.constexpr = order.fours(acc.shape[0], FORMAT[1])
    scale = ordered_scales(weight, n_N, first, columns, inner, BK, FORMAT[0], FORMAT[1])
    value_NK = ordered_values(weight, n_N, first, columns, inner, BK, FOURS)
    if FORMAT[1] > 0 and FORMAT[1] < BK:
        acc = added_told(x_MK, (value_NK * scale).to(x_MK.dtype), acc, TURNED, FOURS)
    else:
        none = tl.zeros(acc.shape, tl.float32)
        part = product_told(x_MK, value_NK.to(x_MK.dtype), none, TURNED, FOURS)
        acc += part * along(scale, TURNED)
    return acc


@triton.jit
def step_scales(weight, n_N, first, columns, inner, BK: tl.constexpr, FORMAT: tl.constexpr):
    """Scales [N] of a whole step, FORMAT = (name, rows, inner): zeros past the inner dim."""
    return ordered_scales(weight, n_N, first, columns, inner, BK, FORMAT[1], FORMAT[2])


@triton.jit
def moved_words(weight, n_N, first, columns, inner, BK: tl.constexpr, WHOLE: tl.constexpr):
    """Words [N, BK / 4] of e4m3 codes: zeros past the inner dim."""
    across = tl.cdiv(inner, order.BYTES) * (order.BYTES // 4)
    w_W = first // 4 + tl.arange(0, BK // 4)[None, :]
    return load_rows(weight[0], n_N, across, w_W, columns, WHOLE)


@triton.jit
def moved_product(acc, x_MK, words, scale, TURNED: tl.constexpr):
    """Sums by words and scales that were read: the product is exact up to the scales."""
    BK: tl.constexpr = x_MK.shape[1]
    FOURS: tl.constexpr = order.fours(acc.shape[0])
    value_NK = widen.e4m3_words(words, words.shape[0], BK, FOURS).to(x_MK.dtype)
    part = product_told(x_MK, value_NK, tl.zeros(acc.shape, tl.float32), TURNED, FOURS)
    return acc + part * along(scale, TURNED)


@triton.jit
def moved_step(
    acc, x_MK, weight, n_N, first, columns, inner,
    BK: tl.constexpr, FORMAT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """e4m3 codes in words [N, K' / 4], scales of whole steps: they multiply float32 sums.

    FORMAT = ("moved", rows, inner): a block of a scale, 0 for all. One more, of any kind: steps are
    WHOLE, as `load_rows` has it.
    """
    # Read first: they come while codes are widened.
    scale = step_scales(weight, n_N, first, columns, inner, BK, FORMAT)
    words = moved_words(weight, n_N, first, columns, inner, BK, len(FORMAT) == 4)
    return moved_product(acc, x_MK, words, scale, TURNED)


@triton.jit
def counted_step(
    acc, x_MK, weight, n_N, first, columns, inner,
    BK: tl.constexpr, FORMAT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Integers in groups along K, in words or ordered bytes; scales, maybe offsets [groups, N].

    FORMAT = (group, least): the number that codes of 4 bits count from; None for bytes, which mean
    themselves.
    """
    BN: tl.constexpr = n_N.shape[0]
    GROUP: tl.constexpr = FORMAT[0]
    FOURS: tl.constexpr = order.fours(acc.shape[0], FORMAT[0])
    # Groups of a step, and what of each lies in it: a group may hold several steps.
    COUNT: tl.constexpr = BK // GROUP if BK > GROUP else 1
    SPAN: tl.constexpr = BK // COUNT
    g_G = first // GROUP + tl.arange(0, COUNT)[None, :]
    mask = (n_N[:, None] < columns) & (g_G < tl.cdiv(inner, GROUP))
    place = g_G * columns + n_N[:, None]
    scale = load_scale(weight[1] + place, mask)
    if FORMAT[1] is None:
        value_NK = ordered_values(weight, n_N, first, columns, inner, BK, FOURS)
        value_NK = value_NK * spread(scale, BN, BK, SPAN)
        if len(weight) == 3:
            value_NK += spread(load_scale(weight[2] + place, mask), BN, BK, SPAN)
    else:
        shift = scale * (FORMAT[1] - 128.0)
        if len(weight) == 3:
            shift += load_scale(weight[2] + place, mask)
        words = load_words(weight[0], n_N, first, columns, inner, BK)
        value_NK = widen.counts(words, BN, BK, FOURS) * spread(scale, BN, BK, SPAN)
        value_NK += spread(shift, BN, BK, SPAN)
    return added_told(x_MK, value_NK.to(x_MK.dtype), acc, TURNED, FOURS)
