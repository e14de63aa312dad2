"""Element types: plain scalars and block-quantized formats, one definition each.

A block format stores each block of elements as small codes plus one scale (and maybe one
offset) per block; its value is ``code * scale + offset``. Text forms::

    f32  bf16  i8                   scalars
    i8/32:f16                       int8 codes, blocks of 32 in the last dim, f16 scales (GGUF Q8_0)
    u4/32:f16+f16                   unsigned 4-bit codes with an offset per block (GGUF Q4_1)
    f8e4m3/128x128:f32              fp8 with 128 x 128 blocks
    f8e4m3/128:f8e8m0               fp8 with blocks of 1 x 128 and power-of-two scales
    f4e2m1/32:f8e8m0                MXFP4
    f4e2m1/16:f8e4m3*f32            NVFP4: the scales of a row share a second one
    i8/row:f32                      one scale per row
    f8e4m3/tensor:f32               one scale per matrix (of a stack of matrices, one for each)

Values are exact products in float32; beyond its range they are infinite (code 6 at scale 2^127),
and the NaN codes of fp8 and of ue8m0 scales give NaN. With a second scale ``code * scale`` is exact
(even in 16 bits) and its product by the second one is rounded to float32. NVFP4 has one for the
tensor: here each row has its own, so that rows can be cut, joined and reordered like those of any
other format; that of a tensor is repeated.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.scalars import SCALARS
from metainfer.ir.scalars import Scalar as Scalar  # half of what a DType is

# Blocks that are whole dims, by their text.
_WHOLE = {(0,): "row", (0, 0): "tensor"}


@dataclass(frozen=True)
class Block:
    """A block-quantized format over the trailing dims of a tensor.

    Attributes:
        element: type of the codes.
        block: block extents over the last ``len(block)`` dims, leading ones of 1 left away; 0
            means the whole dim: (0,) is a "row", (0, 0) a "tensor".
        scale: type of the scale of each block.
        offset: type of the offset of each block, or None where the format is symmetric.
        row: type of the second scale, of a row (last dim), or None where there is none.

    Raises: TypeMismatch for extents that have no text form.
    """

    element: Scalar
    block: tuple[int, ...]
    scale: Scalar
    offset: Scalar | None = None
    row: Scalar | None = None

    def __post_init__(self) -> None:
        """Bring equal formats to one form: blocks of 1 x 128 are blocks of 128."""
        block = self.block
        while len(block) > 1 and block[0] == 1:
            block = block[1:]
        if not block or min(block) < 0 or (0 in block and block not in _WHOLE):
            raise TypeMismatch(
                f"blocks of {'x'.join(map(str, block)) or 'no extent'}",
                advice="extents are positive, or all of them are whole dims: /row or /tensor",
            )
        if self.row is not None and (self.offset is not None or len(block) > 1 or 0 in block):
            raise TypeMismatch(
                f"scales of rows beside those of blocks of {'x'.join(map(str, block))}",
                advice="a second scale is that of groups in a row, without offsets",
            )
        object.__setattr__(self, "block", block)

    def __str__(self) -> str:
        """Print the text form."""
        blocks = _WHOLE.get(self.block) or "x".join(map(str, self.block))
        offset = f"+{self.offset}" if self.offset else ""
        row = f"*{self.row}" if self.row else ""
        return f"{self.element}/{blocks}:{self.scale}{offset}{row}"

    @property
    def name(self) -> str:
        """The text form, so that every dtype has a name."""
        return str(self)

    @property
    def kind(self) -> str:
        """Block formats stand for real numbers."""
        return "float"

    @property
    def is_float(self) -> bool:
        """Block formats stand for real numbers."""
        return True

    @property
    def is_single(self) -> bool:
        """Whether a value is its code times one scale: no offset, no second scale."""
        return self.offset is None and self.row is None

    @property
    def bits(self) -> float:
        """Bits of one element with its share of its block's scales; those of rows are left out."""
        per_block = math.prod(self.block)
        if per_block == 0:
            return self.element.bits
        return (
            self.element.bits
            + (self.scale.bits + (self.offset.bits if self.offset else 0)) / per_block
        )

    def extents(self, rank: int) -> tuple[int, ...]:
        """Block extent in each of ``rank`` dims: 1 in leading ones, 0 where the dim is whole.

        Raises: TypeMismatch if the tensor has fewer dims than the block.
        """
        if rank < len(self.block):
            raise TypeMismatch(
                f"{self} needs at least {len(self.block)} dims, the tensor has {rank}"
            )
        return (1,) * (rank - len(self.block)) + self.block

    def whole_dims(self, rank: int) -> tuple[int, ...]:
        """Dims of a tensor that one scale spans: they are rounded as a whole or not at all."""
        found = [dim for dim, extent in enumerate(self.extents(rank)) if extent == 0]
        return (*found, *([rank - 1] if self.row else []))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a tensor of ``shape``; the last block of a dim may be short.

        Raises: TypeMismatch if the tensor has fewer dims than the block.
        """
        extents = self.extents(len(shape))
        return tuple(1 if b == 0 else -(-n // b) for n, b in zip(shape, extents, strict=True))

    def size_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of codes, scales and offsets of a tensor of ``shape``."""
        blocks = math.prod(self.scale_shape(shape))
        side = self.scale.bits + (self.offset.bits if self.offset else 0)
        rows = math.prod(shape[:-1]) * self.row.bits // 8 if self.row else 0
        return self.element.size_bytes(shape) + (blocks * side + 7) // 8 + rows


DType = Scalar | Block

BOOL = SCALARS["bool"]
I4 = SCALARS["i4"]
U4 = SCALARS["u4"]
I8 = SCALARS["i8"]
U8 = SCALARS["u8"]
I16 = SCALARS["i16"]
I32 = SCALARS["i32"]
I64 = SCALARS["i64"]
F16 = SCALARS["f16"]
BF16 = SCALARS["bf16"]
F32 = SCALARS["f32"]
F64 = SCALARS["f64"]
F8E4M3 = SCALARS["f8e4m3"]
F8E5M2 = SCALARS["f8e5m2"]
F8E8M0 = SCALARS["f8e8m0"]
F4E2M1 = SCALARS["f4e2m1"]

# GGUF's storage formats, as values of the same definition. Q4_K and Q6_K nest two scales; their
# product is exact in f32, so the flat form loses nothing.
GGUF_FORMATS: dict[str, Block] = {
    "Q4_0": Block(I4, (32,), F16),
    "Q4_1": Block(U4, (32,), F16, F16),
    "Q8_0": Block(I8, (32,), F16),
    "Q4_K": Block(U4, (32,), F32, F32),
    "Q6_K": Block(I8, (16,), F32),
}
MXFP4 = Block(F4E2M1, (32,), F8E8M0)
MXFP8 = Block(F8E4M3, (32,), F8E8M0)
NVFP4 = Block(F4E2M1, (16,), F8E4M3, row=F32)
# FP8 as checkpoints and kernels have it; the UE8M0 twins keep powers of two as scales.
FP8_TENSOR = Block(F8E4M3, (0, 0), F32)
FP8_ROW = Block(F8E4M3, (0,), F32)
FP8_BLOCK = Block(F8E4M3, (128, 128), F32)
FP8_BLOCK_32 = Block(F8E4M3, (32, 32), F32)
FP8_GROUP = Block(F8E4M3, (128,), F32)
FP8_BLOCK_UE8M0 = Block(F8E4M3, (128, 128), F8E8M0)
FP8_GROUP_UE8M0 = Block(F8E4M3, (128,), F8E8M0)

_BLOCK_RE = re.compile(
    r"(?P<element>\w+)/(?P<block>row|tensor|\d+(?:x\d+)*):(?P<scale>\w+)(?:\+(?P<offset>\w+))?"
    r"(?:\*(?P<row>\w+))?"
)
SCALAR_NAMES = tuple(SCALARS)


def _scalar(name: str, whole: str) -> Scalar:
    found = SCALARS.get(name)
    if found is None:
        known = ", ".join(SCALARS)
        raise TypeMismatch(f"unknown element type {name!r} in {whole!r}", advice=f"known: {known}")
    return found


@cache
def parse_dtype(text: str) -> DType:
    """Read the text form of an element type.

    Raises: TypeMismatch if it is not one.
    """
    match = _BLOCK_RE.fullmatch(text)
    if match is None:
        return _scalar(text, text)
    whole = next((block for block, name in _WHOLE.items() if name == match["block"]), None)
    block = whole or tuple(int(n) for n in match["block"].split("x"))
    if whole is None and 0 in block:
        raise TypeMismatch(
            f"a block of extent 0 in {text!r}",
            advice="write /row for one scale per row, /tensor for one per matrix",
        )
    offset = _scalar(match["offset"], text) if match["offset"] else None
    row = _scalar(match["row"], text) if match["row"] else None
    return Block(_scalar(match["element"], text), block, _scalar(match["scale"], text), offset, row)


@dataclass(frozen=True)
class BlockArray:
    """Values of a block format: one code per element, one scale (and offset) per block.

    Shapes: codes [*shape], scales and offsets [*format.scale_shape(shape)], row_scales
    [*shape[:-1], 1].
    Source: value = code * scale + offset, or code * scale * row_scale, computed in float32.
    """

    format: Block
    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None
    row_scales: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the codes stand for."""
        return tuple(self.codes.shape)

    def dequantize(self) -> np.ndarray:
        """Return the float32 values, shape [*shape]."""
        scales = _spread(self.scales.astype(np.float32), self.format, self.shape)
        with np.errstate(over="ignore"):  # 6 * 2^127 is infinite in float32
            values = self.codes.astype(np.float32) * scales
        if self.row_scales is not None:
            values = values * self.row_scales.astype(np.float32)
        if self.offsets is None:
            return values
        return values + _spread(self.offsets.astype(np.float32), self.format, self.shape)

    def by_rows(self, move: Callable[[np.ndarray], np.ndarray]) -> "BlockArray":
        """Rows taken, repeated or reordered: codes, scales and offsets alike.

        Args:
            move: does so to an array, by its first dim alone.
        """
        offsets, row_scales = (None if a is None else move(a) for a in self._sides)
        return BlockArray(self.format, move(self.codes), move(self.scales), offsets, row_scales)

    @staticmethod
    def joined(
        parts: Sequence["BlockArray"], join: Callable[[list[np.ndarray]], np.ndarray]
    ) -> "BlockArray":
        """Arrays of one format as one: codes, scales and offsets each by ``join``."""

        def side(arrays: list[np.ndarray | None]) -> np.ndarray | None:
            there = [a for a in arrays if a is not None]
            return join(there) if there else None

        return BlockArray(
            parts[0].format,
            join([p.codes for p in parts]),
            join([p.scales for p in parts]),
            side([p.offsets for p in parts]),
            side([p.row_scales for p in parts]),
        )

    @property
    def _sides(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        return self.offsets, self.row_scales

    def part(self, dim: int, start: int, stop: int) -> "BlockArray":
        """Elements ``start:stop`` of one dim with their scales; the codes are a view.

        Raises: TypeMismatch if ``start`` lies inside a block.
        """
        extent = self.format.extents(len(self.shape))[dim]
        cut = (slice(None),) * dim + (slice(start, stop),)
        codes, row_scales = self.codes[cut], self.row_scales
        if row_scales is not None and dim < len(self.shape) - 1:
            row_scales = row_scales[cut]
        if extent == 0:
            return BlockArray(self.format, codes, self.scales, self.offsets)
        if start % extent and start != stop:
            raise TypeMismatch(
                f"elements {start} to {stop} of dim {dim} begin inside a block of {self.format}",
                advice=f"cut at multiples of {extent}, or refine the scales first (refine_scales)",
            )
        side = (slice(None),) * dim + (slice(start // extent, -(-stop // extent)),)
        offsets = None if self.offsets is None else self.offsets[side]
        return BlockArray(self.format, codes, self.scales[side], offsets, row_scales)


def _spread(per_block: np.ndarray, format: Block, shape: tuple[int, ...]) -> np.ndarray:
    """Repeat each block's number over its elements and cut to ``shape``."""
    lead = len(shape) - len(format.block)
    for axis, extent in enumerate(format.block, start=lead):
        if extent:
            per_block = np.repeat(per_block, extent, axis=axis)
    # A whole-dim block keeps extent 1 and broadcasts.
    return per_block[tuple(slice(0, n) for n in shape)]


def quantize(values: np.ndarray, format: Block) -> BlockArray:
    """Round float values to a block format, ties of codes to even.

    Symmetric integer formats map the largest magnitude of a block to the largest code; formats with
    an offset map [min, max] to the whole code range; float codes map it to the largest finite
    code. Blocks of zeros get codes 0. Scales and offsets are rounded to their types before codes
    are chosen, and up or down where the nearest would clip: no value is off by more than half the
    step of its code (of the smallest scale, where a block is tinier than that).

    Power-of-two scales (f8e8m0) are rounded up: the least 2^k with max|x| <= 2^k * largest code.
    The rule that OCP MX suggests, 2^(floor(log2 max|x|) - emax), clips maxima above 6 * 2^k (in
    MXFP4 by up to a quarter of the value) and is not used anywhere here.

    Second scales bring the largest magnitude of a row to the largest code at the largest scale;
    then the row's quotients by it are rounded as above.

    Shapes: values [*shape] -> codes [*shape], scales [*format.scale_shape(shape)].
    Raises: TypeMismatch if a value is not finite or beyond the format, if there are fewer dims than
        the block has, or if one cannot round to the format (unsigned codes without an offset).
    """
    _check_roundable(format)
    x = np.asarray(values, dtype=np.float32)
    format.scale_shape(x.shape)
    if format.row is not None:
        return _quantize_rows(x, format, format.row)
    blocks = _blocks(x, format)
    low, high = blocks.min(axis=-1, initial=np.inf), blocks.max(axis=-1, initial=-np.inf)
    if x.size and not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise TypeMismatch(f"quantize to {format}: a value is not finite")
    extent = np.maximum(np.abs(low), np.abs(high))
    offsets = None
    if format.offset is not None:
        if extent.max(initial=0.0) > _LARGEST[format.offset.name]:
            raise TypeMismatch(f"quantize to {format}: a block reaches {extent.max():g}")
        offsets = _round_down(low, format.offset)
        extent = high - offsets.astype(np.float32)
    scales = _round_scale(extent, format)
    wide = _spread(scales.astype(np.float32), format, x.shape)
    shift = 0.0 if offsets is None else _spread(offsets.astype(np.float32), format, x.shape)
    # Where the scale is 0 all values are: float codes keep the sign of a zero.
    ratio = ((x - shift) / np.where(wide > 0, wide, np.float32(1.0))).astype(np.float32)
    return BlockArray(format, _encode(ratio, format.element), scales, offsets)


def _quantize_rows(x: np.ndarray, format: Block, type_: Scalar) -> BlockArray:
    most = np.abs(x).max(axis=-1, keepdims=True, initial=0.0)
    if not np.isfinite(most).all():
        raise TypeMismatch(f"quantize to {format}: a value is not finite")
    top = np.float32(_largest_code(format.element) * _largest_code(format.scale))
    # Rows of zeros, or so tiny that the scale would be no normal number, take the smallest one.
    row_scales = np.maximum(most / top, np.finfo(np.float32).tiny).astype(type_.numpy)
    made = quantize(x / row_scales.astype(np.float32), replace(format, row=None))
    return BlockArray(format, made.codes, made.scales, None, row_scales)


def _check_roundable(format: Block) -> None:
    element = format.element
    fits = {"int": format.offset is None, "uint": format.offset is not None}
    if not fits.get(element.kind, element.is_float and format.offset is None):
        raise TypeMismatch(
            f"cannot round to {format}",
            advice="unsigned codes need an offset, signed and float codes have none",
        )
    offset = format.offset or F32
    if format.row not in (None, F32):
        raise TypeMismatch(f"cannot round to {format}", advice="scales of rows are f32")
    if F8E8M0 in (element, offset) or not format.scale.is_float or not offset.is_float:
        raise TypeMismatch(f"cannot round to {format}", advice="scales and offsets are floats")


def _blocks(x: np.ndarray, format: Block) -> np.ndarray:
    """Bring each block's elements to one trailing dim, short last blocks filled with their edge."""
    lead = x.shape[: x.ndim - len(format.block)]
    tail = x.shape[len(lead) :]
    extents = [n if b == 0 else b for n, b in zip(tail, format.block, strict=True)]
    pads = [(0, 0)] * len(lead) + [(0, -n % b) for n, b in zip(tail, extents, strict=True)]
    padded = np.pad(x, pads, mode="edge") if any(p for _, p in pads) else x
    counts = [n // b for n, b in zip(padded.shape[len(lead) :], extents, strict=True)]
    split = padded.reshape(*lead, *(v for pair in zip(counts, extents, strict=True) for v in pair))
    first = len(lead)
    order = [*range(first), *range(first, split.ndim, 2), *range(first + 1, split.ndim, 2)]
    return split.transpose(order).reshape(*lead, *counts, math.prod(extents))


_LARGEST = {
    "f8e4m3": 448.0,
    "f8e5m2": 57344.0,
    "f4e2m1": 6.0,
    "f16": 65504.0,
    "bf16": float(np.uint32(0x7F7F0000).view(np.float32)),
    "f32": float(np.finfo(np.float32).max),
    "f64": float(np.finfo(np.float64).max),
}
# Numbers with this many explicit mantissa bits: the step at the largest code follows from it.
_MANTISSA = {"f8e4m3": 3, "f8e5m2": 2, "f4e2m1": 1, "f16": 10, "bf16": 7, "f32": 23, "f64": 52}


def _largest_code(element: Scalar) -> float:
    if element.kind == "uint":
        return float(2**element.bits - 1)
    if element.kind == "int":
        return float(2 ** (element.bits - 1) - 1)
    return _LARGEST[element.name]


def _half_step(element: Scalar) -> float:
    """Half the distance of codes at the largest code."""
    if not element.is_float:
        return 0.5
    exponent = math.frexp(_largest_code(element))[1] - 1
    return math.ldexp(0.5, exponent - _MANTISSA[element.name])


def _round_down(values: np.ndarray, type_: Scalar) -> np.ndarray:
    nearest = values.astype(type_.numpy)
    lowest = np.asarray(-_LARGEST[type_.name], type_.numpy)
    return np.where(nearest.astype(np.float32) > values, np.nextafter(nearest, lowest), nearest)


def _round_scale(extent: np.ndarray, format: Block) -> np.ndarray:
    """Scales so that codes reach ``extent``, at most half a step short of it."""
    top = _largest_code(format.element)
    wanted = (extent / np.float32(top)).astype(np.float32)
    if format.scale is F8E8M0:
        # A power of two, rounded up, so that nothing saturates (OCP MX rounds down and clips).
        mantissa, exponent = np.frexp(wanted)
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        # A block so tiny that its scale is no float32 takes the smallest one, zeros take 1.
        exponent = np.where((wanted == 0) & (extent > 0), -127, np.clip(exponent, -127, 127))
        return np.ldexp(np.float32(1.0), exponent).astype(format.scale.numpy)
    with np.errstate(over="ignore"):
        nearest = wanted.astype(format.scale.numpy)
    reach = np.float32(top + _half_step(format.element))
    # Towards the largest number, since not all formats have an infinity.
    up = np.nextafter(nearest, np.asarray(_LARGEST[format.scale.name], format.scale.numpy))
    scales = np.where(extent > nearest.astype(np.float32) * reach, up, nearest)
    wide = scales.astype(np.float32)
    if not np.all(np.isfinite(wide) & (extent <= wide * reach)):
        raise TypeMismatch(f"quantize to {format}: a block reaches {extent.max():g}")
    return scales


def _encode(ratio: np.ndarray, element: Scalar) -> np.ndarray:
    top = _largest_code(element)
    lowest = 0.0 if element.kind == "uint" else -top
    codes = ratio if element.is_float else np.rint(ratio)
    return np.clip(codes, lowest, top).astype(element.numpy)
