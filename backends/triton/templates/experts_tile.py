"""Products of some tokens by one expert's weights, in the formats that experts are kept in.

Weights lie [experts, outputs, inputs]. Formats: "plain" (of the activations' type), "e4m3" (codes
and a scale per block of HIGH outputs x WIDE inputs; 0: all), "e2m1" (two codes a byte, the first
in the low half, one scale per WIDE inputs: a power of two, or e4m3 and one more for each output).
"""

import triton
import triton.language as tl


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
def e2m1_value(code):
    """The number that a 4-bit code stands for, in float32, by its own bits: exact."""
    code = code.to(tl.int32)
    # Exponent and mantissa land where float32 keeps them, with its bias 126 higher.
    small = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return tl.where((code & 8) != 0, -small, small)


@triton.jit
def unpack_e2m1(
    codes, scales,
    OUT: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """Values [OUT, DEPTH] in float32 of bytes [OUT, DEPTH / 2] and scales [OUT, DEPTH / WIDE]."""
    values = tl.join(e2m1_value(codes & 15), e2m1_value(codes >> 4))
    values = tl.reshape(values, (OUT, DEPTH // WIDE, WIDE))
    return tl.reshape(values * scale_value(scales, POWERS)[:, :, None], (OUT, DEPTH))


@triton.jit
def load_scales(
    even, odd, at, stop, stride_scale,
    FORMAT: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, POWERS: tl.constexpr,
    ALIKE: tl.constexpr,
):  # fmt: skip
    """Scales of inputs ``at .. at + DEPTH``: [OUT], or [OUT, DEPTH / WIDE] in "e2m1".

    Where a block of outputs spans the tile (``ALIKE``) they are two numbers, of even outputs and
    of odd ones; else the second is the first again.
    """
    if FORMAT == "e2m1":
        block = at // WIDE + tl.arange(0, DEPTH // WIDE)
        none = 0 if POWERS else 0.0
        found = tl.load(even[:, None] + block[None, :], mask=at < stop, other=none)
        other = found
    else:
        place = 0
        if WIDE > 0:
            place = at // WIDE
        found = tl.load(even + place * stride_scale, mask=at < stop, other=0)
        other = found
        if ALIKE:
            other = tl.load(odd + place * stride_scale, mask=at < stop, other=0)
    return found, other


@triton.jit
def add_product(
    acc, x, codes, scale, other, row_scales, there, at,
    FORMAT: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
    POWERS: tl.constexpr, ALIKE: tl.constexpr, NATIVE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """acc + x @ w.T for inputs ``at .. at + DEPTH``, which lie in one group of x's scales.

    Shapes: acc [rows, OUT], x [rows, DEPTH], codes: pointers of each output, [OUT]; row_scales: of
    each row's first scale, [rows], read where GROUP > 0.
    """
    if FORMAT == "e2m1":
        byte = at // 2 + tl.arange(0, DEPTH // 2)
        w = tl.load(codes[:, None] + byte[None, :])
        if NATIVE:
            acc = tl.dot_scaled(x, None, "bf16", tl.trans(w), scale, "e2m1", acc, fast_math=True)
        else:
            values = unpack_e2m1(w, scale, OUT, DEPTH, WIDE, POWERS)
            acc = tl.dot(x, tl.trans(values.to(x.dtype)), acc)
    else:
        inner = at + tl.arange(0, DEPTH)
        w = tl.load(codes[:, None] + inner[None, :])
        if FORMAT == "e4m3":
            # Codes are exact in bf16; a scaled weight would not be. Codes times codes take steps of
            # 32 and more: shorter ones are widened too.
            if GROUP >= 0 and DEPTH < 32:
                x = x.to(tl.bfloat16)
            factor = scale_value(scale, POWERS)
            if ALIKE:
                is_odd = tl.arange(0, OUT) % 2 == 1
                factor = tl.where(is_odd, scale_value(other, POWERS), factor)
            part = tl.dot(x, tl.trans(w.to(x.dtype))) * factor[None, :]
            if GROUP > 0:
                part *= tl.load(row_scales + at // GROUP, mask=there, other=0.0)[:, None]
            acc += part
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def multiply(
    rows, there, codes, even, odd, row_scales, first, stop, stride_scale,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr,
    WIDE: tl.constexpr, POWERS: tl.constexpr, ALIKE: tl.constexpr, NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """x @ w.T over inputs ``first .. stop``, [ROWS, OUT] in float32.

    The next step's scales are read a step ahead: the pipeline of the loop leaves such small reads
    alone, and each would wait for memory. Shapes: rows: pointers [ROWS, DEPTH], codes: pointers of
    each output, [OUT]; even and odd: of its scales, [OUT], or single ones where ``ALIKE``;
    row_scales: of each row's first scale where x is codes: GROUP numbers share one, 0: a row. -1:
    x is plain numbers.
    """
    acc = tl.zeros([ROWS, OUT], tl.float32)
    scale, other = 0, 0
    if FORMAT != "plain":
        scale, other = load_scales(
            even, odd, first, stop, stride_scale, FORMAT, DEPTH, WIDE, POWERS, ALIKE
        )  # fmt: skip
    for at in tl.range(first, stop, DEPTH):
        next_scale, next_other = scale, other
        if FORMAT != "plain":
            next_scale, next_other = load_scales(
                even, odd, at + DEPTH, stop, stride_scale, FORMAT, DEPTH, WIDE, POWERS, ALIKE
            )  # fmt: skip
        inputs = tl.load(rows + at, mask=there[:, None], other=0.0)
        acc = add_product(
            acc, inputs, codes, scale, other, row_scales, there, at,
            FORMAT, OUT, DEPTH, WIDE, POWERS, ALIKE, NATIVE, GROUP,
        )  # fmt: skip
        scale, other = next_scale, next_other
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
