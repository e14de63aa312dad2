"""Functions of float32 that Triton's language lacks, for emitted code and epilogues."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Hyperbolic tangent; by its series near 0, where the quotient cancels."""
    t = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, t - 1.0, 1.0 - t) / (1.0 + t)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, far)


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu_erf(x):
    """Gaussian error linear unit, exact."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """Gaussian error linear unit by tanh."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def round_f8e4m3(x):
    """Round to e4m3; what it cannot hold is NaN, where the instruction saturates."""
    held = x.to(tl.float8e4nv).to(tl.float32)
    return tl.where(tl.abs(x) <= 464.0, held, float("nan"))


@triton.jit
def round_f8e5m2(x):
    """Round to e5m2; what it cannot hold is infinite, where the instruction saturates."""
    held = x.to(tl.float8e5).to(tl.float32)
    over = tl.where(x < 0, float("-inf"), float("inf"))
    return tl.where(tl.abs(x) >= 61440.0, over, held)


@triton.jit
def e8m0(bits):
    """Powers of two 2**(bits - 127) from their bytes; 255 is NaN, 0 is the subnormal 2**-127."""
    wide = bits.to(tl.int32)
    value = tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)
    return tl.where(wide == 255, float("nan"), value)


# The rank of -inf: every other number's is higher.
LOWEST_RANK: tl.constexpr = tl.constexpr(-2139095041)


@triton.jit
def ranked(x):
    """Whole numbers ordered as floats are, both zeros alike; NaN has no place in the order."""
    bits = (x.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unranked(rank):
    """The floats of such whole numbers."""
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def partners(x):
    """Numbers 1, 0, 3, 2, ... of each row [R, C]."""
    first, second = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return tl.reshape(tl.join(second, first), [x.shape[0], x.shape[1]])


@triton.jit
def twice(x):
    """Each number of a row two times, side by side: [R, C] -> [R, 2 C]."""
    return tl.reshape(tl.join(x, x), [x.shape[0], 2 * x.shape[1]])
