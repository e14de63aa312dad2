"""Plain PyTorch forms of matrix products, of rounding for them, of the convolution: f32 inside."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.nn import functional

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.quantize import quantize, takes
from metainfer.backends.torch.tensors import BlockTensors, dense_values, plain_weight, widen
from metainfer.ir import dtypes
from metainfer.ir.errors import Unsupported

Run = Callable[[TorchCall], None]


def _linear(call: TorchCall) -> None:
    x, weight = dense_values(call.inputs[0]), dense_values(call.inputs[1])
    y = torch.matmul(x, weight.to(x.dtype).t())
    call.outputs[0].copy_(y + widen(call.inputs[2]) if len(call.inputs) > 2 else y)


def _quantize(call: TorchCall) -> None:
    x, out = dense_values(call.inputs[0]).float(), call.outputs[0]
    assert isinstance(out, BlockTensors)
    if not out.format.is_single:
        raise Unsupported(
            f"activations of {out.format}", advice="they are held as codes and one scale each"
        )
    if takes(out.format, x.shape[-1]):
        codes, scales = quantize(x, out.format)
    else:
        # Formats that no pass gives to activations: by the reference, on the host.
        made = plain_weight(dtypes.quantize(x.cpu().numpy(), out.format))
        assert isinstance(made, BlockTensors)
        codes, scales = made.codes, made.scales
    out.codes.copy_(codes)
    out.scales.copy_(scales)


def _matmul(call: TorchCall) -> None:
    a, b = widen(call.inputs[0]), widen(call.inputs[1])
    call.outputs[0].copy_(torch.matmul(a, b.transpose(-1, -2) if call.attrs["transpose_b"] else b))


def _conv2d(call: TorchCall) -> None:
    x, weight, *bias = (widen(t) for t in call.inputs)
    attrs = call.attrs
    # NOTE: cuDNN rounds f32 operands to tf32 unless it is told not to.
    with _full_f32() if x.is_cuda else nullcontext():
        y = functional.conv2d(
            x,
            weight,
            bias[0] if bias else None,
            stride=attrs["stride"],
            padding=attrs["padding"],
            groups=attrs["groups"],
        )
    call.outputs[0].copy_(y)


def _full_f32() -> AbstractContextManager[Any]:
    return cast(
        AbstractContextManager[Any],
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    )


PLAIN_LINEAR: dict[str, Run] = {
    "linear": _linear,
    "matmul": _matmul,
    "conv2d": _conv2d,
    "quantize": _quantize,
}
