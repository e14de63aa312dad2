"""Every code of fp8 and MXFP4 as torch and JAX widen it, against `ir.dtypes`."""

import jax
import ml_dtypes
import numpy as np
import pytest

from metainfer.backends.jax.load import LOAD
from metainfer.backends.torch.tensors import plain_weight
from metainfer.ir.dtypes import MXFP4, NVFP4, Block, BlockArray, parse_dtype


def fp8(text: str, scale: float) -> BlockArray:
    format = parse_dtype(text)
    assert isinstance(format, Block)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 128)
    scales = np.full(format.scale_shape((2, 128)), scale, np.float32).astype(format.scale.numpy)
    return BlockArray(format, codes, scales)


def mxfp4() -> BlockArray:
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2)).view(ml_dtypes.float4_e2m1fn)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)[:, None]
    return BlockArray(MXFP4, codes, scales)


def nvfp4() -> BlockArray:
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1)).view(ml_dtypes.float4_e2m1fn)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[:, None]
    return BlockArray(NVFP4, codes, scales, None, np.linspace(0.1, 2, 256, dtype="f4")[:, None])


ARRAYS = {
    "tensor": fp8("f8e4m3/tensor:f32", 1.7),
    "row": fp8("f8e4m3/row:f32", 0.3),
    "block": fp8("f8e4m3/128x128:f32", 1e-3),
    "group_ue8m0": fp8("f8e4m3/128:f8e8m0", 2.0**-126),
    "least_ue8m0": fp8("f8e4m3/128:f8e8m0", 2.0**-127),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
}


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    numbers = ~np.isnan(wanted)
    equal = np.array_equal(found[numbers].view(np.uint32), wanted[numbers].view(np.uint32))
    return equal and np.array_equal(np.isnan(found), ~numbers)


@pytest.mark.parametrize("name", ARRAYS)
def test_torch(name: str) -> None:
    packed = plain_weight(ARRAYS[name])
    assert same(packed.dequantize().numpy(), ARRAYS[name].dequantize())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ARRAYS)
def test_jax(name: str) -> None:
    wanted = ARRAYS[name].dequantize()
    found = np.asarray(jax.device_get(LOAD["dequantize"](ARRAYS[name])))
    # XLA takes denormals for zero on CPUs, scales of 2^-127 among them: all values of the array
    # with that scale, the first row of the other.
    least = ARRAYS[name].scales.astype(np.float32) < 2.0**-126
    small = (np.abs(wanted) < 2.0**-126) | (least & ~np.isnan(wanted))
    assert same(np.where(small, 0, found), np.where(small, np.float32(0), wanted))
