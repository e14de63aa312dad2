"""Rounding, signs and powers of two, spelled by ops that the IR has."""

import math

from metainfer.compiler.aten.table import Call, argument, lowers, promoted
from metainfer.compiler.lowering import Lowering, fake
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Value


@lowers("round")
def _round(s: Lowering, n: Call) -> Value:
    """To the nearest, ties to even: x - floor(x) is exact, x + 0.5 would not be."""
    if argument(n, 1, "decimals", 0):
        raise Unsupported("round to decimals", advice="scale, round, scale back")
    x = s.value(n.args[0])
    below = s.emit("floor", x)
    rest = s.emit("sub", x, below)
    half, two = s.scalar(0.5), s.scalar(2.0)
    odd = s.emit("remainder", below, two)
    at_half = s.emit("where", s.emit("eq", rest, half), odd, s.scalar(0.0))
    up = s.emit("where", s.emit("gt", rest, half), s.scalar(1.0), at_half)
    return s.emit("add", below, up)


@lowers("ceil")
def _ceil(s: Lowering, n: Call) -> Value:
    return _raised(s, s.value(n.args[0]))


def _raised(s: Lowering, x: Value) -> Value:
    return s.emit("neg", s.emit("floor", s.emit("neg", x)))


@lowers("trunc", "fix")
def _trunc(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    return s.emit("where", s.emit("lt", x, s.scalar(0.0)), _raised(s, x), s.emit("floor", x))


@lowers("sign")
def _sign(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    name = x.tensor.dtype.name
    zero = s.scalar(0, name)
    above, below = (s.cast(s.emit(k, x, zero), name) for k in ("gt", "lt"))
    return s.emit("sub", above, below)


@lowers("fmod")
def _fmod(s: Lowering, n: Call) -> Value:
    """The remainder with the sign of the dividend: that of the magnitudes."""
    x, y = promoted(s, n.args[:2], fake(n).dtype)
    rest = s.emit("remainder", s.emit("abs", x), s.emit("abs", y))
    return s.emit("where", s.emit("lt", x, s.scalar(0)), s.emit("neg", rest), rest)


@lowers("exp2")
def _exp2(s: Lowering, n: Call) -> Value:
    return s.emit("pow", s.scalar(2.0), s.value(n.args[0]))


@lowers("log2", "log10")
def _log(s: Lowering, n: Call) -> Value:
    base = 2 if "log2" in str(n.target) else 10
    return s.emit("mul", s.emit("log", s.value(n.args[0])), s.scalar(1 / math.log(base)))


@lowers("isnan")
def _isnan(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    return s.emit("ne", x, x)


@lowers("hardtanh")
def _hardtanh(s: Lowering, n: Call) -> Value:
    low, high = argument(n, 1, "min_val", -1.0), argument(n, 2, "max_val", 1.0)
    x = s.emit("maximum", s.value(n.args[0]), s.scalar(low))
    return s.emit("minimum", x, s.scalar(high))


@lowers("prelu", "_prelu_kernel")
def _prelu(s: Lowering, n: Call) -> Value:
    x, weight = s.value(n.args[0]), s.value(n.args[1])
    if weight.tensor.rank == 1 and x.tensor.rank > 1 and weight.tensor.shape[0].static > 1:
        from metainfer.compiler.aten.statistics import along

        weight = along(s, weight, 1, x.tensor.rank)
    return s.emit("where", s.emit("gt", x, s.scalar(0.0)), x, s.emit("mul", x, weight))
