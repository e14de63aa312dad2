"""Weight layouts: pack and unpack are exact inverses, and the bytes lie where formats.h says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.backends.cpu import layouts
from metainfer.ir.dtypes import BF16, F16, Block, BlockArray, DType, parse_dtype
from metainfer.ir.errors import TypeMismatch


def random_block_array(
    rng: np.random.Generator, shape: tuple[int, int], block: DType
) -> BlockArray:
    """Any codes and any scales: what a checkpoint might hold."""
    assert isinstance(block, Block)
    bits, signed = block.element.bits, block.element.kind == "int"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    codes = rng.integers(low, high, shape).astype(block.element.numpy)
    sides = [rng.normal(size=block.scale_shape(shape)).astype(block.scale.numpy) for _ in range(2)]
    return BlockArray(block, codes, sides[0], sides[1] if block.offset else None)


@settings(deadline=None)
@given(
    name=st.sampled_from(layouts.LAYOUTS),
    n=st.integers(1, 70),
    k=st.integers(1, 100),
    seed=st.integers(0, 2**32 - 1),
)
def test_unpack_inverts_pack(name: str, n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = layouts.parse_layout(name).dtype
    if not isinstance(dtype, Block):
        weight = rng.normal(size=(n, k)).astype(dtype.numpy)
        back = layouts.unpack(name, layouts.pack(name, weight), (n, k))
        assert isinstance(back, np.ndarray)
        assert back.dtype == weight.dtype
        np.testing.assert_array_equal(back, weight)
        return
    blocks = random_block_array(rng, (n, k), dtype)
    blob = layouts.pack(name, blocks)
    assert blob.nbytes == layouts.layout_bytes(name, (n, k))
    assert blob.ctypes.data % 64 == 0
    result = layouts.unpack(name, blob, (n, k))
    assert isinstance(result, BlockArray)
    assert result.format == dtype
    np.testing.assert_array_equal(result.codes, blocks.codes)
    np.testing.assert_array_equal(result.scales, blocks.scales)
    if blocks.offsets is not None:
        assert result.offsets is not None
        np.testing.assert_array_equal(result.offsets, blocks.offsets)


def test_codes_lie_where_the_kernels_look() -> None:
    weight = random_block_array(np.random.default_rng(0), (16, 64), parse_dtype("u4/32:f16+f16"))
    blob = layouts.pack("cpu.u4g32_n16", weight)
    block = blob.reshape(2, 320)[1]
    np.testing.assert_array_equal(block[:32].view(np.float16), weight.scales[:, 1])
    for r, c, i in [(0, 0, 0), (5, 2, 3), (15, 3, 1)]:
        byte = block[64 + 4 * (16 * c + r) + i]
        assert byte & 15 == weight.codes[r, 32 + 4 * c + i]
        assert byte >> 4 == weight.codes[r, 32 + 16 + 4 * c + i]


def test_row_major_layout_has_gguf_bytes_per_row() -> None:
    assert layouts.layout_bytes("cpu.i8g32_n1", (10, 64)) == 10 * 2 * 34
    assert layouts.layout_bytes("cpu.u4g32_n1", (10, 64)) == 10 * 2 * 20


def test_layout_for_names_the_lossless_layout() -> None:
    assert layouts.layout_for(BF16) == "cpu.bf16_n16"
    assert layouts.layout_for(F16) == "cpu.f16_n16"
    assert layouts.layout_for(parse_dtype("i4/32:f16")) == "cpu.i4g32_n16"
    assert layouts.layout_for(parse_dtype("u4/32:f32+f32"), rows=1) == "cpu.u4g32_s32_n1"
    with pytest.raises(TypeMismatch, match="no CPU layout"):
        layouts.layout_for(parse_dtype("i8/16:f32"))


def test_refuses_what_it_cannot_hold() -> None:
    weight, rng = np.zeros((16, 32), np.float32), np.random.default_rng(0)
    with pytest.raises(TypeMismatch, match="unknown CPU layout"):
        layouts.pack("cpu.f32_n7", weight)
    with pytest.raises(TypeMismatch, match="holds bf16"):
        layouts.pack("cpu.bf16_n16", weight)
    with pytest.raises(TypeMismatch, match="holds matrices"):
        layouts.pack("cpu.f32_n16", weight[0])
    with pytest.raises(TypeMismatch, match="holds i8/32:f16"):
        layouts.pack("cpu.i8g32_n16", random_block_array(rng, (16, 32), parse_dtype("i4/32:f16")))
    with pytest.raises(TypeMismatch, match="bytes"):
        layouts.unpack("cpu.f32_n16", np.zeros(3, np.uint8), (16, 32))
