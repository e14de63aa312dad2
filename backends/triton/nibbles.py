"""Packing of weights with 4-bit integer codes: two in a byte, the even one in the low half."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from metainfer.backends.layout import Layout, Weight
from metainfer.backends.torch.tensors import BlockTensors, plain_weight, to_numpy, torch_dtype
from metainfer.ir.dtypes import Block, BlockArray
from metainfer.ir.errors import PlanError
from metainfer.ir.types import TensorType

NAME = "triton.nibbles"


@dataclass(frozen=True)
class Nibbles:
    """4-bit codes in pairs.

    Shapes: codes u8 [..., N, ceil(K / 2)], scales and offsets [..., N, ceil(K / group)].

    Attributes:
        format: what the codes mean.
        codes: pairs of codes.
        scales: of each group.
        offsets: of each group, or None.
        width: elements of a row.
    """

    format: Block
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    width: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Nibbles":
        """The same weight on another device."""

        def moved(t: torch.Tensor) -> torch.Tensor:
            return t.to(device, non_blocking=non_blocking)

        offsets = None if self.offsets is None else moved(self.offsets)
        return Nibbles(self.format, moved(self.codes), moved(self.scales), offsets, self.width)


def takes(dtype: object) -> bool:
    """Whether a format has 4-bit codes in groups along the last dim."""
    return (
        isinstance(dtype, Block)
        and dtype.element.name in ("u4", "i4")
        and dtype.row is None
        and len(dtype.block) == 1
        and dtype.block[0] > 1
    )


def pack(weight: Weight) -> Nibbles:
    """Put the codes in pairs.

    Raises: PlanError for a weight of another kind of format.
    """
    plain = plain_weight(weight)
    if not isinstance(plain, BlockTensors) or not takes(plain.format):
        raise PlanError(f"layout {NAME} takes formats of 4-bit integers in groups only")
    width = plain.shape[-1]
    codes = functional.pad(plain.codes.view(torch.uint8) & 15, (0, width % 2))
    pairs = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return Nibbles(plain.format, pairs.contiguous(), plain.scales, plain.offsets, width)


def unpack(packed: Nibbles, type_: TensorType) -> Weight:
    """The weight that was packed."""
    format_ = packed.format
    codes = torch.stack((packed.codes & 15, packed.codes >> 4), dim=-1).flatten(-2)
    codes = codes[..., : packed.width].contiguous()
    if format_.element.kind == "int":
        codes = ((codes ^ 8).to(torch.int8) - 8).to(torch.int8)
    offsets = None
    if packed.offsets is not None and format_.offset is not None:
        offsets = to_numpy(packed.offsets, format_.offset)
    scales = to_numpy(packed.scales, format_.scale)
    return BlockArray(format_, to_numpy(codes, format_.element), scales, offsets)


def typed(type_: TensorType) -> Nibbles:
    """The packed form with types and shapes only."""
    format_, shape = type_.dtype, type_.concrete({})
    if not isinstance(format_, Block):
        raise PlanError(f"{type_} is no block format")
    scales = format_.scale_shape(shape)

    def empty(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    pairs = empty((*shape[:-1], (shape[-1] + 1) // 2), torch.uint8)
    offsets = None if format_.offset is None else empty(scales, torch_dtype(format_.offset))
    return Nibbles(format_, pairs, empty(scales, torch_dtype(format_.scale)), offsets, shape[-1])


def num_bytes(type_: TensorType) -> int:
    """Resident bytes."""
    form = typed(type_)
    parts = [form.codes, form.scales, *([form.offsets] if form.offsets is not None else [])]
    return sum(math.prod(p.shape) * p.element_size() for p in parts)


LAYOUT = Layout(NAME, pack, unpack, num_bytes, typed)
