"""Codes in the order of matrix instructions: packed and unpacked, widened number by number."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from triton_experts import Case, experts_op
from triton_products import STORED, linear
from triton_words import by_fours, widen
from triton_worker import CARDS, check_interpreted, compare, interpreted, refused, run_named

from metainfer.backends.kernel import Query
from metainfer.backends.registry import installed
from metainfer.backends.torch.check import run_reference
from metainfer.backends.triton import widened, words
from metainfer.backends.triton.cross import compiled_for
from metainfer.backends.triton.fits import typed_call
from metainfer.backends.triton.templates import order
from metainfer.ir.dtypes import Block, BlockArray, DType, parse_dtype, quantize
from metainfer.ir.errors import PlanError
from metainfer.ir.types import tensor

E8M0, E4M3 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fn
FORMATS = [f for f, stored in STORED.items() if stored not in ("plain", "fp8")]
Array = np.ndarray[Any, Any]


def block(text: str) -> Block:
    dtype = parse_dtype(text)
    assert isinstance(dtype, Block)
    return dtype


def weight_of(dtype: Block, shape: tuple[int, ...], seed: int = 3) -> BlockArray:
    rng = np.random.default_rng(seed)
    return quantize(rng.normal(size=shape).astype(np.float32), dtype)


@given(
    st.sampled_from(FORMATS),
    st.lists(st.integers(1, 3), max_size=1),
    st.integers(1, 5),
    st.integers(1, 300),
)
def test_weights_come_back(format_: str, lead: list[int], rows: int, width: int) -> None:
    dtype = block(format_)
    weight = weight_of(dtype, (*lead, rows, width))
    type_ = tensor(dtype, *lead, rows, width)
    packed = words.pack(weight)
    found = words.unpack(packed, type_)
    assert isinstance(found, BlockArray)
    np.testing.assert_array_equal(found.codes.view(np.uint8), weight.codes.view(np.uint8))
    np.testing.assert_array_equal(found.scales, weight.scales)
    for side in ("row_scales", "offsets"):
        kept, given_ = getattr(found, side), getattr(weight, side)
        assert (kept is None) == (given_ is None)
        if kept is not None:
            np.testing.assert_array_equal(kept, given_)
    for real, shown in zip(packed.parts, words.typed(type_).parts, strict=True):
        assert (real.shape, real.dtype) == (shown.shape, shown.dtype)
    held = sum(t.numel() * t.element_size() for t in packed.parts)
    assert words.num_bytes(type_) == held


def of_fp4(scales: Array, format_: str) -> BlockArray:
    """Every code under every scale: a row for each."""
    dtype = block(format_)
    codes = np.tile(np.arange(256, dtype=np.uint8) % 16, (len(scales), 1))
    spread = np.repeat(scales[:, None], 256 // dtype.block[0], 1)
    rows = None if dtype.row is None else np.full((len(scales), 1), 0.375, np.float32)
    return BlockArray(dtype, codes.view(ml_dtypes.float4_e2m1fn), spread, None, rows)


def check_widened(weight: BlockArray, off_by: float = 0.0) -> None:
    found = interpreted(widen, weight).astype(np.float32)
    wanted = weight.dequantize().astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(found, wanted, rtol=0.0, atol=off_by)


def test_every_fp4_code_by_every_power_of_two() -> None:
    least, most, format_ = 27, 161, "f4e2m1/32:f8e8m0"
    check_widened(of_fp4(np.arange(least, most, dtype=np.uint8).view(E8M0), format_))
    # Smaller ones scale less than 2^-98, and lose bits.
    check_widened(of_fp4(np.arange(least, dtype=np.uint8).view(E8M0), format_), 2.0**-100)


@pytest.mark.parametrize("format_", ["f4e2m1/16:f8e4m3", "f4e2m1/16:f8e4m3*f32"])
def test_every_fp4_code_by_every_e4m3_scale(format_: str) -> None:
    """Zeros and subnormal scales as well."""
    check_widened(of_fp4(np.arange(0x7F, dtype=np.uint8).view(E4M3), format_))


def test_every_fp8_code() -> None:
    dtype = block("f8e4m3/row:f32")
    codes, scales = np.arange(256, dtype=np.uint8), np.array([[1.5], [0.25]], np.float32)
    whole = np.where(codes & 127 == 127, 0, codes).reshape(2, 128).view(E4M3)
    check_widened(BlockArray(dtype, whole, scales, None, None))
    with pytest.raises(PlanError, match="codes that are numbers"):
        words.pack(BlockArray(dtype, codes.reshape(2, 128).view(E4M3), scales, None, None))


@pytest.mark.parametrize("format_", ["f8e4m3/32x32:f32", "f4e2m1/64:f8e8m0"])
def test_blocks_and_wide_groups(format_: str) -> None:
    check_widened(weight_of(block(format_), (70, 330)))


@pytest.mark.parametrize("format_", ["f8e4m3/128x128:f32", "f4e2m1/16:f8e4m3*f32"])
def test_products_of_widened_weights(format_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"triton.linear_{format_[:6]}_widened"
    op, data = linear(format_, (19, 70, 190))
    assert refused(name, op) == []
    check_interpreted(name, op, data)
    # As many parts as rows take; the last one is short.
    monkeypatch.setattr(widened, "AT_ONCE", 32 * 190)
    assert widened.spans(70, 190) == [(0, 32), (32, 64), (64, 70)]


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("fp4_few16", "f4e2m1/16:f8e4m3*f32"), ("codes_few16", "f8e4m3/128x128:f32"),
        ("codes_m64", "f8e4m3/8:f8e8m0"), ("blocks_few16", "f8e4m3/32x32:f32"),
        ("int4_few16", "u4/32:f16+f16"), ("int4_m64", "i4/8:f16"), ("int8_few16", "i8/32:f16"),
    ],
)  # fmt: skip
def test_products_of_single_warps(name: str, format_: str) -> None:
    """Told by fours; numbers of a step that share no scale stay where they are."""
    name, (op, data) = f"triton.linear_{name}", linear(format_, (5, 70, 300))
    found = interpreted(by_fours, run_named, name, op, data, {})
    compare(installed().kernels.get(name), op, found, run_reference(op, data))


@pytest.mark.parametrize("format_", ["f4e2m1/32:f8e8m0", "f8e4m3/32x32:f32"])
def test_experts_of_single_warps(format_: str) -> None:
    op, data = experts_op(Case(5, experts=3, choices=2, width=128, inner=64, format=format_))
    name = f"triton.experts_{'e2m1' if 'e2m1' in format_ else 'e4m3'}"
    found = interpreted(by_fours, run_named, name, op, data, {})
    compare(installed().kernels.get(name), op, found, run_reference(op, data))


@pytest.mark.parametrize(
    ("arch", "warps", "rows", "wanted"),
    [
        ("sm89", 4, 64, True), ("sm120", 4, 64, True), ("sm80", 4, 16, True),
        ("sm90", 4, 64, False), ("sm90", 8, 128, False), ("sm90", 2, 64, True),
        ("sm90", 4, 32, True), ("sm100", 4, 64, False), ("gfx942", 4, 64, False),
    ],
)  # fmt: skip
def test_products_of_single_warps_are_known(arch: str, warps: int, rows: int, wanted: bool) -> None:
    options = SimpleNamespace(arch=arch, num_warps=warps)
    compiling = SimpleNamespace(builder=SimpleNamespace(options=options))
    assert order.fours(rows, 32, _semantic=compiling).value is wanted
    assert order.fours(rows, 8, _semantic=compiling).value is False


@pytest.mark.parametrize(
    ("arch", "warps", "sums", "wanted"),
    [
        ("sm90", 4, (64, 16), True), ("sm90", 8, (128, 32), True), ("sm90", 4, (64, 64), False),
        ("sm90", 2, (64, 16), False), ("sm90", 4, (32, 16), False), ("sm120", 4, (64, 16), False),
        ("sm100", 4, (64, 16), False), ("gfx942", 4, (64, 16), False),
    ],
)  # fmt: skip
def test_products_that_are_added_afterwards(
    arch: str, warps: int, sums: tuple[int, int], wanted: bool
) -> None:
    options = SimpleNamespace(arch=arch, num_warps=warps)
    compiling = SimpleNamespace(builder=SimpleNamespace(options=options))
    assert order.apart(*sums, _semantic=compiling).value is wanted


SHARED = re.compile(r"st\.shared\.(?:b8|u8|b16|u16)")


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    ("storage", "format_"),
    [("fp4", "f4e2m1/32:f8e8m0"), ("codes", "f8e4m3/128x128:f32"), ("int8", "i8/32:f16")],
)
def test_widened_codes_stay_in_registers(storage: str, format_: str, rows: int) -> None:
    """On all cards: none goes through shared memory on its way to the matrix instruction."""
    op, _ = linear(format_, (rows, 1024, 1024))
    kernel = installed().kernels.get(f"triton.linear_{storage}_few{rows}")
    for card in CARDS.values():
        scratch = kernel.workspace(Query(op, card, {})) if kernel.workspace else 0
        call = typed_call(op, {}, kernel.layouts, installed().layouts, scratch)
        for launch in kernel.binder.launches(call):
            code = compiled_for(launch, card).asm["ptx"]
            assert SHARED.findall(code) == []
            if card.has("wgmma"):
                assert "wgmma.mma_async" in code
                if rows == 16:
                    # All instructions of a step at once, none waits for the one before it.
                    assert code.count("wgmma.fence") == code.count("wgmma.wait_group") == 1
            else:
                # Activations come by matrix loads, which take pairs of neighbours.
                assert "mma.sync" in code
                assert code.count("ldmatrix") >= 8
                assert code.count("ld.shared") <= 24


def test_the_price_of_widening_falls_with_the_rows() -> None:
    kernel = installed().kernels.get("triton.linear_f8e4m3_widened")
    assert kernel.effort is not None
    efforts = []
    for rows in (16, 256, 4096):
        op, _ = linear("f8e4m3/128x128:f32", (rows, 512, 512))
        efforts.append(kernel.effort(op, CARDS["1xh200"], {}))
    assert efforts[0] > 10 > efforts[1] > 1.2 > efforts[2] > 1.0


def refusal(weight: BlockArray) -> str:
    with pytest.raises(PlanError) as found:
        words.pack(weight)
    return str(found.value)


def test_refusals() -> None:
    assert "takes e4m3 codes" in refusal(weight_of(block("i8/row:f16"), (2, 64)))
    large = of_fp4(np.array([161], np.uint8).view(E8M0), "f4e2m1/32:f8e8m0")
    assert "keeps scales up to 2^33, found one of 2^34" in refusal(large)
    negative = of_fp4(np.array([-1.0], E4M3), "f4e2m1/16:f8e4m3")
    assert "keeps scales that are positive numbers" in refusal(negative)


@pytest.mark.parametrize(
    ("format_", "taken"),
    [("f8e4m3/row:f32", True), ("f4e2m1/16:f8e8m0", True), ("f4e2m1/24:f8e8m0", False),
     ("f4e2m1/32x32:f8e8m0", False), ("f4e2m1/32:f32", False), ("bf16", False)],
)  # fmt: skip
def test_what_it_takes(format_: str, taken: bool) -> None:
    dtype: DType = parse_dtype(format_)
    assert words.takes(dtype) is taken


def test_scales_under_which_codes_are_lost() -> None:
    """A scale of 0 has no code of its own: what it scales is kept as zeros."""
    weight = of_fp4(np.array([0.0], E4M3), "f4e2m1/16:f8e4m3")
    found = words.unpack(words.pack(weight), tensor(weight.format, 1, 256))
    assert isinstance(found, BlockArray)
    zeros = np.zeros_like(weight.codes)
    np.testing.assert_array_equal(found.dequantize(), replace(weight, codes=zeros).dequantize())
