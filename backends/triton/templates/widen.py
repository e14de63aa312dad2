"""Widening of codes to 16 bits in the registers that a matrix instruction reads them from.

Weights lie as the layout ``triton.words`` orders them: a thread reads 16 bytes that are its own
share of some steps of the matrix instruction, so that codes go from memory to registers and need no
exchange between threads after they were widened. N rows of the weight, K inner.

NOTE: what is built from indices (`tl.arange`) would be an obstacle for that: Triton moves the
change of layout up to the load over joins, reshapes and arithmetic only.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import order


@triton.jit
def _multiply_pairs(a, b):
    """Products of two numbers of bf16 in 32 bits by two others, none of which needs rounding."""
    if order.IS_INTERPRETED:
        high: tl.constexpr = 0xFFFF0000
        left = (a << 16).to(tl.float32, bitcast=True) * (b << 16).to(tl.float32, bitcast=True)
        right = (a & high).to(tl.float32, bitcast=True) * (b & high).to(tl.float32, bitcast=True)
        low = left.to(tl.uint32, bitcast=True) >> 16
        return low | (right.to(tl.uint32, bitcast=True) & high)
    # Plus -0, which changes nothing: a multiplication alone is for sm_90 and later.
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, 0x80008000], dtype=tl.uint32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _taken_apart(pair):
    """The two numbers of bf16 in 32 bits, side by side."""
    low = pair.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True))


@triton.jit
def _in_order(a, b, c, d, BN: tl.constexpr, BK: tl.constexpr, FOURS: tl.constexpr):
    """Numbers [BN, BK] in the order of the matrix instruction, of the four pairs of words.

    FOURS: as `told` has it. Shapes: each [BN, BK / 8, 2].
    """
    made = tl.join(tl.join(a, b), tl.join(c, d))
    # Row, chunk, thread, word of it, half, pairs.
    made = tl.reshape(made, [BN, BK // order.CHUNK, 4, 4, 2, 2, 2])
    if FOURS:
        made = tl.permute(made, (0, 1, 3, 6, 2, 5, 4))
    else:
        made = tl.permute(made, (0, 1, 3, 6, 5, 2, 4))
    return tl.reshape(made, [BN, BK])


@triton.jit
def told(x_MK, FOURS: tl.constexpr):
    """Numbers [M, K] in the order in which widened codes are told to their product.

    FOURS: each 16 of a row by the threads that hold them, four numbers each (`order.fours`); else
    as they lie.
    """
    if FOURS:
        M: tl.constexpr = x_MK.shape[0]
        K: tl.constexpr = x_MK.shape[1]
        parts = tl.permute(tl.reshape(x_MK, [M, K // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
        x_MK = tl.reshape(parts, [M, K])
    return x_MK


@triton.jit
def e2m1(words_NW, even_NW, odd_NW, BN: tl.constexpr, BK: tl.constexpr, FOURS: tl.constexpr):
    """Numbers of bf16 [BN, BK] of words of eight codes each, by scales of their halves.

    Two bits of exponent and one of mantissa, put where bf16 has its lowest ones, are 2^-126 of what
    they mean, zero and the subnormal code included: the scale, 2^126 times as large, does the rest.
    Of each half of a word the bits of three codes lie at one distance from their places, around
    the word; those of the fourth fill what is left, and one multiplication moves them by 2, 7 and
    12: no two bits of it meet.

    Shapes: words u32 [BN, BK / 8]; even, odd: pairs of equal numbers of bf16 in 32 bits, likewise:
    scales of a word's first and last four codes. FOURS: as `told` has it.
    """
    places: tl.constexpr = 0x81C081C0
    a = _multiply_pairs(words_NW & places, even_NW)
    b = _multiply_pairs(((words_NW >> 6) | (words_NW << 26)) & places, even_NW)
    c = _multiply_pairs(((words_NW >> 3) | (words_NW << 29)) & places, odd_NW)
    # What is moved past the word is meant to be lost, in debugging, too.
    moved = tl.mul(words_NW & 0x001B001B, 0x1084, sanitize_overflow=False)
    d = _multiply_pairs(moved & places, odd_NW)
    return _in_order(
        _taken_apart(a), _taken_apart(b), _taken_apart(c), _taken_apart(d), BN, BK, FOURS
    )


@triton.jit
def _floats(pair):
    """The two numbers of bf16 in 32 bits, side by side, in float32."""
    high: tl.constexpr = 0xFFFF0000
    low = (pair << 16).to(tl.float32, bitcast=True)
    return tl.join(low, (pair & high).to(tl.float32, bitcast=True))


@triton.jit
def _counted(words_NW, PAIR: tl.constexpr):
    """128 more than the two codes of a pair, in float32: bf16 has seven bits behind the point."""
    return _floats(((words_NW >> (4 * PAIR)) & 0x000F000F) | 0x43004300)


@triton.jit
def counts(words_NW, BN: tl.constexpr, BK: tl.constexpr, FOURS: tl.constexpr):
    """128 more than integers of 4 bits, in float32 [BN, BK], of words [BN, BK / 8] of them."""
    return _in_order(
        _counted(words_NW, 0), _counted(words_NW, 1), _counted(words_NW, 2),
        _counted(words_NW, 3), BN, BK, FOURS,
    )  # fmt: skip


@triton.jit
def _scale_pair(word, PLACE: tl.constexpr, POWERS: tl.constexpr):
    """A scale of four in a word, 2^94 times as large, as two equal numbers of bf16."""
    byte = (word >> (8 * PLACE)) & 255
    # Either by one multiplication and addition: e8m0 is an exponent; five bits of exponent and
    # three of mantissa, as the layout keeps scales of NVFP4, lie four bits from their place.
    return byte * 0x00800080 + 0x2F002F00 if POWERS else byte * 0x00100010 + 0x69806980


@triton.jit
def e2m1_scales(word_NC, BN: tl.constexpr, BK: tl.constexpr, POWERS: tl.constexpr):
    """Scales for `e2m1`, [BN, BK / 8], of words of four scales: [BN, BK / 128]."""
    near = tl.join(_scale_pair(word_NC, 0, POWERS), _scale_pair(word_NC, 2, POWERS))
    far = tl.join(_scale_pair(word_NC, 1, POWERS), _scale_pair(word_NC, 3, POWERS))
    made = tl.reshape(tl.join(near, far), [BN, BK // order.CHUNK, 1, 4])
    return tl.reshape(tl.broadcast_to(made, [BN, BK // order.CHUNK, 4, 4]), [BN, BK // 8])


@triton.jit
def bytes_in_order(codes_NK, BN: tl.constexpr, BK: tl.constexpr, FOURS: tl.constexpr):
    """Float32 values [BN, BK] of codes of a byte as the layout orders them."""
    # Row, chunk, thread, steps, pairs of each, halves.
    made = tl.reshape(codes_NK, [BN, BK // order.BYTES, 4, 4, 2, 2])
    if FOURS:
        made = tl.permute(made, (0, 1, 3, 2, 4, 5))
    else:
        made = tl.permute(made, (0, 1, 3, 4, 2, 5))
    return tl.reshape(made, [BN, BK]).to(tl.float32)


@triton.jit
def _e4m3_pairs(words_NW):
    """Pairs of numbers of bf16 in 32 bits: the first and the second ones of words of e4m3 codes.

    Exponent and mantissa put where bf16 has its lowest bits are 2^-120 of what they mean, zero and
    subnormal codes included. Of each half of a word the first code lies in its place; the bits of
    the second one fill what is left.
    """
    lift = tl.full(words_NW.shape, 0x7B807B80, tl.uint32)  # 2^120, twice
    a = _multiply_pairs(words_NW & 0x87F087F0, lift)
    far = ((words_NW << 4) & 0x80F080F0) | ((words_NW >> 4) & 0x07000700)
    return a, _multiply_pairs(far, lift)


@triton.jit
def _e4m3_in_order(a, b, BN: tl.constexpr, BK: tl.constexpr, FOURS: tl.constexpr):
    """Numbers [BN, BK] in the order of the matrix instruction, of both pairs [BN, BK / 4, 2]."""
    # Row, chunk, thread, word of it, half, pair.
    made = tl.reshape(tl.join(a, b), [BN, BK // order.BYTES, 4, 4, 2, 2])
    if FOURS:
        made = tl.permute(made, (0, 1, 3, 2, 5, 4))
    else:
        made = tl.permute(made, (0, 1, 3, 5, 2, 4))
    return tl.reshape(made, [BN, BK])


@triton.jit
def e4m3_words(words_NW, BN: tl.constexpr, BK: tl.constexpr, FOURS: tl.constexpr):
    """Numbers of bf16 [BN, BK] of words u32 [BN, BK / 4] of four e4m3 codes each."""
    a, b = _e4m3_pairs(words_NW)
    return _e4m3_in_order(_taken_apart(a), _taken_apart(b), BN, BK, FOURS)


@triton.jit
def e4m3_floats(words_NW, BN: tl.constexpr, BK: tl.constexpr):
    """As `e4m3_words`, in float32, as they lie: for scales that multiply numbers."""
    a, b = _e4m3_pairs(words_NW)
    return _e4m3_in_order(_floats(a), _floats(b), BN, BK, False)


@triton.jit
def e4m3(words):
    """Four e4m3 codes of each word in f16, times 2^-8: exact, subnormal ones too; NaN is 1.875.

    The lowest byte comes first. Shapes: words u32 or i32 [N, K] -> f16 [N, 4 * K].
    """
    w = words.to(tl.uint32, bitcast=True)
    # Exponent and mantissa lie side by side in both; f16 has one more bit of exponent.
    even = ((w << 7) & 0x3F803F80) | ((w << 8) & 0x80008000)
    odd = ((w >> 1) & 0x3F803F80) | (w & 0x80008000)
    pairs = tl.join(
        tl.join(low_half(even), high_half(even)), tl.join(low_half(odd), high_half(odd))
    )
    return tl.reshape(pairs, (words.shape[0], words.shape[1] * 4))


@triton.jit
def low_half(words):
    """The lower 16 bits as f16."""
    return words.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def high_half(words):
    """The higher 16 bits as f16."""
    return (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
