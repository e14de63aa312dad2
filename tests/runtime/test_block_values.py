"""Activations of block formats in a plan's memory: codes, then scales, where the arena put them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metainfer.backends.torch.tensors import block_view
from metainfer.ir.arena import ALIGNMENT_BYTES, SCALES_ALIGNMENT, plan_arena
from metainfer.ir.dtypes import Block, parse_dtype
from metainfer.ir.errors import Unsupported
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Module
from metainfer.ir.parser import parse_module


def block(text: str) -> Block:
    found = parse_dtype(text)
    assert isinstance(found, Block)
    return found


def module_of(format_: str, width: int) -> Module:
    return parse_module(f"""module m {{
      dim T in [1, 33]
      main(%x: f32[T,{width}]) {{
        weights {{ @w : f8e4m3/row:f32[8,{width}] }}
        %0 = quantize(%x) {{format = "{format_}"}} : {format_}[T,{width}]
        %1 = linear(%0, @w) {{dtype = "f32"}} : f32[T,8]
        return %1
      }}
    }}""")


@given(
    rows=st.integers(1, 33),
    width=st.integers(1, 300),
    format_=st.sampled_from(["f8e4m3/row:f32", "f8e4m3/128:f32", "f8e4m3/32:f8e8m0", "i8/16:f16"]),
)
def test_a_buffer_holds_codes_and_scales_at_every_size(rows: int, width: int, format_: str) -> None:
    module = module_of(format_, width)
    arena = plan_arena(flatten(module), module.limits())
    (value,) = [op.result for op in module.main.ops if op.name == "quantize"]
    size = arena.buffers[value.name].size
    assert size % ALIGNMENT_BYTES == 0
    raw = torch.zeros(size, dtype=torch.uint8)
    made = block_view(raw, block(format_), (rows, width))
    assert made.codes.shape == (rows, width)
    assert made.scales.shape == block(format_).scale_shape((rows, width))
    first, second = made.codes.data_ptr(), made.scales.data_ptr()
    assert first == raw.data_ptr()
    assert second >= first + made.codes.numel()
    assert (second - first) % SCALES_ALIGNMENT == 0
    assert second + made.scales.numel() * made.scales.element_size() <= first + size


@pytest.mark.parametrize("format_", ["f4e2m1/32:f8e8m0", "u4/32:f16+f16", "u8/32:f16+f16"])
def test_other_values_are_refused(format_: str) -> None:
    with pytest.raises(Unsupported, match="activations of"):
        block_view(torch.zeros(4096, dtype=torch.uint8), block(format_), (2, 64))
