"""Pooling over windows: averages as convolutions, maxima as maxima of strided slices."""

from typing import Any

import numpy as np

from metainfer.compiler.aten.table import Call, argument, lowers
from metainfer.compiler.lowering import Lowering, fake
from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import Scalar
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Value


def pair(value: Any) -> tuple[int, int]:
    """A number for both dims, or one for each."""
    values = [value] if isinstance(value, int) else list(value)
    return (values[0], values[-1])


def _as_image(s: Lowering, x: Value, inner: int) -> Value:
    """[B, C, H, W] of [C, L], [B, C, L], [C, H, W] or the same."""
    shape = list(x.tensor.shape)
    if inner == 1:
        shape.insert(len(shape) - 1, dim(1))
    return s.reshape(x, [dim(1)] * (4 - len(shape)) + shape)


def _windows(n: Call, inner: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(size, stride, padding) in two dims; a pool over one dim has windows one row high."""
    size, stride = argument(n, 1, "kernel_size"), argument(n, 2, "stride")
    padding = argument(n, 3, "padding", 0)
    stride = size if stride is None or stride == [] else stride
    if inner == 2:
        return pair(size), pair(stride), pair(padding)
    return (1, pair(size)[0]), (1, pair(stride)[0]), (0, pair(padding)[0])


@lowers("avg_pool1d", "avg_pool2d")
def _avg_pool(s: Lowering, n: Call) -> Value:
    inner = 1 if "pool1d" in str(n.target) else 2
    (high, wide), stride, padding = _windows(n, inner)
    if argument(n, 4, "ceil_mode", False):
        raise _ceil()
    x = _as_image(s, s.value(n.args[0]), inner)
    divisor = argument(n, 6, "divisor_override") or high * wide
    made = _sums(s, x, (high, wide), 1 / divisor, stride, padding)
    if any(padding) and not argument(n, 5, "count_include_pad", True):
        shape = (1, 1, *(n.attr for n in x.tensor.shape[2:]))
        ones = s.emit("full", shape=shape, value=1.0, dtype=x.tensor.dtype.name)
        made = s.emit("div", made, _sums(s, ones, (high, wide), 1 / divisor, stride, padding))
    return s.reshape(made, [s.to_dim(v) for v in fake(n).shape])


def _sums(
    s: Lowering, x: Value, window: tuple[int, int], factor: float, stride: tuple[int, int],
    padding: tuple[int, int],
) -> Value:  # fmt: skip
    """The sum of each window times a factor: a convolution of each channel by itself."""
    channels = x.tensor.shape[1].static
    shape = (channels, 1, *window)
    weight = s.emit("full", shape=shape, value=factor, dtype=x.tensor.dtype.name)
    return s.emit("conv2d", x, weight, stride=stride, padding=padding, groups=channels)


@lowers("max_pool1d", "max_pool2d")
def _max_pool(s: Lowering, n: Call) -> Value:
    inner = 1 if "pool1d" in str(n.target) else 2
    window, stride, padding = _windows(n, inner)
    dilation = pair(argument(n, 4, "dilation", 1))
    if argument(n, 5, "ceil_mode", False):
        raise _ceil()
    x = _as_image(s, s.value(n.args[0]), inner)
    dilation = dilation if inner == 2 else (1, dilation[0])
    for axis, (size, step, pad, apart) in enumerate(
        zip(window, stride, padding, dilation, strict=True), start=2
    ):
        x = _largest(s, x, axis, size, step, pad, apart)
    return s.reshape(x, [s.to_dim(v) for v in fake(n).shape])


def _largest(s: Lowering, x: Value, axis: int, size: int, step: int, pad: int, apart: int) -> Value:
    """Maxima of windows along one dim."""
    if pad:
        dtype = x.tensor.dtype
        assert isinstance(dtype, Scalar)
        lowest = -np.inf if dtype.is_float else float(np.iinfo(dtype.numpy).min)
        x = s.emit("pad", x, dim=axis, before=pad, after=pad, value=lowest)
    length: Dim = x.tensor.shape[axis]
    count = (length - (1 + (size - 1) * apart)) // step + 1
    made: Value | None = None
    for i in range(size):
        start = i * apart
        stop = start + (count - 1) * step + 1
        part = s.emit("slice", x, dim=axis, start=start, stop=stop.attr, step=step)
        made = part if made is None else s.emit("maximum", made, part)
    assert made is not None
    return made


@lowers("adaptive_avg_pool1d", "adaptive_avg_pool2d")
def _adaptive_avg_pool(s: Lowering, n: Call) -> Value:
    """Means of equal parts; parts that overlap or differ in size are refused."""
    x, wanted = s.value(n.args[0]), fake(n).shape
    inner = 1 if "pool1d" in str(n.target) else 2
    lead, sizes = list(x.tensor.shape[:-inner]), x.tensor.shape[-inner:]
    shape, dims = lead, []
    for size, parts in zip(sizes, wanted[-inner:], strict=True):
        count = s.to_dim(parts)
        if count != size and (not count.is_static or (size // count.constant) * count != size):
            raise Unsupported(
                f"adaptive pooling of {size} elements to {count}, which are no equal parts",
                advice="give an output size that divides the input's",
            )
        each = dim(1) if count == size else size // count.constant
        shape = [*shape, count, each]
        dims.append(len(shape) - 1)
    return s.emit("mean", s.reshape(x, shape), dims=tuple(dims))


def _ceil() -> Unsupported:
    return Unsupported("pooling with ceil_mode", advice="pad the input, and leave ceil_mode away")
