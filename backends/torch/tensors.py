"""Torch tensors from numpy arrays and IR types, and the plain form of block-quantized weights."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from metainfer.ir.arena import SCALES_ALIGNMENT
from metainfer.ir.dtypes import Block, BlockArray, DType, Scalar
from metainfer.ir.errors import Unsupported

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    # 4-bit integers take a byte each, as in the references.
    "i4": torch.int8,
    "u4": torch.uint8,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "f8e8m0": torch.float8_e8m0fnu,
}
# Integer types of the width of a float that numpy knows only through ml_dtypes.
_CARRIERS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16)}
_F4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's name of an element type.

    Raises: Unsupported for block formats and for f4e2m1, which torch has no unpacked type for.
    """
    found = TORCH_DTYPES.get(dtype.name)
    if found is None:
        raise Unsupported(
            f"torch has no element type for {dtype}",
            advice="keep it as a weight; block formats are read through a layout",
        )
    return found


def to_torch(array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    """A torch tensor of the same bytes; shares memory where the array is writable.

    f4e2m1 comes out as its codes, uint8.
    """
    dense = np.ascontiguousarray(array).reshape(array.shape)
    if not dense.flags.writeable:
        dense = dense.copy()
    name = dense.dtype.name
    if dense.dtype.kind != "V" and not name.startswith(("bfloat", "float8", "float4")):
        return torch.from_numpy(dense)
    carrier, torch_carrier = _CARRIERS[dense.dtype.itemsize]
    raw = torch.from_numpy(dense.view(carrier))
    target = next((t for t in _by_numpy(name)), torch_carrier)
    return raw.view(target)


def _by_numpy(name: str) -> tuple[torch.dtype, ...]:
    known = {
        "bfloat16": torch.bfloat16,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
        "float8_e8m0fnu": torch.float8_e8m0fnu,
    }
    return (known[name],) if name in known else ()


def to_numpy(tensor: torch.Tensor, dtype: Scalar) -> np.ndarray[Any, np.dtype[Any]]:
    """A numpy array of the scalar type's numpy dtype, bit for bit."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        host = host.view(_CARRIERS[host.element_size()][1])
        return host.numpy().view(dtype.numpy)
    array = host.numpy()
    return array.view(dtype.numpy) if dtype.name == "f4e2m1" else array.astype(dtype.numpy)


def widen(x: torch.Tensor) -> torch.Tensor:
    """Floats narrower than f32 as f32, everything else as it is: what references compute in."""
    if not x.dtype.is_floating_point or x.dtype in (torch.float32, torch.float64):
        return x
    return x.float()


@dataclass(frozen=True)
class BlockTensors:
    """A block-quantized weight in plain order, or activations: what "" makes of a BlockArray.

    Shapes: codes [*shape] (a byte each; f4e2m1 as its code 0..15), scales and offsets
    [*format.scale_shape(shape)], row_scales [*shape[:-1], 1].
    """

    format: Block
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the codes stand for."""
        return tuple(self.codes.shape)

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        """Resident bytes."""
        parts = (self.codes, self.scales, self.offsets, self.row_scales)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "BlockTensors":
        """The same weight on another device."""

        def moved(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t.to(device, non_blocking=non_blocking)

        offsets, row_scales = moved(self.offsets), moved(self.row_scales)
        codes = self.codes.to(device, non_blocking=non_blocking)
        scales = self.scales.to(device, non_blocking=non_blocking)
        return BlockTensors(self.format, codes, scales, offsets, row_scales)

    def dequantize(self) -> torch.Tensor:
        """The float32 values, computed as `ir.dtypes.BlockArray.dequantize` does."""
        values = self._code_values() * self._spread(self.scales.float())
        if self.row_scales is not None:
            values = values * self.row_scales.float()
        return values if self.offsets is None else values + self._spread(self.offsets.float())

    def part(self, index: int) -> "BlockTensors":
        """One of the tensors that are stacked along dim 0; blocks lie within each."""
        sides = (self.offsets, self.row_scales)
        offsets, row_scales = (None if t is None else t[index] for t in sides)
        codes, scales = self.codes[index], self.scales[index]
        return BlockTensors(self.format, codes, scales, offsets, row_scales)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Float32 values of some rows of a matrix [V, D].

        Shapes: index [...] -> [..., D].
        """
        *heights, width = self.format.block
        height = heights[-1] if heights else 1
        # One block over all rows keeps a single row of scales.
        at = torch.zeros_like(index) if height == 0 else index // height
        row_format = replace(self.format, block=(width,))
        offsets = None if self.offsets is None else self.offsets[at]
        row_scales = None if self.row_scales is None else self.row_scales[index]
        found = BlockTensors(row_format, self.codes[index], self.scales[at], offsets, row_scales)
        return found.dequantize()

    def to_blocks(self) -> BlockArray:
        """The BlockArray that this was made from."""
        offsets = None
        if self.offsets is not None and self.format.offset is not None:
            offsets = to_numpy(self.offsets, self.format.offset)
        row_scales = None
        if self.row_scales is not None and self.format.row is not None:
            row_scales = to_numpy(self.row_scales, self.format.row)
        codes = to_numpy(self.codes, self.format.element)
        scales = to_numpy(self.scales, self.format.scale)
        return BlockArray(self.format, codes, scales, offsets, row_scales)

    def _code_values(self) -> torch.Tensor:
        if self.format.element.name != "f4e2m1":
            return self.codes.float()
        table = torch.tensor([*_F4_VALUES, *(-v for v in _F4_VALUES)], device=self.codes.device)
        return table[self.codes.long()]

    def _spread(self, per_block: torch.Tensor) -> torch.Tensor:
        lead = len(self.shape) - len(self.format.block)
        for axis, extent in enumerate(self.format.block, start=lead):
            if extent:
                per_block = per_block.repeat_interleave(extent, dim=axis)
                # The last block of a dim may be short.
                per_block = per_block.narrow(axis, 0, self.shape[axis])
        return per_block


def block_view(raw: torch.Tensor, format: Block, shape: tuple[int, ...]) -> BlockTensors:
    """Activations of a block format in memory that a plan laid out: codes, then scales.

    Shapes: raw u8, at least as many as `ir.arena` keeps for the type.
    Raises: Unsupported for codes of less than a byte, and for offsets.
    """
    if format.element.bits != 8 or format.offset is not None or format.row is not None:
        raise Unsupported(
            f"activations of {format}", advice="codes of a byte each, without offsets, are held"
        )
    count = math.prod(shape)
    start = -(-count // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
    blocks, scale = format.scale_shape(shape), torch_dtype(format.scale)
    stop = start + math.prod(blocks) * scale.itemsize
    codes = raw[:count].view(torch_dtype(format.element)).view(shape)
    return BlockTensors(format, codes, raw[start:stop].view(scale).view(blocks))


PlainWeight = torch.Tensor | BlockTensors


def plain_weight(weight: np.ndarray[Any, np.dtype[Any]] | BlockArray) -> PlainWeight:
    """A weight in plain order, as operands without a layout are given to kernels."""
    if not isinstance(weight, BlockArray):
        return to_torch(weight)
    sides = (weight.offsets, weight.row_scales)
    offsets, row_scales = (None if a is None else to_torch(a) for a in sides)
    codes, scales = to_torch(weight.codes), to_torch(weight.scales)
    return BlockTensors(weight.format, codes, scales, offsets, row_scales)


def dense_values(weight: PlainWeight) -> torch.Tensor:
    """A plain weight's values, f32 (f64 stays f64)."""
    return weight.dequantize() if isinstance(weight, BlockTensors) else widen(weight)
