"""Ops that make tensors from numbers, and reductions."""

from typing import Any

from torch import fx

from metainfer.compiler.aten.statistics import axes_of
from metainfer.compiler.aten.table import ATEN, Call, Lower, argument, lowers
from metainfer.compiler.lowering import Lowering, as_attr, fake, scalar_name
from metainfer.ir.dims import dim
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Value


def _full(value: Any = None) -> Lower:
    def lower(s: Lowering, n: Call) -> Value:
        tensor = fake(n)
        number = argument(n, 1, "fill_value") if value is None else value
        shape = as_attr([s.to_dim(v) for v in tensor.shape])
        if isinstance(number, fx.Node):
            filler = s.cast(s.value(number), scalar_name(tensor.dtype))
            return s.emit("broadcast", filler, shape=shape)
        return s.emit("full", shape=shape, value=number, dtype=scalar_name(tensor.dtype))

    return lower


for _names, _number_of in (
    (("full", "full_like", "scalar_tensor", "new_full"), None),
    (("zeros", "zeros_like", "new_zeros"), 0),
    (("ones", "ones_like", "new_ones"), 1),
):
    for _aten in _names:
        ATEN[f"aten.{_aten}"] = _full(_number_of)


@lowers("new_full")
def _new_full(s: Lowering, n: Call) -> Value:
    tensor = fake(n)
    shape = as_attr([s.to_dim(v) for v in tensor.shape])
    return s.emit("full", shape=shape, value=n.args[2], dtype=scalar_name(tensor.dtype))


@lowers("scalar_tensor")
def _scalar_tensor(s: Lowering, n: Call) -> Value:
    return s.scalar(n.args[0])


@lowers("arange")
def _arange(s: Lowering, n: Call) -> Value:
    args = [a for a in n.args]
    start = 0 if len(args) == 1 else args[0]
    step = args[2] if len(args) > 2 else 1
    if not isinstance(start, int) or not isinstance(step, int):
        raise Unsupported("arange with a start or step that is no plain integer")
    tensor = fake(n)
    size = s.to_dim(tensor.shape[0])
    return s.emit("iota", size=size.attr, start=start, step=step, dtype=scalar_name(tensor.dtype))


@lowers("tril", "triu")
def _triangle(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    diagonal = int(argument(n, 1, "diagonal", 0))
    rows, columns = x.tensor.shape[-2:]
    i = s.reshape(s.emit("iota", size=rows.attr), (rows, dim(1)))
    j = s.reshape(s.emit("iota", size=columns.attr, start=-diagonal), (dim(1), columns))
    keep = s.emit("le" if "tril" in str(n.target) else "ge", j, i)
    return s.emit("where", keep, x, s.scalar(0, x.tensor.dtype.name))


def _reduce(name: str) -> Lower:
    def lower(s: Lowering, n: Call) -> Value:
        x = s.value(n.args[0])
        if name in ("sum", "mean"):
            x = s.cast(x, scalar_name(fake(n).dtype))
        dims = axes_of(s, argument(n, 1, "dim"), x.tensor.rank)
        return s.emit(name, x, dims=dims, keep=bool(argument(n, 2, "keepdim", False)))

    return lower


for _aten, _name in {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}.items():
    ATEN[f"aten.{_aten}"] = _reduce(_name)


@lowers("argmax")
def _argmax(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    axis = argument(n, 1, "dim")
    if axis is None:
        x, axis = s.reshape(x, [x.tensor.num_elements()]), 0
    made = s.emit("argmax", x, dim=s.axis(axis, x.tensor.rank))
    return s.reshape(made, [s.to_dim(v) for v in fake(n).shape])


@lowers("softmax", "_softmax", "_safe_softmax")
def _softmax(s: Lowering, n: Call) -> Value:
    x = s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))
    return s.emit("softmax", x, dim=s.axis(n.args[1], x.tensor.rank))


@lowers("log_softmax", "_log_softmax")
def _log_softmax(s: Lowering, n: Call) -> Value:
    x = s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))
    dims = (s.axis(n.args[1], x.tensor.rank),)
    shifted = s.emit("sub", x, s.emit("max", x, dims=dims, keep=True))
    total = s.emit("sum", s.emit("exp", shifted), dims=dims, keep=True)
    return s.emit("sub", shifted, s.emit("log", total))


@lowers("cumsum")
def _cumsum(s: Lowering, n: Call) -> Value:
    x = s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))
    return s.emit("cumsum", x, dim=s.axis(n.args[1], x.tensor.rank))
