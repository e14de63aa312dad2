"""What a format loses, before any weight is seen: its error on normally distributed numbers."""

from functools import cache

import numpy as np

from metainfer.ir.dtypes import Block, DType, quantize

# Enough for three digits; a multiple of every block in use.
_SAMPLE = (256, 1024)


@cache
def relative_rms(format: DType, source: DType | None = None) -> float:
    """Root-mean-square error over root-mean-square value, for weights drawn from a normal.

    Args:
        format: what the weights are brought to.
        source: the format they have before; None for exact numbers. 0.0 is a conversion that
            loses nothing.
    """
    exact = _sample() if source is None else _rounded(_sample(), source)
    made = _rounded(exact, format)
    return float(np.sqrt(np.mean((made - exact) ** 2) / np.mean(exact**2)))


@cache
def _sample() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_SAMPLE).astype(np.float32)


def _rounded(values: np.ndarray, dtype: DType) -> np.ndarray:
    if isinstance(dtype, Block):
        return quantize(values, dtype).dequantize()
    return np.asarray(values.astype(dtype.numpy).astype(np.float32))
