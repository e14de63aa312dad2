"""Steps of a product for each way that a weight is stored: acc += x_MK @ w_NK.T.

M rows, N columns, K inner; ``weight`` is a tuple of pointers: codes, then scales and offsets.
With TURNED the sums are those of the transposed product, acc_NM += w_NK @ x_MK.T: matrix units take
64 rows of their first operand and any few columns of the second.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import functions


@triton.jit
def product(x_MK, w_NK, acc, TURNED: tl.constexpr):
    """The product of two tiles, added to sums."""
    if TURNED:
        acc = tl.dot(w_NK, tl.trans(x_MK), acc)
    else:
        acc = tl.dot(x_MK, tl.trans(w_NK), acc)
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
def fp8_step(
    acc, x_MK, weight, n_N, first, columns, inner,
    BK: tl.constexpr, FORMAT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """fp8 codes [N, K] with a scale for each block of FORMAT = (rows, inner), 0 for all.

    Codes are exact in 16 bits, and scales multiply float32 sums: the product is exact up to them.
    """
    k_K = first + tl.arange(0, BK)
    mask = (n_N[:, None] < columns) & (k_K[None, :] < inner)
    place = n_N[:, None].to(tl.int64) * inner + k_K[None, :]
    w_NK = tl.load(weight[0] + place, mask=mask, other=0.0)
    part = product(x_MK, w_NK.to(x_MK.dtype), tl.zeros(acc.shape, tl.float32), TURNED)
    row_N = n_N // FORMAT[0] if FORMAT[0] > 0 else n_N * 0
    across = tl.cdiv(inner, FORMAT[1]) if FORMAT[1] > 0 else 1
    at = first // FORMAT[1] if FORMAT[1] > 0 else 0
    scale_N = load_scale(weight[1] + row_N * across + at, n_N < columns)
    return acc + part * along(scale_N, TURNED)


@triton.jit
def e2m1_values(codes):
    """Float32 values of 4-bit codes: sign, two bits of exponent, one of mantissa."""
    wide = codes.to(tl.int32)
    exponent, mantissa = (wide >> 1) & 3, wide & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    bits = tl.where(exponent == 0, mantissa * 0x3F000000, normal)
    return (bits | ((wide & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def spread(per_group, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """[BN, BK // GROUP] -> [BN, BK], each number GROUP times."""
    wide = tl.broadcast_to(per_group[:, :, None], [BN, BK // GROUP, GROUP])
    return tl.reshape(wide, [BN, BK])


@triton.jit
def group_step(
    acc, x_MK, weight, n_N, first, columns, inner,
    BK: tl.constexpr, FORMAT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Codes in groups along K, each with a scale and maybe an offset.

    FORMAT = (kind, group, high, beside); kind: "bytes" for codes of one; "u4", "i4" or "f4e2m1" lie
    two in a byte, the even one in the low half; high: rows that share scales; beside: "offsets" of
    groups, scales of "rows", or "" for nothing. Scales of rows multiply float32 sums: narrow codes
    by narrow scales are exact in 16 bits.
    """
    BN: tl.constexpr = n_N.shape[0]
    GROUP: tl.constexpr = FORMAT[1]
    # Groups of a step, and what of each lies in it: a group may hold several steps.
    COUNT: tl.constexpr = BK // GROUP if BK > GROUP else 1
    SPAN: tl.constexpr = BK // COUNT
    groups = tl.cdiv(inner, GROUP)
    row_N = n_N[:, None].to(tl.int64)
    inside = n_N[:, None] < columns
    if FORMAT[0] == "bytes":
        k_K = first + tl.arange(0, BK)[None, :]
        value_NK = load_float(weight[0] + row_N * inner + k_K, inside & (k_K < inner))
    else:
        pair_K = first // 2 + tl.arange(0, BK // 2)[None, :]
        mask = inside & (pair_K * 2 < inner)
        bytes_ = tl.load(weight[0] + row_N * tl.cdiv(inner, 2) + pair_K, mask=mask, other=0)
        codes = tl.reshape(tl.join(bytes_ & 15, bytes_ >> 4), [BN, BK])
        if FORMAT[0] == "f4e2m1":
            value_NK = e2m1_values(codes)
        elif FORMAT[0] == "i4":
            value_NK = ((codes.to(tl.int32) ^ 8) - 8).to(tl.float32)
        else:
            value_NK = codes.to(tl.float32)
    g_G = first // GROUP + tl.arange(0, COUNT)[None, :]
    scale_mask = inside & (g_G < groups)
    high_N = row_N // FORMAT[2] if FORMAT[2] > 1 else row_N
    place = high_N * groups + g_G
    value_NK = value_NK * spread(load_scale(weight[1] + place, scale_mask), BN, BK, SPAN)
    if FORMAT[3] == "offsets":
        value_NK += spread(load_scale(weight[2] + place, scale_mask), BN, BK, SPAN)
    w_NK = value_NK.to(x_MK.dtype)
    if FORMAT[3] == "rows":
        part = product(x_MK, w_NK, tl.zeros(acc.shape, tl.float32), TURNED)
        acc += part * along(load_float(weight[2] + n_N, n_N < columns), TURNED)
    else:
        acc = product(x_MK, w_NK, acc, TURNED)
    return acc
