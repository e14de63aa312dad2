"""Linears as library products, alone or with what follows them.

Shape letters: M rows of all leading dims, K and N widths.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from metainfer.backends.kernel import Query
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.codes import Codes
from metainfer.backends.torch.layouts import Int4Groups, RowScaled
from metainfer.backends.torch.quantize import quantize
from metainfer.backends.torch.tensors import BlockTensors
from metainfer.ir.dtypes import FP8_ROW, Block

Run = Callable[[TorchCall], None]
aten: Any = torch.ops.aten
mkldnn: Any = torch.ops.mkldnn
_ALIGNMENT = 64


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _finish(call: TorchCall, y: torch.Tensor) -> None:
    """Store a product [M, N'] with the bias of operand 2, pads cut off."""
    out = call.outputs[0]
    y = y[:, : out.shape[-1]]
    out.copy_((y + call.inputs[2] if len(call.inputs) > 2 else y).view(out.shape))


def linear(call: TorchCall) -> None:
    """``x w^T`` plus bias by one product of equal element types.

    Shapes: x [..., K], weight [N, K], bias [N] -> [..., N].
    """
    x, weight, *bias = call.inputs
    out = call.outputs[0].view(-1, weight.shape[0])
    if bias:
        torch.addmm(bias[0], _matrix(x), weight.t(), out=out)
    else:
        torch.mm(_matrix(x), weight.t(), out=out)


def linear_add(call: TorchCall) -> None:
    """A linear and the add that follows it, as the product's starting value."""
    x, weight = call.inputs[:2]
    other = call.inputs[2].expand(call.outputs[0].shape).reshape(-1, weight.shape[0])
    out = call.outputs[0].view(-1, weight.shape[0])
    if out.device.type == "cpu" and out.dtype == torch.float32:
        # NOTE: the CPU library adds every partial product to the starting value, each time rounded
        # at its size; residuals of trained models are a thousand times larger than the product.
        torch.mm(_matrix(x), weight.t(), out=out)
        out.add_(other)
        return
    torch.addmm(other, _matrix(x), weight.t(), out=out)


def linear_activation(use_gelu: bool) -> Run:
    """A linear with bias and its ReLU or GELU, as the product's epilogue."""

    def run(call: TorchCall) -> None:
        x, weight, bias = call.inputs
        out = call.outputs[0].view(-1, weight.shape[0])
        aten._addmm_activation.out(bias, _matrix(x), weight.t(), use_gelu=use_gelu, out=out)

    return run


def linear_mkldnn(attr: str = "none", algorithm: str = "none") -> Run:
    """A linear by a weight that mkldnn packed, with an activation of its own."""

    def run(call: TorchCall) -> None:
        x, weight, *bias = call.inputs
        made = mkldnn._linear_pointwise(
            _matrix(x), weight, bias[0] if bias else None, attr, [], algorithm
        )
        call.outputs[0].copy_(made.view(call.outputs[0].shape))

    return run


def linear_add_mkldnn(call: TorchCall) -> None:
    """A linear by a weight that mkldnn packed, and the add that follows it."""
    x, weight, *bias, other = call.inputs
    residual = other.expand(call.outputs[0].shape).reshape(-1, call.outputs[0].shape[-1])
    made = mkldnn._linear_pointwise.binary(
        _matrix(x), residual, weight, bias[0] if bias else None, "add"
    )
    call.outputs[0].copy_(made.view(call.outputs[0].shape))


def _padded_rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """Activations [M, width], padded with zeros and aligned as vector loads need them."""
    rows = _matrix(x)
    extra = width - rows.shape[1]
    if extra:
        return functional.pad(rows, (0, extra))
    rows = rows.contiguous()
    # NOTE: the int8 product of CPUs crashes on rows that its aligned loads do not fit; torch's own
    # allocations are aligned, slices of an arena or of numpy memory need not be.
    return rows.clone() if rows.data_ptr() % _ALIGNMENT else rows


def linear_int8(call: TorchCall) -> None:
    """A linear by 8-bit codes with a scale per row, activations as they are."""
    weight: RowScaled = call.inputs[1]
    rows = _padded_rows(call.inputs[0], weight.codes.shape[1])
    _finish(call, aten._weight_int8pack_mm(rows, weight.codes, weight.scales))


def linear_int4(call: TorchCall) -> None:
    """A linear by 4-bit codes in groups, activations as they are."""
    weight: Int4Groups = call.inputs[1]
    width = weight.scale_zeros.shape[0] * weight.group
    rows = _padded_rows(call.inputs[0], width)
    _finish(
        call,
        aten._weight_int4pack_mm_for_cpu(rows, weight.packed, weight.group, weight.scale_zeros),
    )


def linear_fp8(call: TorchCall) -> None:
    """A linear of e4m3 codes by e4m3 codes, a scale per row on both sides.

    Activations are rounded here: each row's largest magnitude becomes the largest code.
    """
    weight: RowScaled = call.inputs[1]
    rows = _padded_rows(call.inputs[0], weight.codes.shape[1])
    codes, scales = quantize(rows, FP8_ROW)
    _scaled_product(codes, weight.codes, scales, weight.scales[None, :], call)


def linear_fp8_rounded(call: TorchCall) -> None:
    """The same product of activations that are codes already, a scale a row."""
    x: BlockTensors = call.inputs[0]
    weight: RowScaled = call.inputs[1]
    _scaled_product(
        _matrix(x.codes), weight.codes, _matrix(x.scales), weight.scales[None, :], call
    )


def _scaled_product(
    codes: torch.Tensor, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor,
    call: TorchCall,
) -> None:  # fmt: skip
    """A product of scaled codes [M, K] and [N', K]: in place of the result unless pads are cut."""
    out = call.outputs[0].view(-1, call.outputs[0].shape[-1])
    wide = torch.bfloat16
    if out.shape[1] != weight.shape[0] or out.dtype is not wide:
        _finish(call, aten._scaled_mm(codes, weight.t(), left, right, out_dtype=wide))
        return
    aten._scaled_mm.out(codes, weight.t(), left, right, out_dtype=wide, out=out)
    if len(call.inputs) > 2:
        out.add_(call.inputs[2])


def linear_fp8_blocks(call: TorchCall) -> None:
    """A product of codes by codes, scales of 128 numbers of a row by those of 128 x 128.

    The library wants the scales of the activations column by column: they are turned in scratch.
    """
    x: BlockTensors = call.inputs[0]
    weight: Codes = call.inputs[1]
    codes, scales = _matrix(x.codes), _matrix(x.scales)
    assert call.workspace is not None
    raw = call.workspace[: scales.numel() * scales.element_size()]
    turned = raw.view(torch.float32).view(scales.shape[1], scales.shape[0])
    turned.copy_(scales.t())
    _scaled_product(
        codes, weight.codes.view(torch.float8_e4m3fn), turned.t(), weight.scales.t(), call
    )


def turned_scales_bytes(query: Query) -> int:
    """Scratch of `linear_fp8_blocks`: the scales of the activations."""
    type_ = query.tensor(0)
    assert isinstance(type_.dtype, Block)
    shape = tuple(query.upper(n) for n in type_.shape)
    return math.prod(type_.dtype.scale_shape(shape)) * torch.float32.itemsize


# Numbers that are widened at once: a few MiB, so that they are read back from the cache.
_CODES_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 24}


def linear_codes(call: TorchCall) -> None:
    """A linear by a weight that stays in narrow codes: widened part by part, at each call."""
    x, weight, *bias = call.inputs
    rows, out = _matrix(x), call.outputs[0].view(-1, weight.shape[0])
    for start, stop in weight.spans(_CODES_AT_ONCE[x.device.type]):
        part = weight.rows(start, stop).to(x.dtype)
        torch.mm(rows, part.t(), out=out[:, start:stop])
    if bias:
        out.add_(bias[0])
