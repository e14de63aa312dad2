"""Codes of eight bits widened by moving bits: no conversion, all of a word at once."""

import triton
import triton.language as tl


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
