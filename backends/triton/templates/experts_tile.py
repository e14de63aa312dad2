"""Products of some tokens by one expert's weights, in the formats that experts are kept in.

Weights lie [experts, outputs, inputs]. Formats: "plain" (of the activations' type), "e4m3" (codes
and a scale per block of HIGH outputs x WIDE inputs; 0: all), "ordered" (such codes in the order of
the layout ``triton.words``), "e2m1" (words of that layout, one scale per WIDE inputs: a power of
two, or e4m3 and one more for each output). With TURNED the outputs are the rows of the matrix
instruction, few tokens its columns, and codes are widened in its registers.
"""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import order, widen
from metainfer.backends.triton.templates.weight_tiles import added_told, along, product, spread


@triton.jit
def scale_value(scale, POWERS: tl.constexpr):
    """A block's scale in float32; powers of two are kept as their exponents (e8m0)."""
    value = scale.to(tl.float32)
    if POWERS:
        # Exponent 0 is 2^-127, which float32 holds as a subnormal.
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def load_scales(
    even, odd, at, stop, stride_scale, WIDE: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Scales of the block that inputs from ``at`` on lie in, [OUT].

    Where a block of outputs spans the tile (``ALIKE``) they are two numbers, of even outputs and
    of odd ones; else the second is the first again.
    """
    place = 0
    if WIDE > 0:
        place = at // WIDE
    found = tl.load(even + place * stride_scale, mask=at < stop, other=0)
    other = found
    if ALIKE:
        other = tl.load(odd + place * stride_scale, mask=at < stop, other=0)
    return found, other


@triton.jit
def load_e2m1(
    codes, scales, at, stride_scale, stride_half,
    OUT: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, POWERS: tl.constexpr,
    FOURS: tl.constexpr,
):  # fmt: skip
    """Weights [OUT, DEPTH] in bf16 of words, 2^-32 of what they mean (`order.LIFT`).

    Shapes: codes, scales: pointers to each output's words, [OUT].
    """
    words = tl.load(codes[:, None] + at // 8 + tl.arange(0, DEPTH // 8)[None, :])
    chunk = at // order.CHUNK + tl.arange(0, DEPTH // order.CHUNK)[None, :]
    place = scales[:, None] + chunk * stride_scale
    even = widen.e2m1_scales(tl.load(place).to(tl.uint32, bitcast=True), OUT, DEPTH, POWERS)
    odd = even
    if WIDE == 16:
        other = tl.load(place + stride_half)
        odd = widen.e2m1_scales(other.to(tl.uint32, bitcast=True), OUT, DEPTH, POWERS)
    return widen.e2m1(words.to(tl.uint32, bitcast=True), even, odd, OUT, DEPTH, FOURS)


@triton.jit
def scaled(
    part, scale, other, row_scales, there, at,
    OUT: tl.constexpr, POWERS: tl.constexpr, ALIKE: tl.constexpr, GROUP: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Sums of one step by the scales of its blocks, and by those of the tokens where GROUP > 0."""
    factor = scale_value(scale, POWERS)
    if ALIKE:
        is_odd = tl.arange(0, OUT) % 2 == 1
        factor = tl.where(is_odd, scale_value(other, POWERS), factor)
    part *= along(factor, TURNED)
    if GROUP > 0:
        part *= along(tl.load(row_scales + at // GROUP, mask=there, other=0.0), not TURNED)
    return part


@triton.jit
def add_product(
    acc, x, codes, scales, scale, other, row_scales, there, at, stop, stride_scale, stride_half,
    FORMAT: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
    POWERS: tl.constexpr, ALIKE: tl.constexpr, GROUP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """acc + x @ w.T for inputs ``at .. at + DEPTH``, which lie in one group of x's scales.

    Shapes: acc [rows, OUT], or [OUT, rows] TURNED, x [rows, DEPTH], codes and scales: pointers of
    each output, [OUT]; row_scales: of each row's first scale, [rows], read where GROUP > 0.
    """
    inner = at + tl.arange(0, DEPTH)
    FOURS: tl.constexpr = order.fours(acc.shape[0], WIDE)
    if FORMAT == "e2m1":
        w = load_e2m1(
            codes, scales, at, stride_scale, stride_half, OUT, DEPTH, WIDE, POWERS, FOURS
        )  # fmt: skip
        acc = added_told(x, w, acc, TURNED, FOURS)
    elif FORMAT == "plain":
        acc = product(x, tl.load(codes[:, None] + inner[None, :]), acc, TURNED)
    else:
        w = tl.load(codes[:, None] + inner[None, :])
        # Codes are exact in bf16; a scaled weight is not. Codes times codes take steps of 32 and
        # more: shorter ones are widened too.
        if GROUP >= 0 and DEPTH < 32:
            x = x.to(tl.bfloat16)
        if FORMAT == "ordered":
            w = widen.bytes_in_order(w, OUT, DEPTH, FOURS)
            x = widen.told(x, FOURS)
        if WIDE > 0 and WIDE < DEPTH:
            block = at // WIDE + tl.arange(0, DEPTH // WIDE)[None, :]
            near = tl.load(
                scales[:, None] + block * stride_scale, mask=block * WIDE < stop, other=0
            )
            near = scale_value(near, POWERS)
            w = w.to(tl.float32) * spread(near, OUT, DEPTH, WIDE)
            acc = added_told(x, w.to(x.dtype), acc, TURNED, False)  # told above, if at all
        else:
            part = product(x, w.to(x.dtype), tl.zeros(acc.shape, tl.float32), TURNED)
            acc += scaled(
                part, scale, other, row_scales, there, at, OUT, POWERS, ALIKE, GROUP, TURNED
            )  # fmt: skip
    return acc


@triton.jit
def multiply(
    rows, there, codes, even, odd, row_scales, first, stop, stride_scale, stride_half,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr,
    WIDE: tl.constexpr, POWERS: tl.constexpr, ALIKE: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """x @ w.T over inputs ``first .. stop``, [ROWS, OUT] in float32.

    The next step's scales of sums are read a step ahead: the pipeline of the loop leaves such small
    reads alone, and each would wait for memory. Shapes: rows: pointers [ROWS, DEPTH], codes:
    pointers of each output, [OUT]; even and odd: of its scales, [OUT], or single ones where
    ``ALIKE``; row_scales: of each row's first scale where x is codes: GROUP numbers share one, 0: a
    row. -1: x is plain numbers. RAGGED: the weight's rows are filled up past the inputs.
    """
    acc = tl.zeros([OUT, ROWS] if TURNED else [ROWS, OUT], tl.float32)
    IS_FP8: tl.constexpr = FORMAT == "ordered" or FORMAT == "e4m3"
    AHEAD: tl.constexpr = IS_FP8 and not (WIDE > 0 and WIDE < DEPTH)
    scale, other = 0, 0
    if AHEAD:
        scale, other = load_scales(even, odd, first, stop, stride_scale, WIDE, ALIKE)
    for at in tl.range(first, stop, DEPTH):
        next_scale, next_other = scale, other
        if AHEAD:
            next_scale, next_other = load_scales(
                even, odd, at + DEPTH, stop, stride_scale, WIDE, ALIKE
            )
        mask = there[:, None]
        if RAGGED:
            mask = mask & (at + tl.arange(0, DEPTH)[None, :] < stop)
        inputs = tl.load(rows + at, mask=mask, other=0.0)
        acc = add_product(
            acc, inputs, codes, even, scale, other, row_scales, there, at, stop, stride_scale,
            stride_half,
            FORMAT, OUT, DEPTH, WIDE, POWERS, ALIKE, GROUP, TURNED,
        )  # fmt: skip
        scale, other = next_scale, next_other
    if TURNED:
        acc = tl.trans(acc)
    if FORMAT == "e2m1":
        acc *= order.LIFT
    if GROUP == 0:
        acc *= tl.load(row_scales, mask=there, other=0.0)[:, None]
    return acc


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """The activation of an expert's gate."""
    value = gate
    if GELU:
        # tanh by one exponential; exp2 at infinity gives the right limits.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        value = gate * (1.0 - 1.0 / (1.0 + tl.exp2(2.8853900817779268 * inner)))
    else:
        value = gate / (1.0 + tl.exp2(-1.4426950408889634 * gate))
    return value
