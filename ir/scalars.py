"""Plain element types: their storage, and the numpy types that hold them."""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Scalar:
    """A plain element type.

    Attributes:
        name: text form.
        bits: storage of one element.
        kind: "float", "int", "uint" or "bool".
    """

    name: str
    bits: int
    kind: str

    def __str__(self) -> str:
        """Print the text form."""
        return self.name

    @property
    def is_float(self) -> bool:
        """Whether values are floating point."""
        return self.kind == "float"

    @property
    def numpy(self) -> np.dtype:
        """The numpy dtype that holds one element (4-bit types take a byte each)."""
        return NUMPY[self.name]

    def size_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a dense array of this shape, 4-bit elements packed in pairs."""
        return (math.prod(shape) * self.bits + 7) // 8


SCALARS: dict[str, Scalar] = {
    s.name: s
    for s in (
        Scalar("bool", 8, "bool"),
        Scalar("i4", 4, "int"),
        Scalar("u4", 4, "uint"),
        Scalar("i8", 8, "int"),
        Scalar("u8", 8, "uint"),
        Scalar("i16", 16, "int"),
        Scalar("i32", 32, "int"),
        Scalar("i64", 64, "int"),
        Scalar("f16", 16, "float"),
        Scalar("bf16", 16, "float"),
        Scalar("f32", 32, "float"),
        Scalar("f64", 64, "float"),
        Scalar("f8e4m3", 8, "float"),
        Scalar("f8e5m2", 8, "float"),
        Scalar("f8e8m0", 8, "float"),
        Scalar("f4e2m1", 4, "float"),
    )
}
NUMPY: dict[str, np.dtype] = {
    "bool": np.dtype(np.bool_),
    "i4": np.dtype(np.int8),
    "u4": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "f8e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "f4e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
}
