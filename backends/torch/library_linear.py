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
from metainfer.ir.dtypes import FP8_GROUP, FP8_ROW

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
    """A linear and the add that follows it, as the product's starting value.

    What is added may lie where the result goes: then nothing is copied.
    """
    x, weight = call.inputs[:2]
    out = call.outputs[0].view(-1, weight.shape[0])
    is_there = call.inputs[2].data_ptr() == out.data_ptr()
    # The same tensor, not only the same memory: by that the library knows that it need not copy.
    other = out if is_there else call.inputs[2].expand(call.outputs[0].shape).reshape(out.shape)
    if out.device.type == "cpu" and out.dtype == torch.float32:
        # NOTE: the CPU library adds every partial product to the starting value, each time rounded
        # at its size; residuals of trained models are a thousand times larger than the product.
        product = torch.mm(_matrix(x), weight.t(), **({} if is_there else {"out": out}))
        torch.add(product, other, out=out)
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
    _scaled_product(_matrix(x.codes), weight.codes, _matrix(x.scales), weight.scales[None, :], call)


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


# Rows that the library's product of scaled blocks takes at once: columns of scales of 16 bytes.
BLOCK_ROWS = 4


def linear_fp8_blocks(call: TorchCall) -> None:
    """A product of codes by codes, scales of 128 numbers of a row by those of 128 x 128.

    The library wants the scales of the activations column by column, and rows by the four. Rows
    that fill these up are what happens to lie behind: they are computed into room behind the
    result; where there is none, the last rows are multiplied in scratch.
    """
    x: BlockTensors = call.inputs[0]
    weight: Codes = call.inputs[1]
    codes, scales = _matrix(x.codes), _matrix(x.scales)
    out = call.outputs[0].view(-1, call.outputs[0].shape[-1])
    rows = codes.shape[0]
    most = -(-rows // BLOCK_ROWS) * BLOCK_ROWS
    has_room = _has_room(codes, most) and most * out.shape[1] * out.itemsize <= call.room(0)
    whole = most if has_room else rows // BLOCK_ROWS * BLOCK_ROWS
    assert call.workspace is not None
    last_codes, last_out, rest = _last_rows(call.workspace, codes.shape[1], out.shape[1])
    if whole:
        _block_product(_longer(codes, whole), scales[:whole], weight, rest, _longer(out, whole))
    if whole < rows:
        count = rows - whole
        last_codes[:count].copy_(codes[whole:])
        _block_product(last_codes, scales[whole:], weight, rest, last_out)
        out[whole:].copy_(last_out[:count])


def _has_room(x: torch.Tensor, rows: int) -> bool:
    """Whether so many rows lie within the memory that a matrix is a part of."""
    stop = (x.storage_offset() + rows * x.shape[1]) * x.itemsize
    return stop <= x.untyped_storage().nbytes()


def _longer(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of a dense matrix, with those that lie behind it."""
    return x.as_strided((rows, x.shape[1]), (x.shape[1], 1))


def _last_rows(
    scratch: torch.Tensor, inner: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scratch for the last rows of a product: their codes, their results, and what is left."""
    codes, made = BLOCK_ROWS * inner, BLOCK_ROWS * columns * torch.bfloat16.itemsize
    first, second, rest = scratch.tensor_split((codes, codes + made))
    return (
        first.view(torch.float8_e4m3fn).view(BLOCK_ROWS, inner),
        second.view(torch.bfloat16).view(BLOCK_ROWS, columns),
        rest,
    )


def _block_product(
    codes: torch.Tensor, scales: torch.Tensor, weight: Codes, scratch: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """The library's product; scales of fewer rows than there are codes leave the others open."""
    rows, groups = codes.shape[0], scales.shape[1]
    raw = scratch[: rows * groups * torch.float32.itemsize]
    turned = raw.view(torch.float32).view(groups, rows)
    turned[:, : scales.shape[0]].copy_(scales.t())
    aten._scaled_mm.out(
        codes, weight.codes.view(torch.float8_e4m3fn).t(), turned.t(), weight.scales.t(),
        out_dtype=out.dtype, out=out,
    )  # fmt: skip


def block_product_scratch(query: Query) -> int:
    """Scratch bytes of `linear_fp8_blocks`: last rows, and the scales of all."""
    *lead, inner = (query.upper(n) for n in query.tensor(0).shape)
    columns = query.tensor(1).shape[0].static
    rows = -(-math.prod(lead) // BLOCK_ROWS) * BLOCK_ROWS
    last = BLOCK_ROWS * (inner + columns * torch.bfloat16.itemsize)
    return last + rows * -(-inner // FP8_GROUP.block[0]) * torch.float32.itemsize


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
