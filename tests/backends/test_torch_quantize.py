"""Activations rounded by torch: bit for bit the codes and scales of `ir.dtypes.quantize`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metainfer.backends.torch.quantize import quantize
from metainfer.backends.torch.tensors import to_torch
from metainfer.ir import dtypes
from metainfer.ir.dtypes import Block, parse_dtype
from metainfer.ir.errors import Unsupported

FORMATS = [
    "f8e4m3/row:f32",
    "f8e4m3/16:f32",
    "f8e4m3/16:f8e8m0",
    "f8e4m3/row:f8e8m0",
    "f4e2m1/32:f8e8m0",
    "f4e2m1/16:f32",
]
# Fault: two quantizers of one format that disagree.
MAXIMA = [1.2, 2.7, 5.5, 6.0, 6.01, 448.0, 449.0, 0.0, 1e-38, 1e-40, 1e-45, 1.6e38]


def block(text: str) -> Block:
    found = parse_dtype(text)
    assert isinstance(found, Block)
    return found


def assert_same(x: torch.Tensor, format: Block) -> None:
    codes, scales = quantize(x, format)
    wanted = dtypes.quantize(x.float().numpy(), format)
    assert torch.equal(scales.view(torch.uint8), to_torch(wanted.scales).view(torch.uint8))
    assert torch.equal(codes.view(torch.uint8), to_torch(wanted.codes).view(torch.uint8))


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("most", MAXIMA)
def test_block_maxima(text: str, most: float) -> None:
    x = torch.linspace(-1, 1, 32)[None] * torch.tensor([[most], [-most / 3]])
    assert_same(x, block(text))


@settings(deadline=None)
@given(
    x=hnp.arrays(np.float32, (3, 64), elements=st.floats(-1e4, 1e4, width=32)),
    text=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_numbers(x: np.ndarray, text: str, dtype: torch.dtype) -> None:
    assert_same(torch.from_numpy(x).to(dtype), block(text))


@pytest.mark.parametrize("text", FORMATS)
def test_ties_and_all_codes(text: str) -> None:
    """Codes, their midpoints and the neighbours of those, at scale 1."""
    format = block(text)
    codes = np.arange(2**format.element.bits, dtype=np.uint8).view(format.element.numpy)
    values = np.unique(np.abs(codes[np.isfinite(codes.astype(np.float32))].astype(np.float32)))
    middles = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(9e9))]
    inner = np.concatenate([values, *near])
    inner = np.concatenate([inner, -inner])
    # The largest code in each block keeps its scale at 1.
    width = format.block[0] - 1 if format.block[0] else len(inner)
    rows = np.pad(inner, (0, -len(inner) % width)).reshape(-1, width)
    x = np.concatenate([np.full((len(rows), 1), values[-1], np.float32), rows], axis=1)
    assert_same(torch.from_numpy(x), format)
    assert quantize(torch.from_numpy(x), format)[1].float().unique().tolist() == [1.0]


OTHERS = ["i8/row:f32", "f8e4m3/4x8:f32", "f8e4m3/row:bf16", "f8e4m3/48:f32", "f8e4m3/tensor:f32"]


@pytest.mark.parametrize("text", OTHERS)
def test_other_formats_are_refused(text: str) -> None:
    with pytest.raises(Unsupported, match="rounding of rows of 64"):
        quantize(torch.ones(2, 64), block(text))
