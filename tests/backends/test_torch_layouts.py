"""Packings: exact inverses, stated bytes, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_samples import KERNELS, LAYOUTS

from metainfer.backends.layout import Weight
from metainfer.backends.torch.codes import Codes
from metainfer.backends.torch.layouts import Int4Groups, RowScaled
from metainfer.backends.torch.tensors import BlockTensors, plain_weight, to_numpy, to_torch
from metainfer.ir.dtypes import (
    Block,
    BlockArray,
    DType,
    parse_dtype,
    quantize,
)
from metainfer.ir.errors import PlanError, Unsupported
from metainfer.ir.types import tensor

ROW = ("i8/row:f32", "i8/row:f16", "i8/row:bf16")
GROUPS = ("i4/32:f16", "i4/64:f32", "u4/32:f16+f16", "u4/128:f32+f32", "i4/256:bf16")
NVFP4 = "f4e2m1/16:f8e4m3*f32"
BLOCKS = (NVFP4, "i8/32:f16", "u4/32:f16+f16", "f4e2m1/32:f8e8m0", "f8e4m3/16x16:f32", "i4/32:bf16")
PLAIN = ("f32", "bf16", "f16", "f8e4m3", "i8", *BLOCKS, *ROW)
FP8 = ("f8e4m3/row:f32", "f8e4m3/row:f8e8m0", "f8e4m3/tensor:f32")
CODES = (
    "f4e2m1/32:f8e8m0",
    "f4e2m1/16:f8e4m3",
    NVFP4,
    "f8e4m3/128x128:f32",
    "f8e4m3/16x8:bf16",
    "f8e4m3/32:f8e8m0",
    *FP8,
)


def made(format: str, rows: int, columns: int, seed: int) -> Weight:
    dtype = parse_dtype(format)
    values = np.random.default_rng(seed).uniform(-1, 1, (rows, columns)).astype(np.float32)
    if isinstance(dtype, Block):
        return quantize(values, dtype)
    return (values * (50 if dtype.kind == "int" else 1)).astype(dtype.numpy)


def assert_same(a: Weight, b: Weight) -> None:
    """Bit for bit."""
    if isinstance(a, BlockArray):
        assert isinstance(b, BlockArray)
        assert a.format == b.format
        sides = [(a.offsets, b.offsets), (a.row_scales, b.row_scales)]
        parts = [(a.codes, b.codes), (a.scales, b.scales), *sides]
    else:
        assert isinstance(b, np.ndarray)
        parts = [(a, b)]
    for first, second in parts:
        if first is None:
            assert second is None
            continue
        assert isinstance(first, np.ndarray)
        assert isinstance(second, np.ndarray)
        assert first.dtype == second.dtype
        assert first.shape == second.shape
        assert first.tobytes() == second.tobytes()


def resident(packed: Any) -> int:
    """Bytes of all tensors of a packed weight."""
    if isinstance(packed, torch.Tensor):
        return packed.numel() * packed.element_size()
    if isinstance(packed, BlockTensors):
        return packed.num_bytes
    held: list[torch.Tensor | None]
    if isinstance(packed, Codes):
        rows = 0 if packed.row_scales is None else resident(packed.row_scales)
        return resident(packed.codes) + resident(packed.scales) + rows
    if isinstance(packed, RowScaled):
        held = [packed.codes, packed.scales, packed.stored_scales]
    else:
        assert isinstance(packed, Int4Groups)
        held = [packed.packed, packed.scale_zeros, packed.scales, packed.offsets]
    return sum(resident(t) for t in held if t is not None)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(0, 99))


@given(size=sizes, format=st.sampled_from(PLAIN))
def test_plain_round_trip(size: tuple[int, int, int], format: str) -> None:
    round_trip("torch.plain", format, size)


@given(size=sizes, format=st.sampled_from(ROW))
def test_int8_round_trip(size: tuple[int, int, int], format: str) -> None:
    round_trip("torch.int8pack", format, size)


@given(size=sizes, format=st.sampled_from(GROUPS))
def test_int4_round_trip(size: tuple[int, int, int], format: str) -> None:
    round_trip("torch.int4pack", format, size)


@given(size=sizes, format=st.sampled_from(FP8))
def test_fp8_round_trip(size: tuple[int, int, int], format: str) -> None:
    round_trip("cuda.fp8_cols", format, size)


@given(size=sizes, format=st.sampled_from(CODES))
def test_codes_round_trip_and_rows(size: tuple[int, int, int], format: str) -> None:
    round_trip("torch.codes", format, size)
    rows, columns, seed = size
    weight = made(format, rows, columns, seed)
    assert isinstance(weight, BlockArray)
    packed, wanted = LAYOUTS.get("torch.codes").pack(weight), weight.dequantize()
    start, stop = seed % rows, rows - seed % 3 % (rows - seed % rows)
    np.testing.assert_array_equal(packed.rows(start, stop).numpy(), wanted[start:stop])
    spans = list(packed.spans(columns * 3))
    joined = np.concatenate([packed.rows(a, b).numpy() for a, b in spans])
    np.testing.assert_array_equal(joined, wanted)


@pytest.mark.parametrize("format", ["f4e2m1/32:f8e8m0", "f8e4m3/8x16:f32", "f8e4m3/tensor:f32"])
def test_one_of_stacked_codes(format: str) -> None:
    dtype = parse_dtype(format)
    assert isinstance(dtype, Block)
    whole = quantize(np.random.default_rng(0).standard_normal((3, 10, 40)), dtype)
    packed = LAYOUTS.get("torch.codes").pack(whole)
    assert resident(packed) == LAYOUTS.get("torch.codes").num_bytes(tensor(dtype, 3, 10, 40))
    assert_same(whole, LAYOUTS.get("torch.codes").unpack(packed, tensor(dtype, 3, 10, 40)))
    for index in range(3):
        found = packed.part(index).rows(0, 10).numpy()
        np.testing.assert_array_equal(found, whole.dequantize()[index])


def round_trip(name: str, format: str, size: tuple[int, int, int]) -> None:
    rows, columns, seed = size
    weight, layout = made(format, rows, columns, seed), LAYOUTS.get(name)
    type_ = tensor(parse_dtype(format), rows, columns)
    packed = layout.pack(weight)
    assert_same(weight, layout.unpack(packed, type_))
    assert resident(packed) == layout.num_bytes(type_)


@given(size=sizes, format=st.sampled_from(PLAIN))
def test_widening_gives_the_values(size: tuple[int, int, int], format: str) -> None:
    rows, columns, seed = size
    weight = made(format, rows, columns, seed)
    values = weight.dequantize() if isinstance(weight, BlockArray) else weight.astype(np.float32)
    type_ = tensor(parse_dtype(format), rows, columns)
    exact = LAYOUTS.get("torch.dense_f32")
    packed = exact.pack(weight)
    assert_same(values, exact.unpack(packed, type_))
    assert resident(packed) == exact.num_bytes(type_)
    for name in ("bf16", "f16"):
        layout = LAYOUTS.get(f"torch.dense_{name}")
        dtype = parse_dtype(name)
        rounded = values.astype(dtype.numpy).astype(np.float32)  # type: ignore[union-attr]
        packed = layout.pack(weight)
        assert_same(rounded, layout.unpack(packed, type_))
        assert resident(packed) == layout.num_bytes(type_)


def test_mkldnn_packing_or_its_refusal() -> None:
    layout = LAYOUTS.get("torch.mkldnn_bf16")
    weight = made("bf16", 24, 40, 0)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with pytest.raises(PlanError, match=r"no bf16 products.*\n.*compile for this machine"):
            layout.pack(weight)
        return
    back = layout.unpack(layout.pack(weight), tensor(parse_dtype("bf16"), 24, 40))
    assert isinstance(weight, np.ndarray)
    assert_same(weight.astype(np.float32), back)


@pytest.mark.parametrize(
    ("layout", "format"),
    [
        ("torch.int8pack", "i8/32:f16"),
        ("torch.int8pack", "f32"),
        ("torch.int4pack", "i4/16:f16"),
        ("torch.int4pack", "i8/32:f16"),
        ("cuda.fp8_cols", "i8/row:f32"),
        ("torch.codes", "i8/row:f32"),
        ("torch.codes", "bf16"),
    ],
)
def test_packings_refuse_other_formats(layout: str, format: str) -> None:
    with pytest.raises(PlanError, match="takes"):
        LAYOUTS.get(layout).pack(made(format, 16, 64, 0))


def test_every_layout_of_a_kernel_is_known() -> None:
    named = {name for kernel in KERNELS.all() for name in kernel.layouts.values()}
    assert named <= {layout.name for layout in LAYOUTS.all()}


@given(size=sizes, format=st.sampled_from((*BLOCKS, *ROW, *GROUPS)))
def test_block_tensors_dequantize_as_the_format_says(
    size: tuple[int, int, int], format: str
) -> None:
    rows, columns, seed = size
    weight = made(format, rows, columns, seed)
    assert isinstance(weight, BlockArray)
    packed = plain_weight(weight)
    assert isinstance(packed, BlockTensors)
    wanted = weight.dequantize()
    np.testing.assert_array_equal(packed.dequantize().numpy(), wanted)
    index = torch.tensor([[rows - 1, 0]])
    np.testing.assert_array_equal(packed.rows(index).numpy(), wanted[[[rows - 1, 0]]])


SCALARS = ("bool", "i8", "u8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64")
NARROW = ("f8e4m3", "f8e5m2", "f8e8m0")


@pytest.mark.parametrize("name", [*SCALARS, *NARROW])
def test_arrays_become_tensors_and_come_back(name: str) -> None:
    dtype: DType = parse_dtype(name)
    assert not isinstance(dtype, Block)
    array = np.array([[0, 1, 2], [4, 8, 16]]).astype(dtype.numpy)
    assert_same(array, to_numpy(to_torch(array), dtype))
    assert_same(array.T.copy(), to_numpy(to_torch(array.T), dtype))
    frozen = array.copy()
    frozen.flags.writeable = False
    copy = to_torch(frozen)
    copy.view(torch.uint8).zero_()
    assert_same(frozen, array)


def test_four_bit_floats_have_no_tensor_type() -> None:
    from metainfer.backends.torch.tensors import torch_dtype

    with pytest.raises(Unsupported, match="no element type for f4e2m1"):
        torch_dtype(parse_dtype("f4e2m1"))
