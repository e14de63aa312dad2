"""Packings of weights for library products, each with its exact inverse.

A packed weight is a torch tensor, or a frozen record of tensors with ``to(device)``. Pads are
part of the packing: a record remembers the true shape.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from metainfer.backends.layout import Layout, LayoutRegistry, Weight
from metainfer.backends.torch.codes import CODES_LAYOUT
from metainfer.backends.torch.tensors import (
    BlockTensors,
    PlainWeight,
    dense_values,
    plain_weight,
    to_numpy,
)
from metainfer.ir.dtypes import F32, Block, BlockArray, DType, Scalar
from metainfer.ir.errors import PlanError
from metainfer.ir.types import TensorType

# Widest vectors of the int8 product's loops over K; a rest crashes it on bf16 activations.
INT8_K = 32
INT4_N = 16
INT4_GROUPS = (32, 64, 128, 256)
FP8_MULTIPLE = 16


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def _shape(type_: TensorType) -> tuple[int, ...]:
    return type_.concrete({})


# --- plain ------------------------------------------------------------------------------------


def _plain_bytes(type_: TensorType) -> int:
    def stored(dtype: Scalar, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * max(dtype.bits, 8) // 8

    shape, dtype = _shape(type_), type_.dtype
    if isinstance(dtype, Scalar):
        return stored(dtype, shape)
    blocks = dtype.scale_shape(shape)
    offsets = stored(dtype.offset, blocks) if dtype.offset else 0
    rows = stored(dtype.row, shape[:-1]) if dtype.row else 0
    return stored(dtype.element, shape) + stored(dtype.scale, blocks) + offsets + rows


def _unpack_plain(packed: PlainWeight, type_: TensorType) -> Weight:
    if isinstance(packed, BlockTensors):
        return packed.to_blocks()
    if isinstance(type_.dtype, Block):
        raise PlanError(f"a plain tensor where {type_} is packed")
    return to_numpy(packed, type_.dtype)


PLAIN_LAYOUT = Layout("torch.plain", plain_weight, _unpack_plain, _plain_bytes)


# --- dequantized ------------------------------------------------------------------------------


def _dense_layout(name: str, dtype: torch.dtype) -> Layout:
    """Any weight as plain numbers of one float type; the inverse gives the widened values."""

    def pack(weight: Weight) -> torch.Tensor:
        return dense_values(plain_weight(weight)).to(dtype)

    def unpack(packed: torch.Tensor, type_: TensorType) -> Weight:
        return to_numpy(packed.float(), F32)

    def num_bytes(type_: TensorType) -> int:
        return math.prod(_shape(type_)) * dtype.itemsize

    return Layout(name, pack, unpack, num_bytes)


def _pack_mkldnn(weight: Weight) -> torch.Tensor:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise PlanError(
            "this CPU has no bf16 products for the packing torch.mkldnn_bf16",
            advice="compile for this machine: the plan was made for one with avx512_bf16",
        )
    values = dense_values(plain_weight(weight)).to(torch.bfloat16)
    return torch.ops.mkldnn._reorder_linear_weight(values)


def _unpack_mkldnn(packed: torch.Tensor, type_: TensorType) -> Weight:
    return to_numpy(packed.to_dense().float(), F32)


MKLDNN_LAYOUT = Layout(
    "torch.mkldnn_bf16", _pack_mkldnn, _unpack_mkldnn, lambda t: 2 * math.prod(_shape(t))
)


# --- rows of 8-bit codes ----------------------------------------------------------------------


@dataclass(frozen=True)
class RowScaled:
    """8-bit codes with one scale per output row, padded at the end of both dims.

    Shapes: codes [N', K'], scales [N'] as the product reads them, stored_scales as given: [N, 1],
        or [1, 1] where one scale is that of all rows.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    stored_scales: torch.Tensor
    shape: tuple[int, int]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RowScaled":
        """The same weight on another device."""
        codes, scales, stored = (
            t.to(device, non_blocking=non_blocking)
            for t in (self.codes, self.scales, self.stored_scales)
        )
        return RowScaled(codes, scales, stored, self.shape)


def _row_blocks(weight: Weight, element: str, layout: str) -> BlockTensors:
    plain = plain_weight(weight)
    if (
        not isinstance(plain, BlockTensors)
        or plain.format.element.name != element
        or plain.format.block not in ((0,), (0, 0))
        or plain.format.offset is not None
        or len(plain.shape) != 2
    ):
        raise PlanError(f"layout {layout} takes matrices of {element}/row and /tensor only")
    return plain


def _row_layout(
    name: str, element: str, multiples: tuple[int, int], scale_dtype: torch.dtype
) -> Layout:
    """Row-scaled 8-bit codes, N and K padded to multiples with zeros."""

    def pack(weight: Weight) -> RowScaled:
        plain = _row_blocks(weight, element, name)
        rows, columns = plain.shape
        extra = [-n % m for n, m in zip((rows, columns), multiples, strict=True)]
        codes = plain.codes
        if any(extra):
            # Zero bytes are zero in both 8-bit types.
            bytes_ = functional.pad(codes.view(torch.uint8), (0, extra[1], 0, extra[0]))
            codes = bytes_.view(plain.codes.dtype)
        # One scale for the tensor is written out, once for each row.
        by_row = plain.scales.float().expand(rows, 1).flatten()
        scales = functional.pad(by_row, (0, extra[0]))
        return RowScaled(codes, scales.to(scale_dtype), plain.scales, (rows, columns))

    def unpack(packed: RowScaled, type_: TensorType) -> Weight:
        format_ = _block_of(type_)
        rows, columns = packed.shape
        codes = to_numpy(packed.codes[:rows, :columns].contiguous(), format_.element)
        return BlockArray(format_, codes, to_numpy(packed.stored_scales, format_.scale))

    def num_bytes(type_: TensorType) -> int:
        rows, columns = _shape(type_)
        padded = round_up(rows, multiples[0]), round_up(columns, multiples[1])
        stored = _block_of(type_).scale_shape((rows, columns))[0]
        scales = padded[0] * scale_dtype.itemsize + stored * _block_of(type_).scale.bits // 8
        return math.prod(padded) + scales

    return Layout(name, pack, unpack, num_bytes)


def _block_of(type_: TensorType) -> Block:
    if isinstance(type_.dtype, Block):
        return type_.dtype
    raise PlanError(f"{type_} is no block format")


# --- groups of 4-bit codes --------------------------------------------------------------------


@dataclass(frozen=True)
class Int4Groups:
    """4-bit codes as ``aten::_weight_int4pack_mm_for_cpu`` reads them, N and K padded.

    Shapes: packed [N', K'/2] in an order of the CPU's own, scale_zeros bf16 [K'/group, N', 2] with
    value = (code - 8) * scale + zero; scales and offsets as given.
    """

    format: Block
    packed: torch.Tensor
    scale_zeros: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    shape: tuple[int, int]

    @property
    def group(self) -> int:
        """Elements along K that share a scale."""
        return self.format.block[0]


def is_int4_group(dtype: DType) -> bool:
    """Whether a format can be packed in groups of 4-bit codes."""
    return (
        isinstance(dtype, Block)
        and dtype.row is None
        and len(dtype.block) == 1
        and dtype.block[0] in INT4_GROUPS
        and (dtype.element.name, dtype.offset is None) in (("i4", True), ("u4", False))
    )


def _pack_int4(weight: Weight) -> Int4Groups:
    plain = plain_weight(weight)
    if not isinstance(plain, BlockTensors) or not is_int4_group(plain.format):
        raise PlanError("layout torch.int4pack takes i4 and u4+offset formats of 32 to 256 only")
    rows, columns = plain.shape
    group = plain.format.block[0]
    extra_n, extra_k = -rows % INT4_N, -columns % group
    signed = plain.format.element.name == "i4"
    codes = plain.codes.int() + (8 if signed else 0)
    codes = functional.pad(codes, (0, extra_k, 0, extra_n))
    scales = plain.scales.float()
    zeros = torch.zeros_like(scales)
    if plain.offsets is not None:
        zeros = plain.offsets.float() + 8 * scales
    pairs = functional.pad(torch.stack([scales, zeros], -1), (0, 0, 0, 0, 0, extra_n))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)
    return Int4Groups(
        plain.format,
        packed,
        pairs.transpose(0, 1).to(torch.bfloat16).contiguous(),
        plain.scales,
        plain.offsets,
        (rows, columns),
    )


def _unpack_int4(packed: Int4Groups, type_: TensorType) -> Weight:
    # The order depends on the CPU; the product with the identity undoes it exactly: codes are small
    # integers and each sum has one term.
    blocks, padded_n, _ = packed.scale_zeros.shape
    padded_k = blocks * packed.group
    ones = torch.zeros(blocks, padded_n, 2)
    ones[..., 0] = 1
    codes = torch.ops.aten._weight_int4pack_mm_for_cpu(
        torch.eye(padded_k), packed.packed, packed.group, ones
    )
    rows, columns = packed.shape
    shifted = codes.t()[:rows, :columns] + (0 if packed.format.element.name == "i4" else 8)
    plain = BlockTensors(packed.format, shifted.contiguous(), packed.scales, packed.offsets)
    return plain_codes(plain)


def plain_codes(blocks: BlockTensors) -> BlockArray:
    """The BlockArray of a weight whose codes are held as floats."""
    element = torch.int8 if blocks.format.element.kind == "int" else torch.uint8
    return replace(blocks, codes=blocks.codes.round().to(element)).to_blocks()


def _int4_bytes(type_: TensorType) -> int:
    rows, columns = _shape(type_)
    format_ = _block_of(type_)
    padded_n, blocks = round_up(rows, INT4_N), -(-columns // format_.block[0])
    side = format_.scale.bits + (format_.offset.bits if format_.offset else 0)
    return padded_n * blocks * (format_.block[0] // 2 + 4) + rows * blocks * side // 8


INT4_LAYOUT = Layout("torch.int4pack", _pack_int4, _unpack_int4, _int4_bytes)
INT8_LAYOUT = _row_layout("torch.int8pack", "i8", (1, INT8_K), torch.bfloat16)
FP8_LAYOUT = _row_layout("cuda.fp8_cols", "f8e4m3", (FP8_MULTIPLE, FP8_MULTIPLE), torch.float32)
LAYOUTS: tuple[Layout, ...] = (
    PLAIN_LAYOUT,
    _dense_layout("torch.dense_f32", torch.float32),
    _dense_layout("torch.dense_bf16", torch.bfloat16),
    _dense_layout("torch.dense_f16", torch.float16),
    MKLDNN_LAYOUT,
    INT8_LAYOUT,
    INT4_LAYOUT,
    FP8_LAYOUT,
    CODES_LAYOUT,
)


def register_layouts(layouts: LayoutRegistry) -> None:
    """Register all packings of this backend."""
    for layout in LAYOUTS:
        layouts.add(layout)
