"""Rounding to fp8 codes, bit for bit as `ir.dtypes.quantize` does it: M rows, N columns."""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import functions

_TOP: tl.constexpr = tl.constexpr(448.0)  # largest e4m3 code
_REACH: tl.constexpr = tl.constexpr(464.0)  # half a step above it: what still rounds to it


@triton.jit
def scale_of(most):
    """Scale of numbers whose largest magnitude is ``most``: the nearest at which none saturates."""
    nearest = tl.div_rn(most, tl.full(most.shape, _TOP, tl.float32))
    above = (nearest.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(most > nearest * _REACH, above, nearest)


@triton.jit
def power_of(most):
    """Exponent + 127 of the least power of two at which numbers up to ``most`` do not saturate.

    Zeros take that of 1; what is too small for float32 takes the least one.
    """
    wanted = tl.div_rn(most, tl.full(most.shape, _TOP, tl.float32)).to(tl.int32, bitcast=True)
    exponent = (wanted >> 23) + ((wanted & 0x7FFFFF) != 0).to(tl.int32)
    exponent = tl.where(wanted <= 0x400000, 0, exponent)  # up to 2^-127, a subnormal number
    return tl.where(most == 0.0, 127, exponent).to(tl.uint8)


@triton.jit
def codes_of(x, scale):
    """e4m3 codes of numbers by their scales, which broadcast; those of scale 0 are zeros."""
    x, scale = tl.broadcast(x, tl.where(scale > 0.0, scale, 1.0))
    return tl.div_rn(x, scale).to(tl.float8e4nv)


@triton.jit
def round_rows(x):
    """Codes and scales [M, 1] of whole rows of a tile [M, N]."""
    scale = scale_of(tl.max(tl.abs(x), axis=1)[:, None])
    return codes_of(x, scale), scale


@triton.jit
def round_rows_to_powers(x):
    """Codes and exponents + 127 [M, 1] of whole rows of a tile [M, N]: scales are powers of two."""
    power = power_of(tl.max(tl.abs(x), axis=1)[:, None])
    return codes_of(x, functions.e8m0(power)), power


@triton.jit
def round_groups(x, GROUP: tl.constexpr):
    """Codes and scales [M, N / GROUP] of a tile [M, N], GROUP numbers of a row at a time."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    x_MGK = tl.reshape(x, [M, N // GROUP, GROUP])
    scale = scale_of(tl.max(tl.abs(x_MGK), axis=2))
    return tl.reshape(codes_of(x_MGK, scale[:, :, None]), [M, N]), scale
