"""Unpacks GGUF's stored blocks into codes, scales and offsets, exactly.

Every function takes raw blocks, uint8 [..., blocks, bytes of one block], and returns a
`BlockArray` of the storage type's entry in `GGUF_FORMATS`. In all of them the flat scale (and
offset) is exact: a product of an 11-bit and an 8-bit significand fits float32.

Source: ggml's block structs (ggml-common.h): field order and nibble order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from metainfer.ir.dtypes import (
    BF16,
    F16,
    F32,
    F64,
    GGUF_FORMATS,
    I8,
    I16,
    I32,
    I64,
    BlockArray,
    DType,
)

Unpack = Callable[[np.ndarray], BlockArray]


@dataclass(frozen=True)
class StorageType:
    """One of GGUF's tensor types.

    Attributes:
        name: as the format calls it.
        dtype: what the compiler calls it.
        block_elements: elements of one stored block.
        block_bytes: bytes of one stored block.
        unpack: makes a BlockArray of raw blocks; None for plain types.
    """

    name: str
    dtype: DType
    block_elements: int
    block_bytes: int
    unpack: Unpack | None = None


def _f16(raw: np.ndarray) -> np.ndarray:
    """Read 2 bytes each: uint8 [..., 2] -> float16 [...]."""
    return np.ascontiguousarray(raw).view("<f2")[..., 0]


def _flat(parts: np.ndarray) -> np.ndarray:
    """Join the block dim with the dims inside it: [..., blocks, *inner] of a row -> [..., row]."""
    return parts.reshape(*parts.shape[:-2], parts.shape[-2] * parts.shape[-1])


def _nibbles(packed: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Spread 4-bit codes: uint8 [..., n] -> [..., 2, n], low nibbles first."""
    codes = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0, :])
    np.right_shift(packed, 4, out=codes[..., 1, :])
    return codes.view(dtype)


def _unpack_q4_0(raw: np.ndarray) -> BlockArray:
    """Layout: f16 scale, 16 bytes of nibbles biased by 8."""
    codes = _nibbles(raw[..., 2:], np.dtype(np.int8))
    codes -= 8
    codes = codes.reshape(*raw.shape[:-1], 32)
    return BlockArray(GGUF_FORMATS["Q4_0"], _flat(codes), _f16(raw[..., 0:2]))


def _unpack_q4_1(raw: np.ndarray) -> BlockArray:
    """Layout: f16 scale, f16 minimum, 16 bytes of nibbles."""
    codes = _nibbles(raw[..., 4:], np.dtype(np.uint8)).reshape(*raw.shape[:-1], 32)
    scales, offsets = _f16(raw[..., 0:2]), _f16(raw[..., 2:4])
    return BlockArray(GGUF_FORMATS["Q4_1"], _flat(codes), scales, offsets)


def _unpack_q8_0(raw: np.ndarray) -> BlockArray:
    """Layout: f16 scale, 32 signed bytes."""
    codes = np.ascontiguousarray(raw[..., 2:]).view(np.int8)
    return BlockArray(GGUF_FORMATS["Q8_0"], _flat(codes), _f16(raw[..., 0:2]))


def _unpack_q4_k(raw: np.ndarray) -> BlockArray:
    """Layout: f16 scale of scales, f16 scale of minima, 12 bytes of 8 + 8 6-bit numbers, nibbles.

    256 elements in 8 groups of 32; bytes 32j..32j+31 hold group 2j low and group 2j+1 high.
    """
    lead = raw.shape[:-1]
    scale, minimum = (_f16(raw[..., at : at + 2]).astype(np.float32)[..., None] for at in (0, 2))
    low_scales, low_minima, mixed = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    six_scales = np.concatenate([low_scales & 63, (mixed & 15) | ((low_scales >> 6) << 4)], axis=-1)
    six_minima = np.concatenate([low_minima & 63, (mixed >> 4) | ((low_minima >> 6) << 4)], axis=-1)
    codes = _nibbles(raw[..., 16:].reshape(*lead, 4, 32), np.dtype(np.uint8)).reshape(*lead, 256)
    with np.errstate(invalid="ignore"):
        scales = _flat(scale * six_scales.astype(np.float32))
        offsets = _flat(-(minimum * six_minima.astype(np.float32)))
    return BlockArray(GGUF_FORMATS["Q4_K"], _flat(codes), scales, offsets)


def _unpack_q6_k(raw: np.ndarray) -> BlockArray:
    """Layout: 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, f16 super-scale.

    256 elements in two halves of 128; in a half, 64 low bytes serve elements 0..63 (low nibble)
    and 64..127 (high nibble), and 32 high bytes serve 4 runs of 32, two bits each.
    """
    lead = raw.shape[:-1]
    low = _nibbles(raw[..., :128].reshape(*lead, 2, 64), np.dtype(np.uint8))
    high = raw[..., 128:192].reshape(*lead, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    codes = low.reshape(*lead, 2, 4, 32)
    codes |= ((high >> shifts) & 3) << 4
    signed = codes.reshape(*lead, 256).view(np.int8)
    signed -= 32
    sixteenths = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).astype(np.float32)
    with np.errstate(invalid="ignore"):
        scales = _flat(_f16(raw[..., 208:210]).astype(np.float32)[..., None] * sixteenths)
    return BlockArray(GGUF_FORMATS["Q6_K"], _flat(signed), scales)


# Numbers of GGUF's tensor types that can be read.
STORAGE_TYPES: dict[int, StorageType] = {
    0: StorageType("F32", F32, 1, 4),
    1: StorageType("F16", F16, 1, 2),
    2: StorageType("Q4_0", GGUF_FORMATS["Q4_0"], 32, 18, _unpack_q4_0),
    3: StorageType("Q4_1", GGUF_FORMATS["Q4_1"], 32, 20, _unpack_q4_1),
    8: StorageType("Q8_0", GGUF_FORMATS["Q8_0"], 32, 34, _unpack_q8_0),
    12: StorageType("Q4_K", GGUF_FORMATS["Q4_K"], 256, 144, _unpack_q4_k),
    14: StorageType("Q6_K", GGUF_FORMATS["Q6_K"], 256, 210, _unpack_q6_k),
    24: StorageType("I8", I8, 1, 1),
    25: StorageType("I16", I16, 1, 2),
    26: StorageType("I32", I32, 1, 4),
    27: StorageType("I64", I64, 1, 8),
    28: StorageType("F64", F64, 1, 8),
    30: StorageType("BF16", BF16, 1, 2),
}
# Names of the types that are only recognised, so that an error can say which one it met.
UNREADABLE_TYPES: dict[int, str] = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    13: "Q5_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
