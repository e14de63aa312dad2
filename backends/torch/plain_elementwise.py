"""Plain PyTorch forms of the elementwise ops: float32 inside, rounded once at the border."""

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.tensors import widen

Run = Callable[[TorchCall], None]
Unary = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _unary(function: Unary) -> Run:
    def run(call: TorchCall) -> None:
        call.outputs[0].copy_(function(widen(call.inputs[0])))

    return run


def _binary(function: Binary) -> Run:
    def run(call: TorchCall) -> None:
        call.outputs[0].copy_(function(widen(call.inputs[0]), widen(call.inputs[1])))

    return run


def _safe_divisor(x: torch.Tensor, y: torch.Tensor, function: Binary) -> torch.Tensor:
    """Integer division by zero gives 0, as numpy does, where torch would raise on a CPU."""
    if x.dtype.is_floating_point:
        return function(x, y)
    zero = y == 0
    return function(x, torch.where(zero, 1, y)).masked_fill(zero, 0)


def _divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y) if x.dtype.is_floating_point else _floor_divide(x, y)


def _floor_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _safe_divisor(x, y, lambda a, b: torch.div(a, b, rounding_mode="floor"))


def _remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _safe_divisor(x, y, torch.remainder)


def _where(call: TorchCall) -> None:
    condition, x, y = call.inputs
    call.outputs[0].copy_(torch.where(condition, x, y))


def _cast(call: TorchCall) -> None:
    # Torch truncates floats to integers and rounds floats to nearest even, as the reference does.
    call.outputs[0].copy_(nan_beyond(call.inputs[0], call.outputs[0].dtype))


# First magnitude that no longer rounds to the type's largest value: from there on the reference
# gives NaN, torch the largest value.
_NAN_FROM = {torch.float8_e4m3fn: 464.0}


def nan_beyond(x: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Make what a type cannot hold NaN before torch would clip it."""
    limit = _NAN_FROM.get(target)
    if limit is None or not x.dtype.is_floating_point:
        return x
    wide = widen(x)
    return wide.masked_fill(wide.abs() > limit, math.nan)


def _gelu(call: TorchCall) -> None:
    x = widen(call.inputs[0])
    call.outputs[0].copy_(functional.gelu(x, approximate=str(call.attrs["approximate"])))


def _silu_mul(call: TorchCall) -> None:
    gate, up = call.inputs
    call.outputs[0].copy_(functional.silu(widen(gate)) * widen(up))


def _gelu_mul(call: TorchCall) -> None:
    gate, up = call.inputs
    approximate = str(call.attrs["approximate"])
    call.outputs[0].copy_(functional.gelu(widen(gate), approximate=approximate) * widen(up))


def _silu_mul_halves(call: TorchCall) -> None:
    gate, up = call.inputs[0].chunk(2, dim=-1)
    call.outputs[0].copy_(functional.silu(widen(gate)) * widen(up))


UNARY: dict[str, Unary] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "silu": functional.silu,
    "floor": torch.floor,
    "logical_not": torch.logical_not,
}
BINARY: dict[str, Binary] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": _divide,
    "floor_div": _floor_divide,
    "remainder": _remainder,
    "pow": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
}
PLAIN_ELEMENTWISE: dict[str, Run] = {
    **{name: _unary(f) for name, f in UNARY.items()},
    **{name: _binary(f) for name, f in BINARY.items()},
    "where": _where,
    "cast": _cast,
    "gelu": _gelu,
    "silu_mul": _silu_mul,
    "gelu_mul": _gelu_mul,
    "silu_mul_halves": _silu_mul_halves,
}
