"""The layout ``triton.words``: codes in the order in which matrix instructions take numbers.

Of each step of an instruction a thread wants a pair of neighbours along K and the pair eight
numbers on. Four threads share a chunk of a row; the 16 bytes that one of them reads lie side by
side, and are its pairs of several steps. Rows are filled up to whole chunks with zeros.

Codes of a byte: chunks of 64. Codes of 4 bits: chunks of 128, eight codes a word: its halves are
the two numbers of a pair, of four pairs each. Integers lie one after the other, less their least;
bits of e2m1 lie where `templates.widen` finds them, and so do those of matrices of e4m3 under
scales of whole steps, in words of two pairs (`is_moved`). Scales of e2m1 and of integers lie row
beside row: those of e2m1 four of 32 numbers in a word (of 16: in two, even and odd ones), those of
integers, and their offsets, as numbers.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from metainfer.backends.layout import Layout, Weight
from metainfer.backends.torch.tensors import BlockTensors, plain_weight, torch_dtype
from metainfer.ir.dtypes import F4E2M1, F8E4M3, F8E8M0, Block, DType
from metainfer.ir.errors import PlanError
from metainfer.ir.types import TensorType

NAME = "triton.words"
CHUNKS = {"f8e4m3": 64, "i8": 64, "u8": 64, "f4e2m1": 128, "u4": 128, "i4": 128}
INTEGERS = ("u4", "i4", "u8", "i8")
_STEP = 128  # numbers of a step of products
_BYTES = 64  # of a chunk whose codes take one each
GROUPS = (16, 32)  # e2m1 codes that share a scale; wider groups become several of the last
_WORD = torch.int32
# Bits of a half word that hold sign, two bits of exponent and mantissa of its four codes. Signs of
# the second and the third lie in the other half: they are rotated into their places.
_Places = tuple[tuple[int, int, int, int], ...]
_PLACES: _Places = ((15, 8, 7, 6), (5, 14, 13, 12), (2, 11, 10, 9), (3, 1, 0, 4))
_SWAPPED = (5, 2)  # of the places
_INTEGER: _Places = ((3, 2, 1, 0), (7, 6, 5, 4), (11, 10, 9, 8), (15, 14, 13, 12))
# Largest exponent + 127 of a scale whose numbers bf16 holds, 2^-32 times as large (`order.LIFT`).
_LARGEST_POWER = 160
_LEAST_EXPONENT = 10  # of the least scale of NVFP4, 2^-9, less one: code 0 is a scale of 0


@dataclass(frozen=True)
class Words:
    """A weight as words, or ordered bytes, and its scales.

    Shapes: codes u8 [*lead, N, K'] of a byte each, i32 [*lead, N, K' / 8] of 4 bits. Scales of e4m3
    as the format has them, of e2m1 i32 [*lead, 32 / group, K' / 128, N], of integers, and their
    offsets, [*lead, groups, N]. row_scales [*lead, N, 1].

    Attributes:
        format: what the codes mean.
        codes: codes in order.
        scales: of each group or block.
        row_scales: second scales; None without.
        width: numbers of a row.
        offsets: of each group; None without.
    """

    format: Block
    codes: torch.Tensor
    scales: torch.Tensor
    row_scales: torch.Tensor | None
    width: int
    offsets: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the codes stand for."""
        return (*self.codes.shape[:-1], self.width)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Words":
        """The same weight on another device."""

        def moved(t: torch.Tensor) -> torch.Tensor:
            return t.to(device, non_blocking=non_blocking)

        sides = (self.row_scales, self.offsets)
        rows, offsets = (None if t is None else moved(t) for t in sides)
        return Words(self.format, moved(self.codes), moved(self.scales), rows, self.width, offsets)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All tensors that there are."""
        sides = (self.row_scales, self.offsets)
        return (self.codes, self.scales, *(t for t in sides if t is not None))


def takes(dtype: DType) -> bool:
    """Whether the layout holds a format: e4m3 codes, or e2m1 or integers in groups along K."""
    if not isinstance(dtype, Block):
        return False
    if dtype.element.name in INTEGERS:
        return len(dtype.block) == 1 and dtype.block[0] > 1 and dtype.row is None
    if dtype.offset is not None:
        return False
    if dtype.element == F8E4M3:
        return True
    high, wide = dtype.extents(2)
    is_group = high == 1 and (wide == GROUPS[0] or (wide > 0 and wide % GROUPS[1] == 0))
    return dtype.element == F4E2M1 and is_group and dtype.scale.name in ("f8e8m0", "f8e4m3")


def is_moved(format_: Block, num_dims: int = 2) -> bool:
    """Whether codes of a byte are words whose bits were moved: e4m3 under scales of whole steps.

    Narrower scales multiply numbers in float32, which the card makes of e4m3 codes by itself; so do
    those of stacks, which experts' products read in longer steps.
    """
    is_wide = format_.element == F8E4M3 and format_.extents(2)[1] % _STEP == 0
    return is_wide and num_dims == 2


def group_of(format_: Block) -> int:
    """Numbers for each scale that is kept of an e2m1 format."""
    return min(format_.extents(2)[1], GROUPS[1])


def pack(weight: Weight) -> Words:
    """Put codes in order.

    Raises: PlanError for another format, and for scales of e2m1 that it cannot keep.
    """
    plain = plain_weight(weight)
    if not isinstance(plain, BlockTensors) or not takes(plain.format):
        raise PlanError(f"layout {NAME} takes e4m3 codes, and e2m1 or integers in groups, only")
    codes, format_, width = plain.codes.view(torch.uint8), plain.format, plain.shape[-1]
    if format_.element.name == "i4":
        # Counted from the least.
        codes = codes + 8
    chunk = CHUNKS[format_.element.name]
    codes = functional.pad(codes, (0, -width % chunk))
    scales, rows, offsets = plain.scales, plain.row_scales, plain.offsets
    if format_.element.name in INTEGERS:
        scales = scales.transpose(-2, -1).contiguous()
        offsets = None if offsets is None else offsets.transpose(-2, -1).contiguous()
    if is_moved(format_, codes.ndim):
        return Words(format_, _moved(codes), scales, rows, width)
    if chunk == _BYTES:
        parts = codes.reshape(*codes.shape[:-1], -1, 8, 4, 2).transpose(-3, -2)
        return Words(format_, parts.flatten(-4).contiguous(), scales, rows, width, offsets)
    if format_.element.name in INTEGERS:
        return Words(format_, _words(codes & 15, _INTEGER), scales, None, width, offsets)
    scales = _kept_scales(plain.scales, format_, codes.shape[-1])
    if format_.scale != F8E8M0:
        # Scales of 0 have no code of their own: what lies under them becomes 0.
        codes = torch.where(_spread(scales != 0, group_of(format_)), codes, 0)
    return Words(
        format_, _words(codes, _PLACES), _scale_words(scales, GROUPS[1] // group_of(format_)),
        plain.row_scales, width,
    )  # fmt: skip


def _spread(per_group: torch.Tensor, group: int) -> torch.Tensor:
    return per_group.repeat_interleave(group, -1)


@cache
def _moved_pairs() -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Halves of words by two e4m3 codes, the first one in the lower byte: [65536]."""
    codes = np.arange(1 << 16, dtype=np.uint32)
    near, far = codes & 255, codes >> 8
    made = ((near & 0x80) << 8) | ((near & 0x7F) << 4)
    made |= ((far & 0x80) << 4) | ((far & 0x70) << 8) | (far & 0x0F)
    return made.astype(np.uint16)


def _moved(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 codes u8 [..., K'] as words, seen as bytes, on the processor.

    Raises: PlanError for codes that are no numbers.
    """
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise PlanError(
            f"layout {NAME} keeps codes that are numbers",
            advice="is the checkpoint damaged? else forbid the kernels that want this layout: "
            "--forbid NAME, see metainfer explain",
        )
    # Chunk, word of a thread, pair; thread, half: pairs come last, two codes of a half.
    parts = codes.reshape(*codes.shape[:-1], -1, 4, 2, 4, 2).movedim(-3, -1).transpose(-4, -3)
    pairs = np.ascontiguousarray(parts.numpy()).view(np.uint16)[..., 0]
    # Every index is in range; any other mode than "raise" saves a copy.
    halves = np.take(_moved_pairs(), pairs, mode="clip")
    return torch.from_numpy(halves.view(np.uint8).reshape(codes.shape))


def _unmoved(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_moved`."""
    halves = words.view(torch.int16)
    near = ((halves >> 8) & 0x80) | ((halves >> 4) & 0x7F)
    far = ((halves >> 4) & 0x80) | ((halves >> 8) & 0x70) | (halves & 0x0F)
    pairs = torch.stack((near, far), -1).to(torch.uint8)
    # Chunk, thread, word of it, half, pair.
    parts = pairs.reshape(*words.shape[:-1], -1, 4, 4, 2, 2).transpose(-4, -3).movedim(-1, -3)
    return parts.flatten(-5)


@cache
def _halves(form: _Places) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Halves of words by the codes of their four pairs, 4 bits each: [65536]."""
    codes = np.arange(1 << 16, dtype=np.uint32)
    made = np.zeros_like(codes)
    for pair, places in enumerate(form):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            made |= ((codes >> (4 * pair + bit)) & 1) << place
    return made.astype(np.uint16)


def _words(codes: torch.Tensor, form: _Places) -> torch.Tensor:
    """Codes u8 [..., K'] as words [..., K' / 8], on the processor."""
    # Chunk, word of a thread, pairs; four threads and two halves, the last dims, are one number.
    whole = np.ascontiguousarray(codes.numpy()).view(np.uint64)
    parts = whole.reshape(*codes.shape[:-1], -1, 4, 4)
    low = parts[..., 0] | (parts[..., 1] << np.uint64(4))
    high = parts[..., 2] | (parts[..., 3] << np.uint64(4))
    if form is _PLACES:
        # Signs of the second and the third pair lie in the other half.
        for pairs, signs in ((low, 0x0080008000800080), (high, 0x0008000800080008)):
            swapped = (pairs ^ (pairs >> np.uint64(8))) & np.uint64(signs)
            pairs ^= swapped | (swapped << np.uint64(8))
    fours = np.empty((*low.shape, 8, 2), np.uint8)
    fours[..., 0] = low[..., None].view(np.uint8)
    fours[..., 1] = high[..., None].view(np.uint8)
    # Every index is in range; any other mode than "raise" saves a copy.
    halves = np.take(_halves(form), fours.view(np.uint16)[..., 0], mode="clip")
    words = np.ascontiguousarray(halves.view(np.int32).swapaxes(-2, -1))
    return torch.from_numpy(words.reshape(*codes.shape[:-1], -1))


def _codes(words: torch.Tensor, form: _Places) -> torch.Tensor:
    """The inverse of `_words`."""
    parts = words.reshape(*words.shape[:-1], -1, 4, 4).transpose(-2, -1)
    made = torch.zeros((*parts.shape[:-1], 4, 4, 2), dtype=torch.uint8, device=words.device)
    for pair, places in enumerate(form):
        for half in range(2):
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                is_far = (half == 1) != (form is _PLACES and place in _SWAPPED)
                found = ((parts >> (place + 16 * is_far)) & 1).to(torch.uint8)
                made[..., pair, :, half] |= found << bit
    return made.flatten(-5)


def _kept_scales(scales: torch.Tensor, format_: Block, width: int) -> torch.Tensor:
    """Scales as bytes [..., width / group] that `widen` makes numbers of.

    Raises: PlanError for those that it cannot.
    """
    made = scales.view(torch.uint8)
    repeats = format_.extents(2)[1] // group_of(format_)
    made = _spread(made, repeats)[..., : width // group_of(format_)]
    made = functional.pad(made, (0, width // group_of(format_) - made.shape[-1]))
    if format_.scale == F8E8M0:
        if made.numel() and int(made.max()) > _LARGEST_POWER:
            raise PlanError(
                f"layout {NAME} keeps scales up to 2^{_LARGEST_POWER - 127}, found one of "
                f"2^{int(made.max()) - 127}, or none",
                advice="is the checkpoint damaged? else forbid the kernels that want this layout: "
                "--forbid NAME, see metainfer explain",
            )
        return made
    if made.numel() and int(made.max()) > 0x7E:
        raise PlanError(
            f"layout {NAME} keeps scales that are positive numbers",
            advice="is the checkpoint damaged? else forbid the kernels that want this layout: "
            "--forbid NAME, see metainfer explain",
        )
    # Five bits of exponent leave room for what e4m3 keeps as subnormal codes.
    mantissa, exponent = torch.frexp(made.view(torch.float8_e4m3fn).float())
    # frexp: the mantissa lies between a half and one.
    fields = (exponent - 1 + _LEAST_EXPONENT) * 8 + (mantissa * 16).to(_WORD) - 8
    return torch.where(made == 0, 0, fields).to(torch.uint8)


def _plain_scales(kept: torch.Tensor, format_: Block) -> torch.Tensor:
    """The inverse of `_kept_scales`, for rows of whole chunks: bytes."""
    made = kept[..., :: format_.extents(2)[1] // group_of(format_)].contiguous()
    if format_.scale == F8E8M0:
        return made
    wide = made.to(_WORD)
    value = torch.ldexp(1.0 + (wide & 7) / 8.0, (wide >> 3) - _LEAST_EXPONENT)
    return torch.where(made == 0, 0.0, value).to(torch.float8_e4m3fn).view(torch.uint8)


def _scale_words(scales: torch.Tensor, halves: int) -> torch.Tensor:
    """Bytes [..., N, scales] -> words [..., halves, chunks, N]; halves: scales for each word."""
    parts = scales.reshape(*scales.shape[:-1], -1, 4, halves).transpose(-2, -1)
    # NOTE: viewed as bytes in a row; dims of one element may keep strides that no word fits.
    made = parts.flatten().view(_WORD).view(parts.shape[:-1])
    return made.movedim(-1, -3).transpose(-2, -1).contiguous()


def _scale_bytes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_scale_words`."""
    parts = words.transpose(-2, -1).movedim(-3, -1)
    made = parts.flatten().view(torch.uint8).view(*parts.shape, 4)
    return made.transpose(-2, -1).flatten(-3)


def plain_of(packed: Words) -> BlockTensors:
    """The weight that was packed, in plain order, where it lies; codes under a scale of 0 are 0."""
    format_, width = packed.format, packed.width
    scales, rows, offsets = packed.scales, packed.row_scales, packed.offsets
    if format_.element.name in INTEGERS:
        scales = scales.transpose(-2, -1).contiguous()
        offsets = None if offsets is None else offsets.transpose(-2, -1).contiguous()
    if is_moved(format_, packed.codes.ndim):
        codes = _unmoved(packed.codes)[..., :width].contiguous().view(torch_dtype(F8E4M3))
        return BlockTensors(format_, codes, scales, None, rows)
    if CHUNKS[format_.element.name] == _BYTES:
        parts = packed.codes.reshape(*packed.codes.shape[:-1], -1, 4, 8, 2).transpose(-3, -2)
        codes = parts.flatten(-4)[..., :width].contiguous().view(torch_dtype(format_.element))
        return BlockTensors(format_, codes, scales, offsets, rows)
    if format_.element.name in INTEGERS:
        codes = _codes(packed.codes, _INTEGER)[..., :width].contiguous()
        codes = codes if format_.element.name == "u4" else (codes.to(torch.int8) - 8)
        return BlockTensors(format_, codes, scales, offsets, rows)
    codes = _codes(packed.codes, _PLACES)[..., :width].contiguous()
    found = _plain_scales(_scale_bytes(packed.scales), format_)
    scales = found[..., : -(-width // format_.extents(2)[1])].contiguous()
    scales = scales.view(torch_dtype(format_.scale))
    return BlockTensors(format_, codes, scales, None, packed.row_scales)


def unpack(packed: Words, type_: TensorType) -> Weight:
    """The weight that was packed; codes under a scale of 0 come back as zeros."""
    return plain_of(packed.to("cpu")).to_blocks()


def typed(type_: TensorType) -> Words:
    """The packed form with types and shapes only.

    Raises: PlanError for a format that the layout does not take.
    """
    format_ = type_.dtype
    if not isinstance(format_, Block) or not takes(format_):
        raise PlanError(f"layout {NAME} does not take {type_}")
    *lead, width = type_.concrete({})
    whole = -(-width // CHUNKS[format_.element.name]) * CHUNKS[format_.element.name]

    def empty(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    row_scales = None if format_.row is None else empty((*lead, 1), torch_dtype(format_.row))
    outer, rows = tuple(lead[:-1]), lead[-1]
    if CHUNKS[format_.element.name] == _BYTES:
        words = empty((*lead, whole), torch.uint8)
    else:
        words = empty((*lead, whole // 8), _WORD)
    if format_.element == F8E4M3:
        scales = empty(format_.scale_shape((*lead, width)), torch_dtype(format_.scale))
        return Words(format_, words, scales, row_scales, width)
    if format_.element.name in INTEGERS:
        groups = (*outer, -(-width // format_.block[0]), rows)
        offsets = None if format_.offset is None else empty(groups, torch_dtype(format_.offset))
        return Words(
            format_, words, empty(groups, torch_dtype(format_.scale)), None, width, offsets
        )
    chunks = whole // CHUNKS[format_.element.name]
    scales = empty((*outer, GROUPS[1] // group_of(format_), chunks, rows), _WORD)
    return Words(format_, words, scales, row_scales, width)


def num_bytes(type_: TensorType) -> int:
    """Resident bytes."""
    return sum(math.prod(p.shape) * p.element_size() for p in typed(type_).parts)


LAYOUT = Layout(NAME, pack, unpack, num_bytes, typed)
