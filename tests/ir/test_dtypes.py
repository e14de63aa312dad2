"""Element types: text, storage, and rounding to block formats."""

import itertools
import math

import numpy as np
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metainfer.ir import dtypes
from metainfer.ir.dtypes import (
    FP8_BLOCK,
    GGUF_FORMATS,
    MXFP4,
    MXFP8,
    NVFP4,
    SCALAR_NAMES,
    Block,
    DType,
    Scalar,
    parse_dtype,
    quantize,
)
from metainfer.ir.errors import TypeMismatch

FORMATS = [
    "i8/32:f16",
    "i4/32:f16",
    "u4/32:f16+f16",
    "u4/32:f32+f32",
    "u8/16:bf16+bf16",
    "i8/16:f32",
    "i8/row:f32",
    "i8/32:f8e4m3",
    "f8e4m3/32:f8e8m0",
    "f4e2m1/32:f8e8m0",
    "f4e2m1/16:f8e4m3",
    "f8e5m2/row:f16",
    "f8e4m3/4x4:f32",
    "i8/2x8:f16",
]


def block(text: str) -> Block:
    found = parse_dtype(text)
    assert isinstance(found, Block)
    return found


def codes_of(element: Scalar) -> np.ndarray:
    """Every code that rounding may choose, ascending, as float32."""
    if element.kind == "uint":
        return np.arange(2**element.bits, dtype=np.float32)
    if element.kind == "int":
        top = 2 ** (element.bits - 1) - 1
        return np.arange(-top, top + 1, dtype=np.float32)
    # One byte holds a code of any of these formats, 4-bit ones use its low half.
    patterns = np.arange(2**element.bits, dtype=np.uint8).view(element.numpy)
    values = patterns.astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def half_steps(ratio: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Half the distance of the codes that enclose each ratio; of the last two beyond the ends."""
    at = np.clip(np.searchsorted(codes, ratio), 1, len(codes) - 1)
    return (codes[at] - codes[at - 1]) / 2


@given(strategies.dtypes())
def test_text_reads_back_equal(dtype: DType) -> None:
    assert parse_dtype(str(dtype)) == dtype
    assert dtype.name == str(dtype)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("f33", "unknown element type 'f33'"),
        ("i8/0:f16", "a block of extent 0"),
        ("i8/32:q", "unknown element type 'q' in 'i8/32:q'"),
        ("i8/32", "unknown element type"),
        ("", "unknown element type"),
    ],
)
def test_bad_text_is_refused(text: str, what: str) -> None:
    with pytest.raises(TypeMismatch) as refused:
        parse_dtype(text)
    assert what in refused.value.what


@pytest.mark.parametrize("name", SCALAR_NAMES)
def test_a_scalar_is_as_wide_as_its_storage(name: str) -> None:
    scalar = parse_dtype(name)
    assert isinstance(scalar, Scalar)
    assert max(scalar.bits, 8) == scalar.numpy.itemsize * 8
    assert scalar.size_bytes((3, 5)) == math.ceil(15 * scalar.bits / 8)


@pytest.mark.parametrize(
    ("text", "shape", "size"),
    [
        ("i8/32:f16", (4, 64), 4 * 64 + 4 * 2 * 2),
        ("i4/32:f16", (4, 64), 4 * 32 + 4 * 2 * 2),
        ("u4/32:f16+f16", (4, 40), 4 * 20 + 4 * 2 * 4),
        ("f8e4m3/128x128:f32", (130, 256), 130 * 256 + 2 * 2 * 4),
        ("i8/row:f32", (4, 64), 4 * 64 + 4 * 4),
        ("f4e2m1/32:f8e8m0", (1, 32), 16 + 1),
    ],
)
def test_bytes_of_block_formats(text: str, shape: tuple[int, ...], size: int) -> None:
    assert block(text).size_bytes(shape) == size


def test_bits_of_known_formats() -> None:
    assert {name: f.bits for name, f in GGUF_FORMATS.items()} == {
        "Q4_0": 4.5,
        "Q4_1": 5.0,
        "Q8_0": 8.5,
        "Q4_K": 6.0,
        "Q6_K": 10.0,
    }
    assert (MXFP4.bits, MXFP8.bits, NVFP4.bits) == (4.25, 8.25, 4.5)
    assert FP8_BLOCK.bits == pytest.approx(8.002, abs=1e-3)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """Matrices with odd sizes, offsets and magnitudes from 1e-30 to 1e4."""
    shape = draw(st.tuples(st.integers(1, 5), st.sampled_from([1, 7, 16, 31, 32, 33, 70])))
    values = draw(hnp.arrays(np.float32, shape, elements=st.floats(-1, 1, width=32)))
    scale = draw(st.sampled_from([1e-30, 1e-8, 1e-3, 1.0, 300.0]))
    shift = draw(st.sampled_from([0.0, 0.0, 1.0, -7.5, 1000.0]))
    return values * np.float32(scale) + np.float32(shift)


@pytest.mark.parametrize("text", FORMATS)
@settings(deadline=None)
@given(x=matrices())
def test_no_value_is_off_by_more_than_half_a_step(text: str, x: np.ndarray) -> None:
    format = block(text)
    made = quantize(x, format)
    assert made.codes.shape == x.shape
    assert made.codes.dtype == format.element.numpy
    assert made.scales.shape == format.scale_shape(x.shape)
    wide = dtypes._spread(made.scales.astype(np.float32), format, x.shape).astype(np.float64)
    shift = np.zeros(())
    if made.offsets is not None:
        shift = dtypes._spread(made.offsets.astype(np.float32), format, x.shape)
    safe = np.where(wide > 0, wide, 1.0)
    step = half_steps((x - shift) / safe, codes_of(format.element)) * safe
    # Codes come from a ratio in float32, values from a product in float32.
    rounding = 2.0**-22 * (np.abs(x) + np.abs(shift))
    assert np.all(np.abs(made.dequantize() - x) <= step + rounding)


@pytest.mark.parametrize("text", ["i8/32:f16", "i4/32:f16", "f8e4m3/32:f8e8m0", "f4e2m1/32:f8e8m0",
                                  "f4e2m1/16:f8e4m3", "f8e5m2/32:f16", "i8/row:f32",
                                  "u4/32:f16+f16"])  # fmt: skip
@pytest.mark.parametrize("exponent", [-6, -1, 0, 3])
def test_all_codes_times_a_power_of_two_are_exact(text: str, exponent: int) -> None:
    format = block(text)
    codes = codes_of(format.element)
    width = format.block[-1] or 32
    # Each block holds both ends of the range, so that its scale is the power of two.
    inner = [codes[i : i + width - 2] for i in range(0, len(codes), width - 2)]
    rows = [
        np.concatenate([[codes[0], codes[-1]], part, np.zeros(width - 2 - len(part))])
        for part in inner
    ]
    x = np.stack(rows).astype(np.float32) * np.float32(2.0**exponent)
    made = quantize(x, format)
    assert np.array_equal(made.dequantize(), x)
    assert set(np.unique(made.scales.astype(np.float32))) == {np.float32(2.0**exponent)}


@pytest.mark.parametrize("most", [1.2, 2.7, 5.5, 6.0, 6.01, 448.0, 0.0, 1e-40, 1e-45, 1e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_mxfp4_never_saturates(most: float, sign: int) -> None:
    # Fault: dividing by 6 before taking the exponent picks one too small, and 2.7 saturates.
    x = (sign * most * np.linspace(-1, 1, 32)).astype(np.float32)[None]
    made = quantize(x, MXFP4)
    scale = float(made.scales.astype(np.float32)[0, 0])
    ratio = x.astype(np.float64) / scale
    assert math.log2(scale) == round(math.log2(scale))
    assert np.abs(ratio).max() <= 6.0
    codes = codes_of(MXFP4.element).astype(np.float64)
    step = half_steps(ratio, codes) * scale
    assert np.all(np.abs(made.dequantize() - x) <= step)
    if 0 < most and scale > 2.0**-127:
        # The smallest scale that does not saturate: half of it would.
        assert np.abs(ratio).max() > 3.0


def test_blocks_of_zeros_are_zero() -> None:
    for text in FORMATS:
        made = quantize(np.zeros((8, 48), np.float32), block(text))
        assert not made.dequantize().any(), text


def test_the_last_block_may_be_short() -> None:
    x = np.linspace(-1, 1, 2 * 40, dtype=np.float32).reshape(2, 40)
    made = quantize(x, block("i8/32:f16"))
    assert made.scales.shape == (2, 2)
    alone = quantize(x[:, 32:], block("i8/32:f16"))
    assert np.array_equal(made.codes[:, 32:], alone.codes)
    assert np.array_equal(made.scales[:, 1:], alone.scales)


def test_square_blocks_take_their_own_extremes() -> None:
    x = np.ones((4, 6), np.float32)
    x[2:, 3:] = 8.0
    made = quantize(x, block("i8/2x3:f32"))
    assert made.scales.shape == (2, 2)
    assert made.scales[1, 1] == np.float32(8.0) / np.float32(127)
    assert np.array_equal(np.unique(made.codes), [127])


@pytest.mark.parametrize(
    ("text", "value", "what"),
    [
        ("f4e2m1/16:f8e4m3", 1e4, "a block reaches 10000"),
        ("i8/32:f16", 1e8, "a block reaches 1e\\+08"),
        ("i8/32:f16", math.nan, "not finite"),
        ("i8/32:f16", -math.inf, "not finite"),
        ("u4/32:f16+f16", -1e6, "a block reaches"),
        ("u4/32:f16", 1.0, "cannot round to u4/32:f16"),
        ("i4/32:f16+f16", 1.0, "cannot round"),
        ("f8e4m3/32:f16+f16", 1.0, "cannot round"),
        ("f8e8m0/32:f16", 1.0, "cannot round"),
        ("i8/32:i8", 1.0, "cannot round"),
        ("bool/32:f16", 1.0, "cannot round"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, value: float, what: str) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, 5] = value
    with pytest.raises(TypeMismatch, match=what):
        quantize(x, block(text))


def test_a_block_needs_enough_dims() -> None:
    with pytest.raises(TypeMismatch, match="needs at least 2 dims, the tensor has 1"):
        FP8_BLOCK.scale_shape((128,))


def test_ties_of_codes_go_to_even() -> None:
    steps = [0.5, 1.5, 2.5, -0.5, -1.5, 127.0]
    made = quantize(np.array([steps], np.float32), block("i8/row:f32"))
    assert made.codes.tolist() == [[0, 2, 2, 0, -2, 127]]


def test_formats_listed_here_cover_all_kinds() -> None:
    kinds = {(block(t).element.kind, block(t).offset is not None) for t in FORMATS}
    assert kinds == {("int", False), ("uint", True), ("float", False)}
    assert len(set(itertools.chain(FORMATS))) == len(FORMATS)
