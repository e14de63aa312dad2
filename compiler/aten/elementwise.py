"""Ops that act element by element, and the bookkeeping of sizes."""

from typing import Any

import torch
from torch import fx

from metainfer.compiler.aten.table import ATEN, Call, Lower, argument, lowers, promoted
from metainfer.compiler.lowering import Lowering, fake, scalar_name
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Value


def _unary(name: str) -> Lower:
    return lambda s, n: s.emit(name, s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype)))


for _aten, _name in {
    "neg": "neg", "abs": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt",
    "reciprocal": "reciprocal", "sin": "sin", "cos": "cos", "tanh": "tanh", "erf": "erf",
    "sigmoid": "sigmoid", "relu": "relu", "silu": "silu", "floor": "floor",
}.items():  # fmt: skip
    ATEN[f"aten.{_aten}"] = _unary(_name)


def _binary(name: str) -> Lower:
    def lower(s: Lowering, n: Call) -> Value:
        x, y = promoted(s, n.args[:2], fake(n).dtype)
        alpha = n.kwargs.get("alpha", 1)
        if alpha != 1:
            y = s.emit("mul", y, s.scalar(alpha))
        return s.emit(name, x, y)

    return lower


for _aten, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "maximum",
    "minimum": "minimum", "remainder": "remainder", "floor_divide": "floor_div",
}.items():  # fmt: skip
    ATEN[f"aten.{_aten}"] = _binary(_name)


def _compare(name: str) -> Lower:
    def lower(s: Lowering, n: Call) -> Value:
        operands = n.args[:2]
        real = [a.meta["val"] if isinstance(a, fx.Node) else a for a in operands]
        x, y = promoted(s, operands, torch.result_type(*real))
        return s.emit(name, x, y)

    return lower


for _aten in ("eq", "ne", "lt", "le", "gt", "ge"):
    ATEN[f"aten.{_aten}"] = _compare(_aten)


@lowers("logical_and", "bitwise_and", "__and__")
def _and(s: Lowering, n: Call) -> Value:
    return s.emit("logical_and", *_booleans(s, n))


@lowers("logical_or", "bitwise_or", "__or__")
def _or(s: Lowering, n: Call) -> Value:
    return s.emit("logical_or", *_booleans(s, n))


@lowers("logical_not", "bitwise_not")
def _not(s: Lowering, n: Call) -> Value:
    return s.emit("logical_not", *_booleans(s, n))


def _booleans(s: Lowering, n: Call) -> list[Value]:
    values = [s.value(a) for a in n.args]
    if any(v.tensor.dtype.name != "bool" for v in values):
        raise Unsupported("bit operations on integers are not known", advice="use booleans")
    return values


@lowers("pow")
def _pow(s: Lowering, n: Call) -> Value:
    base, exponent = n.args[:2]
    x = s.cast(s.value(base), scalar_name(fake(n).dtype))
    # Squares, roots and their inverses have ops of their own, which rules look for.
    if exponent == 2:
        return s.emit("mul", x, x)
    for number, name in ((0.5, "sqrt"), (-0.5, "rsqrt"), (-1, "reciprocal")):
        if exponent == number:
            return s.emit(name, x)
    return s.emit("pow", *promoted(s, n.args[:2], fake(n).dtype))


@lowers("rsub")
def _rsub(s: Lowering, n: Call) -> Value:
    x, y = promoted(s, n.args[:2], fake(n).dtype)
    return s.emit("sub", y, x)


@lowers("gelu")
def _gelu(s: Lowering, n: Call) -> Value:
    return s.emit("gelu", s.value(n.args[0]), approximate=n.kwargs.get("approximate", "none"))


@lowers("clamp", "clamp_min", "clamp_max")
def _clamp(s: Lowering, n: Call) -> Value:
    kind = n.target._opname if isinstance(n.target, torch._ops.OpOverload) else ""
    low = argument(n, 1, "min") if kind != "clamp_max" else None
    high = argument(n, 2 if kind == "clamp" else 1, "max") if kind != "clamp_min" else None
    x = s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))
    for name, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            x = s.emit(name, x, *promoted(s, (bound,), fake(n).dtype))
    return x


@lowers("expm1")
def _expm1(s: Lowering, n: Call) -> Value:
    return s.emit("sub", s.emit("exp", s.value(n.args[0])), s.scalar(1.0))


@lowers("where")
def _where(s: Lowering, n: Call) -> Value:
    x, y = promoted(s, n.args[1:3], fake(n).dtype)
    return s.emit("where", s.value(n.args[0]), x, y)


@lowers("masked_fill")
def _masked_fill(s: Lowering, n: Call) -> Value:
    x, y = promoted(s, (n.args[2], n.args[0]), fake(n).dtype)
    return s.emit("where", s.value(n.args[1]), x, y)


@lowers("to", "_to_copy", "type_as", "float", "half", "bfloat16", "long", "int", "bool")
def _to(s: Lowering, n: Call) -> Value:
    return s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))


@lowers("contiguous", "clone", "detach", "alias", "lift_fresh_copy", "detach_", "dropout")
def _identity(s: Lowering, n: Call) -> Value:
    if n.target is torch.ops.aten.dropout.default and n.args[2]:
        raise Unsupported("dropout in training mode", advice="call model.eval() first")
    return s.value(n.args[0])


@lowers("sym_size", "sym_numel")
def _sym_size(s: Lowering, n: Call) -> Any:
    return s.to_dim(n.meta["val"])


@lowers(
    "_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range_for_size"
)
def _nothing(s: Lowering, n: Call) -> None:
    return None
