"""Numbers as they go over a wire: e4m3 codes of a row, then a float32 scale for each GROUP of them.

A row of ``part`` numbers is part + 4 * part / GROUP bytes. Rounding is that of `rounding`.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import rounding


@triton.jit
def _store_coded(
    x_GK, codes, scales, row, g_G, part, GROUP: tl.constexpr
):  # fmt: skip
    """Round groups of numbers [G, GROUP] of a row and store them behind each other."""
    groups = part // GROUP
    stride = part + 4 * groups
    scale_G = rounding.scale_of(tl.max(tl.abs(x_GK), axis=1))
    made = rounding.codes_of(x_GK, scale_G[:, None])
    inside = g_G < groups
    at = row * stride + g_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes + at, made, mask=inside[:, None])
    tl.store(scales + (row * stride + part) // 4 + g_G, scale_G, mask=inside)


@triton.jit
def _load_decoded(codes, scales, row, g_G, part, GROUP: tl.constexpr):
    """Groups of a row as they were before, in float32 [G, GROUP]; zeros past its end."""
    groups = part // GROUP
    stride = part + 4 * groups
    inside = g_G < groups
    at = row * stride + g_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    found = tl.load(codes + at, mask=inside[:, None], other=0.0).to(tl.float32)
    scale_G = tl.load(scales + (row * stride + part) // 4 + g_G, mask=inside, other=0.0)
    return found * scale_G[:, None]


@triton.jit
def encode(
    x, codes, scales, count, part, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Rows of ``part`` of x's ``count`` numbers, zeros behind them. Shapes: x [count]."""
    row = tl.program_id(1).to(tl.int64)
    g_G = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    in_row = g_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = row * part + in_row
    x_GK = tl.load(x + at, mask=(in_row < part) & (at < count), other=0.0).to(tl.float32)
    _store_coded(x_GK, codes, scales, row, g_G, part, GROUP)


@triton.jit
def add(
    codes, scales, sum_codes, sum_scales, part,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One row: the sum of ROWS rows, added up in their order."""
    g_G = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    first = tl.program_id(0).to(tl.int64) * 0
    acc = _load_decoded(codes, scales, first, g_G, part, GROUP)
    for row in tl.static_range(1, ROWS):
        acc += _load_decoded(codes, scales, first + row, g_G, part, GROUP)
    _store_coded(acc, sum_codes, sum_scales, first, g_G, part, GROUP)


@triton.jit
def decode(
    codes, scales, out, count, part, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The numbers of all rows, as many as out has. Shapes: out [count]."""
    row = tl.program_id(1).to(tl.int64)
    g_G = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    in_row = g_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = row * part + in_row
    made = _load_decoded(codes, scales, row, g_G, part, GROUP)
    tl.store(out + at, made.to(out.dtype.element_ty), mask=(in_row < part) & (at < count))
