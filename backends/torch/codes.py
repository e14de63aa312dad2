"""Weights kept as narrow float codes and widened at each call: the layout ``torch.codes``.

Two 4-bit codes share a byte, the first in the low half. On CPUs codes are looked up in numpy, two
at a time: torch converts one fp8 number in 6.5 ns there, the look-up takes 1.3 ns (AVX2 EPYC, one
thread of two busy ones).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from metainfer.backends.layout import Layout, Weight
from metainfer.backends.torch.tensors import BlockTensors, plain_weight, to_numpy, torch_dtype
from metainfer.ir.dtypes import F4E2M1, F8E4M3, Block, BlockArray, DType, Scalar
from metainfer.ir.errors import PlanError
from metainfer.ir.types import TensorType

NAME = "torch.codes"


def is_codes_format(dtype: DType) -> bool:
    """Whether the layout holds a format: e4m3 or e2m1 codes, no offsets."""
    return isinstance(dtype, Block) and dtype.element in (F8E4M3, F4E2M1) and dtype.offset is None


def has_codes(element: str) -> Callable[[DType], bool]:
    """Whether the layout holds a format, and its codes are of one type."""

    def holds(dtype: DType) -> bool:
        return is_codes_format(dtype) and isinstance(dtype, Block) and str(dtype.element) == element

    return holds


@dataclass(frozen=True)
class Codes:
    """A weight as bytes of codes and its scales.

    Shapes: codes u8 [*lead, bytes of a row], scales [*format.scale_shape(shape)], row_scales
    [*lead, 1].
    """

    format: Block
    codes: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, ...]
    row_scales: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Codes":
        """The same weight on another device."""

        def moved(t: torch.Tensor) -> torch.Tensor:
            return t.to(device, non_blocking=non_blocking)

        row_scales = None if self.row_scales is None else moved(self.row_scales)
        codes, scales = moved(self.codes), moved(self.scales)
        return replace(self, codes=codes, scales=scales, row_scales=row_scales)

    def part(self, index: int) -> "Codes":
        """One of a stack of matrices: [E, N, K] -> [N, K]."""
        # Scales of leading dims are one each, as the dims themselves.
        row_scales = None if self.row_scales is None else self.row_scales[index]
        codes, scales = self.codes[index], self.scales[index]
        return Codes(self.format, codes, scales, self.shape[1:], row_scales)

    def spans(self, numbers: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows of a matrix that hold about so many numbers, each of whole blocks."""
        count, width = self.shape
        high = max(self.format.extents(2)[0], 1)
        step = max(numbers // width // high, 1) * high
        for start in range(0, count, step):
            yield start, min(start + step, count)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Float32 values of rows of a matrix [N, K]: [stop - start, K]."""
        width = self.shape[-1]
        values = _values(self.codes[start:stop], self.format.element, width)
        high, wide = self.format.extents(2)
        first = start // high if high else 0
        last = -(-stop // high) if high else 1
        scales = self.scales[first:last].float()
        if high != 1:
            # Scales of blocks of rows, one for each row.
            at = torch.arange(start, stop, device=scales.device)
            scales = scales[(at // high - first) if high else torch.zeros_like(at)]
        if wide == 0 or wide >= width:
            values.mul_(scales[:, :1])
        elif width % wide:
            values.mul_(scales.repeat_interleave(wide, 1)[:, :width])
        else:
            values.view(stop - start, -1, wide).mul_(scales[:, :, None])
        return values if self.row_scales is None else values.mul_(self.row_scales[start:stop])


@cache
def _table(element: str, pairs: bool) -> np.ndarray[Any, np.dtype[Any]]:
    """Values by byte (fp4: two of them), or by two bytes of fp8; two f32 as one f64."""
    bytes_ = np.arange(256, dtype=np.uint8)
    if element == "f4e2m1":
        halves = np.stack([bytes_ & 15, bytes_ >> 4], -1).view(ml_dtypes.float4_e2m1fn)
        return np.ascontiguousarray(halves.astype(np.float32)).view(np.float64)[:, 0]
    single = bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if not pairs:
        return single
    # Little-endian: the first code is the low byte.
    both = np.stack([np.tile(single, 256), np.repeat(single, 256)], -1)
    return np.ascontiguousarray(both).view(np.float64)[:, 0]


def _values(codes: torch.Tensor, element: Scalar, width: int) -> torch.Tensor:
    """Float32 values of bytes [R, bytes of a row]: [R, width]."""
    if codes.is_cuda:
        return _values_on_gpu(codes, element)[:, :width]
    bytes_ = codes.numpy()
    pairs = element == F4E2M1 or (width % 2 == 0 and bytes_.flags.c_contiguous)
    index = bytes_.view(np.uint16) if pairs and element != F4E2M1 else bytes_
    # Every index is in range; any other mode than "raise" saves a copy.
    found = np.take(_table(element.name, pairs), index, mode="clip")
    return torch.from_numpy(found.view(np.float32))[:, :width]


def _values_on_gpu(codes: torch.Tensor, element: Scalar) -> torch.Tensor:
    if element != F4E2M1:
        return codes.view(torch.float8_e4m3fn).float()
    table = torch.from_numpy(_table(element.name, True).view(np.float32).reshape(256, 2).copy())
    found = table.to(codes.device)[codes.int()]
    return found.reshape(*codes.shape[:-1], -1)


# --- the layout -----------------------------------------------------------------------------------


def _pack(weight: Weight) -> Codes:
    plain = plain_weight(weight)
    if not isinstance(plain, BlockTensors) or not is_codes_format(plain.format):
        raise PlanError(f"layout {NAME} takes e4m3 and e2m1 formats without offsets only")
    sides = (plain.scales, plain.shape, plain.row_scales)
    if plain.format.element != F4E2M1:
        return Codes(plain.format, plain.codes.view(torch.uint8), *sides)
    odd = plain.shape[-1] % 2
    codes = torch.nn.functional.pad(plain.codes, (0, odd)) if odd else plain.codes
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return Codes(plain.format, packed.contiguous(), *sides)


def _unpack(packed: Codes, type_: TensorType) -> BlockArray:
    codes = packed.codes.cpu()
    if packed.format.element == F4E2M1:
        halves = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        codes = halves[..., : packed.shape[-1]].contiguous()
    array = codes.numpy().view(packed.format.element.numpy).reshape(packed.shape)
    row_scales = None
    if packed.row_scales is not None and packed.format.row is not None:
        row_scales = to_numpy(packed.row_scales, packed.format.row)
    scales = to_numpy(packed.scales, packed.format.scale)
    return BlockArray(packed.format, array, scales, None, row_scales)


def _num_bytes(type_: TensorType) -> int:
    shape, format_ = type_.concrete({}), type_.dtype
    if not isinstance(format_, Block):
        raise PlanError(f"{type_} is no block format")
    *lead, width = shape
    row = -(-width * format_.element.bits // 8)
    scales = format_.scale_shape(shape)
    rows = int(np.prod(lead)) * (row + (format_.row.bits // 8 if format_.row else 0))
    return rows + int(np.prod(scales)) * format_.scale.bits // 8


def _typed(type_: TensorType) -> Codes:
    """The packed form without contents, for kernels that are compiled by themselves."""
    shape, format_ = type_.concrete({}), type_.dtype
    if not isinstance(format_, Block):
        raise PlanError(f"{type_} is no block format")
    row = -(-shape[-1] * format_.element.bits // 8)
    codes = torch.empty(*shape[:-1], row, dtype=torch.uint8, device="meta")
    scale = torch_dtype(format_.scale)
    scales = torch.empty(format_.scale_shape(shape), dtype=scale, device="meta")
    row_scales = None
    if format_.row is not None:
        row_type = torch_dtype(format_.row)
        row_scales = torch.empty(*shape[:-1], 1, dtype=row_type, device="meta")
    return Codes(format_, codes, scales, shape, row_scales)


CODES_LAYOUT = Layout(NAME, _pack, _unpack, _num_bytes, _typed)
