"""Plain PyTorch forms of the matrix products and the convolution: float32 inside."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.nn import functional

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.tensors import dense_values, widen

Run = Callable[[TorchCall], None]


def _linear(call: TorchCall) -> None:
    x, weight = widen(call.inputs[0]), dense_values(call.inputs[1])
    y = torch.matmul(x, weight.to(x.dtype).t())
    call.outputs[0].copy_(y + widen(call.inputs[2]) if len(call.inputs) > 2 else y)


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


PLAIN_LINEAR: dict[str, Run] = {"linear": _linear, "matmul": _matmul, "conv2d": _conv2d}
