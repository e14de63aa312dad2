"""Finer blocks by repeated scales."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.ir.dtypes import F32, FP8_BLOCK, FP8_ROW, FP8_TENSOR, Block, parse_dtype, quantize
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.refine import refine, refined_format
from metainfer.ir.sharding import check_divides, refined
from metainfer.ir.types import Mesh, Sharding, TensorType, tensor


def block(text: str) -> Block:
    found = parse_dtype(text)
    assert isinstance(found, Block)
    return found


def sharded(dtype: Block, shape: tuple[int, ...], **axes: int) -> TensorType:
    made = tensor(F32, *shape).with_dtype(dtype)
    return TensorType(made.shape, made.dtype, Sharding.of(dict(axes)))


@settings(deadline=None)
@given(data=st.data())
def test_values_stay_and_parts_are_parts(data: st.DataObject) -> None:
    """A shard of refined blocks holds what the whole tensor holds there."""
    ranks, part = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 24))
    extents = data.draw(st.tuples(st.sampled_from([0, 1, 4, 6, 16]), st.sampled_from([0, 8, 32])))
    if 0 in extents:
        extents = (0, 0)
    shape = (ranks * part, data.draw(st.sampled_from([8, 20])))
    format = Block(FP8_BLOCK.element, extents, FP8_BLOCK.scale)
    whole = quantize(np.random.default_rng(part).standard_normal(shape), format)
    mesh = Mesh((("tp", ranks),))
    finer = refined(sharded(format, shape, tp=0), mesh)
    check_divides(finer, mesh)
    assert isinstance(finer.dtype, Block)
    made = refine(whole, finer.dtype)
    np.testing.assert_array_equal(made.dequantize(), whole.dequantize())
    for rank in range(ranks):
        held = made.part(0, rank * part, (rank + 1) * part)
        np.testing.assert_array_equal(
            held.dequantize(), whole.dequantize()[rank * part : (rank + 1) * part]
        )


# Faults: experts 1536 wide over 8 ranks, 320 wide over 2, 4 and 8, in blocks of 128.
@pytest.mark.parametrize(
    ("width", "ranks", "extent"), [(1536, 8, 64), (320, 2, 32), (320, 4, 16), (320, 8, 8),
                                   (2048, 8, 128), (1536, 4, 128)]
)  # fmt: skip
def test_shards_that_cut_blocks(width: int, ranks: int, extent: int) -> None:
    mesh = Mesh((("tp", ranks),))
    gate = sharded(FP8_BLOCK, (192, width, 1408), tp=1)
    down = sharded(FP8_BLOCK, (192, 1408, width), tp=2)
    assert str(refined(gate, mesh).dtype) == f"f8e4m3/{extent}x128:f32"
    assert str(refined(down, mesh).dtype) == f"f8e4m3/128x{extent}:f32"
    check_divides(refined(gate, mesh), mesh)
    if extent < 128:
        with pytest.raises(TypeMismatch, match="cut blocks of 128") as refused:
            check_divides(gate, mesh)
        assert f'"f8e4m3/{extent}x128:f32"' in refused.value.advice


def test_one_scale_for_all_is_kept_by_each_part() -> None:
    assert refined_format(FP8_TENSOR, (6, 8), {0: 3}) == FP8_TENSOR
    assert refined_format(FP8_BLOCK, (256, 256), {0: 256}) == FP8_BLOCK
    whole = quantize(np.random.default_rng(0).standard_normal((6, 8)), FP8_TENSOR)
    rows = refine(whole, FP8_ROW)
    assert rows.scales.shape == (6, 1)
    np.testing.assert_array_equal(rows.dequantize(), whole.dequantize())
    assert math.isclose(rows.scales.min(), rows.scales.max())


@pytest.mark.parametrize(
    ("fine", "coarse"),
    [
        ("f8e4m3/96x128:f32", "f8e4m3/128x128:f32"),
        ("f8e4m3/128x128:f32", "f8e4m3/64x64:f32"),
        ("f8e4m3/row:f32", "f8e4m3/128:f32"),
        ("f8e4m3/64x64:f8e8m0", "f8e4m3/128x128:f32"),
        ("i8/64:f32", "f8e4m3/128:f32"),
    ],
)
def test_what_is_no_refinement(fine: str, coarse: str) -> None:
    whole = quantize(np.ones((256, 256), np.float32), block(coarse))
    with pytest.raises(TypeMismatch, match="is no refinement of"):
        refine(whole, block(fine))


def test_a_size_that_does_not_divide() -> None:
    with pytest.raises(TypeMismatch, match="does not divide by 3 ranks"):
        refined(sharded(FP8_BLOCK, (256, 256), tp=0), Mesh((("tp", 3),)))
    plain = tensor(F32, 7, 5)
    assert refined(plain, Mesh((("tp", 3),))) == plain
