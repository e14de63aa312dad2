"""Every code of the fp8, MXFP4 and NVFP4 formats, against the formats' own definitions."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metainfer.ir.dtypes import (
    FP8_BLOCK,
    FP8_BLOCK_32,
    FP8_BLOCK_UE8M0,
    FP8_GROUP,
    FP8_GROUP_UE8M0,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    NVFP4,
    Block,
    BlockArray,
    parse_dtype,
    quantize,
)
from metainfer.ir.errors import TypeMismatch

FP8 = {
    "f8e4m3/tensor:f32": FP8_TENSOR,
    "f8e4m3/row:f32": FP8_ROW,
    "f8e4m3/128x128:f32": FP8_BLOCK,
    "f8e4m3/32x32:f32": FP8_BLOCK_32,
    "f8e4m3/128:f32": FP8_GROUP,
    "f8e4m3/128x128:f8e8m0": FP8_BLOCK_UE8M0,
    "f8e4m3/128:f8e8m0": FP8_GROUP_UE8M0,
}


def e4m3(code: int) -> float:
    """OCP OFP8 E4M3: bias 7, no infinities, one NaN a sign."""
    sign, exponent, mantissa = (-1.0) ** (code >> 7), code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(code: int) -> float:
    """OCP MX E2M1: bias 1, all sixteen are numbers."""
    sign, exponent, mantissa = (-1.0) ** (code >> 3), code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e8m0(code: int) -> float:
    """OCP MX E8M0: a power of two from 2^-127 to 2^127, 255 is NaN."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bit for bit in float32, any NaN like any other."""
    wide = wanted.astype(np.float32)
    numbers = ~np.isnan(wide)
    equal = np.array_equal(found[numbers].view(np.uint32), wide[numbers].view(np.uint32))
    return equal and np.array_equal(np.isnan(found), ~numbers)


@pytest.mark.parametrize("text", FP8)
def test_names_and_text(text: str) -> None:
    assert parse_dtype(text) == FP8[text]
    assert str(FP8[text]) == text


def test_blocks_of_one_row_have_one_form() -> None:
    assert parse_dtype("f8e4m3/1x128:f32") == FP8_GROUP
    assert Block(FP8_ROW.element, (1, 0), FP8_ROW.scale) == FP8_ROW
    for block in ((128, 0), (0, 128), (), (-1,), (0, 0, 0)):
        with pytest.raises(TypeMismatch, match="blocks of"):
            Block(FP8_ROW.element, block, FP8_ROW.scale)


def test_sizes() -> None:
    assert FP8_TENSOR.scale_shape((3, 5, 7)) == (3, 1, 1)
    assert FP8_BLOCK.scale_shape((3, 129, 256)) == (3, 2, 2)
    assert FP8_GROUP.scale_shape((129, 256)) == (129, 2)
    assert FP8_TENSOR.size_bytes((4, 64)) == 4 * 64 + 4
    with pytest.raises(TypeMismatch, match="needs at least 2 dims"):
        FP8_TENSOR.scale_shape((5,))


@pytest.mark.parametrize("text", FP8)
@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-127, 2.0**100, 1.7])
def test_all_fp8_codes(text: str, scale: float) -> None:
    format = FP8[text]
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 128)
    scales = np.full(format.scale_shape((2, 128)), scale, np.float32).astype(format.scale.numpy)
    exact = np.array([e4m3(c) for c in range(256)]).reshape(2, 128)
    assert same(codes.astype(np.float32), exact)
    wide = scales.astype(np.float64).flat[0]
    assert same(BlockArray(format, codes, scales).dequantize(), exact * wide)


def test_all_mxfp4_codes_by_all_scales() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2)).view(ml_dtypes.float4_e2m1fn)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)[:, None]
    exact = np.outer([e8m0(c) for c in range(256)], [e2m1(c) for c in range(16)] * 2)
    assert same(codes.astype(np.float32)[0], exact[127])
    with np.errstate(over="ignore"):
        wanted = exact.astype(np.float32)
    # Codes from 2 at scale 2^127 and from 4 at 2^126 are beyond float32.
    assert np.isinf(wanted).sum() == 2 * (8 + 4)
    assert same(BlockArray(MXFP4, codes, scales).dequantize(), wanted)


def test_all_nvfp4_codes_by_all_scales() -> None:
    """The product with a group's scale is exact in 16 bits; that with the row's is rounded once."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1)).view(ml_dtypes.float4_e2m1fn)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[:, None]
    exact = np.outer([e4m3(c) for c in range(256)], [e2m1(c) for c in range(16)])
    for narrow in (np.float16, ml_dtypes.bfloat16):
        assert same(exact.astype(narrow).astype(np.float32), exact)
    rows = np.linspace(1e-3, 2, 256, dtype=np.float32)[:, None]
    found = BlockArray(NVFP4, codes, scales, None, rows).dequantize()
    assert same(found, (exact * rows.astype(np.float64)))
    assert NVFP4.size_bytes((3, 32)) == 3 * (16 + 2 + 4)


def test_nvfp4_rounds_each_row_by_its_own_scale() -> None:
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    x[1] *= 2.0**20
    x[2] = 0
    made = quantize(x, NVFP4)
    assert made.row_scales is not None
    reached = made.scales.astype(np.float32).max(axis=1)
    assert reached.tolist() == [448, 448, 0]
    assert np.array_equal(made.dequantize()[2], x[2])
    alone = quantize(x[:1], NVFP4)
    assert np.array_equal(made.dequantize()[:1], alone.dequantize())
    # Each number within half a step of the largest code of its group, and the scale's own rounding.
    most = np.abs(x).reshape(3, 4, 16).max(axis=-1).repeat(16, axis=1)
    assert np.all(np.abs(made.dequantize() - x) <= most / 6 * (1 + 1 / 16))


def test_second_scales_are_those_of_groups_in_rows() -> None:
    assert parse_dtype("f4e2m1/16:f8e4m3*f32") == NVFP4
    for text in ("f8e4m3/row:f32*f32", "f4e2m1/4x4:f32*f32", "u4/32:f16+f16*f32"):
        with pytest.raises(TypeMismatch, match="scales of rows beside those of blocks"):
            parse_dtype(text)


@pytest.mark.parametrize("element", ["f8e4m3", "f4e2m1"])
def test_codes_are_the_nearest_with_ties_to_even(element: str) -> None:
    """At scale 1, every midpoint of two codes and its neighbours."""
    decode, count = (e4m3, 127) if element == "f8e4m3" else (e2m1, 8)
    values = np.array([decode(c) for c in range(count)])
    middles = (values[1:] + values[:-1]) / 2
    below = np.nextafter(middles.astype(np.float32), np.float32(0))
    above = np.nextafter(middles.astype(np.float32), np.float32(1e9))
    even = values[np.arange(1, count) // 2 * 2]
    x = np.concatenate([values, middles, below, above, [values[-1]]])
    x = np.concatenate([x, -x]).astype(np.float32)
    wanted = np.concatenate([values, even, values[:-1], values[1:], [values[-1]]])
    made = quantize(x, parse_dtype(f"{element}/row:f32"))  # type: ignore[arg-type]
    assert made.scales.tolist() == [1.0]
    assert np.array_equal(made.dequantize(), np.concatenate([wanted, -wanted]).astype(np.float32))


# Fault: a scale one binade too small for many maxima, so that large values saturate.
MAXIMA = [1.2, 2.7, 5.5, 6.0, 6.01, 448.0, 449.0, 0.0, 1e-40, 1e-45, 1.6e38]


@pytest.mark.parametrize("text", ["f4e2m1/32:f8e8m0", "f8e4m3/128:f8e8m0", "f8e4m3/128:f32"])
@pytest.mark.parametrize("most", MAXIMA)
def test_scales_reach_the_largest_value(text: str, most: float) -> None:
    format = parse_dtype(text)
    assert isinstance(format, Block)
    x = (most * np.linspace(-1, 1, format.block[0])).astype(np.float32)[None]
    made = quantize(x, format)
    scale = made.scales.astype(np.float64)[0, 0]
    decode, count = (e2m1, 8) if format == MXFP4 else (e4m3, 127)
    codes = np.array([decode(c) for c in range(count)])
    top = codes[-1]
    if format.scale.name == "f8e8m0":
        assert most <= top * scale or most == 0.0
        assert most > top * scale / 2 or scale in (1.0, 2.0**-127)
    # A zero scale is that of a block of zeros, or of one whose scale is below every float32.
    ratio = np.abs(x.astype(np.float64)) / scale if scale else np.zeros(x.shape)
    at = np.clip(np.searchsorted(codes, ratio), 1, count - 1)
    half_ulp = (codes[at] - codes[at - 1]) / 2 * scale
    slack = 2.0**-22 * np.abs(x) + (2.0**-149 * 448 if most < 1e-37 else 0.0)
    assert np.all(np.abs(made.dequantize() - x) <= half_ulp + slack)


@settings(deadline=None)
@given(
    x=hnp.arrays(np.float32, (3, 64), elements=st.floats(-1e4, 1e4, width=32)),
    text=st.sampled_from([*FP8, "f4e2m1/32:f8e8m0"]),
)
def test_what_was_rounded_stays(x: np.ndarray, text: str) -> None:
    """Values of a format with power-of-two scales are rounded to themselves."""
    format = parse_dtype(text)
    assert isinstance(format, Block)
    once = quantize(x, format).dequantize()
    again = quantize(once, format).dequantize()
    if format.scale.name == "f8e8m0":
        assert np.array_equal(once, again)
    np.testing.assert_allclose(again, once, rtol=2**-22, atol=1e-40)


# --- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["f8e4m3/4x8:f32", "f8e4m3/row:f32", "f8e4m3/tensor:f32",
                                  "u4/8:f16+f16", "f4e2m1/8:f8e4m3*f32"])  # fmt: skip
def test_parts_between_blocks(text: str) -> None:
    format = parse_dtype(text)
    assert isinstance(format, Block)
    whole = quantize(np.random.default_rng(3).standard_normal((2, 10, 20)), format)
    wanted = whole.dequantize()
    for dim, start, stop in (
        (0, 1, 2),
        (1, 4, 8),
        (1, 8, 10),
        (2, 8, 16),
        (2, 16, 20),
        (1, 4, 6),
        (1, 4, 4),
    ):
        part = whole.part(dim, start, stop)
        assert part.scales.shape == format.scale_shape(part.shape) or start == stop
        np.testing.assert_array_equal(part.dequantize(), wanted.take(range(start, stop), axis=dim))


@pytest.mark.parametrize(("dim", "start", "stop"), [(1, 2, 8), (1, 9, 10), (2, 4, 20)])
def test_parts_that_begin_inside_a_block_are_refused(dim: int, start: int, stop: int) -> None:
    format = parse_dtype("f8e4m3/4x8:f32")
    assert isinstance(format, Block)
    whole = quantize(np.ones((2, 10, 20), np.float32), format)
    with pytest.raises(TypeMismatch, match="begin inside a block of") as refused:
        whole.part(dim, start, stop)
    assert "refine_scales" in refused.value.advice
