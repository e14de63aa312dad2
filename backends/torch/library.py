"""Ops that are one library call each, results written where they belong."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.plain_elementwise import nan_beyond
from metainfer.backends.torch.plain_shape import PLAIN_SHAPE

Run = Callable[[TorchCall], None]
aten: Any = torch.ops.aten

FLOATS = ("f32", "f64", "bf16", "f16")
NUMBERS = (*FLOATS, "i64", "i32", "i16", "i8", "u8")
ANY = (*NUMBERS, "bool")


def _out(function: Any) -> Run:
    """A function of all operands that takes ``out``."""

    def run(call: TorchCall) -> None:
        function(*call.inputs, out=call.outputs[0])

    return run


def _cast_f8e4m3(call: TorchCall) -> None:
    call.outputs[0].copy_(nan_beyond(call.inputs[0], call.outputs[0].dtype))


def _relu(call: TorchCall) -> None:
    torch.clamp(call.inputs[0], min=0, out=call.outputs[0])


def _gelu(call: TorchCall) -> None:
    x, out = call.inputs[0], call.outputs[0]
    aten.gelu.out(x, approximate=str(call.attrs["approximate"]), out=out)


def _cast(call: TorchCall) -> None:
    call.outputs[0].copy_(call.inputs[0])


def _floor_divide(call: TorchCall) -> None:
    x, y = call.inputs
    torch.div(x, y, rounding_mode="floor", out=call.outputs[0])


def _sum(call: TorchCall) -> None:
    out = call.outputs[0]
    dims = tuple(call.attrs["dims"])
    torch.sum(call.inputs[0], dims, call.attrs["keep"], dtype=out.dtype, out=out)


def _mean(call: TorchCall) -> None:
    torch.mean(call.inputs[0], tuple(call.attrs["dims"]), call.attrs["keep"], out=call.outputs[0])


def _extreme(function: Any) -> Run:
    def run(call: TorchCall) -> None:
        function(call.inputs[0], tuple(call.attrs["dims"]), call.attrs["keep"], out=call.outputs[0])

    return run


def _argmax(call: TorchCall) -> None:
    torch.argmax(call.inputs[0], dim=call.attrs["dim"], out=call.outputs[0])


def _cumsum(call: TorchCall) -> None:
    out = call.outputs[0]
    torch.cumsum(call.inputs[0], call.attrs["dim"], dtype=out.dtype, out=out)


def _iota(call: TorchCall) -> None:
    start, step, size = (call.attrs[k] for k in ("start", "step", "size"))
    if size:
        torch.arange(start, start + step * size, step, out=call.outputs[0])


def _matmul(call: TorchCall) -> None:
    a, b = call.inputs
    torch.matmul(a, b.transpose(-1, -2) if call.attrs["transpose_b"] else b, out=call.outputs[0])


def _rms_norm(call: TorchCall) -> None:
    x, weight = call.inputs
    call.outputs[0].copy_(functional.rms_norm(x, weight.shape, weight, call.attrs["eps"]))


def _layer_norm(call: TorchCall) -> None:
    x, *weights = call.inputs
    weight, bias = (*weights, None, None)[:2]
    made = functional.layer_norm(x, x.shape[-1:], weight, bias, eps=call.attrs["eps"])
    call.outputs[0].copy_(made)


# Op -> (call, element types that the library computes as the reference does).
SINGLE: dict[str, tuple[Run, tuple[str, ...]]] = {
    "neg": (_out(torch.neg), NUMBERS),
    "abs": (_out(torch.abs), NUMBERS),
    "exp": (_out(torch.exp), FLOATS),
    "log": (_out(torch.log), FLOATS),
    "sqrt": (_out(torch.sqrt), FLOATS),
    "rsqrt": (_out(torch.rsqrt), FLOATS),
    "reciprocal": (_out(torch.reciprocal), FLOATS),
    "sin": (_out(torch.sin), FLOATS),
    "cos": (_out(torch.cos), FLOATS),
    "tanh": (_out(torch.tanh), FLOATS),
    "erf": (_out(torch.erf), FLOATS),
    "sigmoid": (_out(torch.sigmoid), FLOATS),
    "relu": (_relu, FLOATS),
    "silu": (_out(aten.silu.out), FLOATS),
    "gelu": (_gelu, FLOATS),
    "floor": (_out(torch.floor), FLOATS),
    "logical_not": (_out(torch.logical_not), ANY),
    "add": (_out(torch.add), NUMBERS),
    "sub": (_out(torch.sub), NUMBERS),
    "mul": (_out(torch.mul), NUMBERS),
    "div": (_out(torch.div), FLOATS),
    "floor_div": (_floor_divide, ("f32", "f64")),
    "remainder": (_out(torch.remainder), ("f32", "f64")),
    "pow": (_out(torch.pow), FLOATS),
    "maximum": (_out(torch.maximum), ANY),
    "minimum": (_out(torch.minimum), ANY),
    "eq": (_out(torch.eq), ANY),
    "ne": (_out(torch.ne), ANY),
    "lt": (_out(torch.lt), ANY),
    "le": (_out(torch.le), ANY),
    "gt": (_out(torch.gt), ANY),
    "ge": (_out(torch.ge), ANY),
    "logical_and": (_out(torch.logical_and), ANY),
    "logical_or": (_out(torch.logical_or), ANY),
    "sum": (_sum, NUMBERS),
    "mean": (_mean, FLOATS),
    "max": (_extreme(torch.amax), ANY),
    "min": (_extreme(torch.amin), ANY),
    "argmax": (_argmax, NUMBERS),
    "cumsum": (_cumsum, ("f32", "f64", "i64", "i32")),
    "concat": (PLAIN_SHAPE["concat"], ANY),
    "matmul": (_matmul, FLOATS),
}
NORMS: dict[str, Run] = {"rms_norm": _rms_norm, "layer_norm": _layer_norm}
CAST = _cast
WHERE = _out(torch.where)
IOTA = _iota
CAST_F8E4M3 = _cast_f8e4m3
