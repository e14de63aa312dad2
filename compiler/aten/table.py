"""The table of lowerings, and what they share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from metainfer.compiler.lowering import Lowering, Table, scalar_name
from metainfer.ir.dims import Dim
from metainfer.ir.graph import Value

ATEN: Table = {}
# NOTE: an fx.Node; torch types its arguments as a union of all kinds, which no check can narrow.
Call = Any
Lower = Callable[[Lowering, Call], Any]


def lowers(*names: str) -> Callable[[Lower], Lower]:
    """Register a lowering for aten ops."""

    def register(function: Lower) -> Lower:
        for name in names:
            ATEN[f"aten.{name}"] = function
        return function

    return register


def argument(node: Call, index: int, name: str, default: Any = None) -> Any:
    """A positional or keyword argument of a call."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def promoted(s: Lowering, operands: Sequence[Any], dtype: torch.dtype) -> list[Value]:
    """Operands as values of one dtype; numbers become constants of it."""
    name = scalar_name(dtype)
    made = []
    for operand in operands:
        if isinstance(operand, fx.Node) and isinstance(s.values.get(operand), Value):
            made.append(s.cast(s.value(operand), name))
        elif isinstance(operand, fx.Node):
            made.append(s.cast(size_value(s, s.size(operand)), name))
        else:
            made.append(s.scalar(operand, name))
    return made


def size_value(s: Lowering, size: Dim, dtype: str = "i64") -> Value:
    """A size as a number to compute with."""
    if size.is_static:
        return s.scalar(size.constant, dtype)
    # The last of 1, 2, ... size.
    counted = s.emit("iota", size=size.attr, start=1, dtype=dtype)
    last = s.emit("slice", counted, dim=0, start=(size - 1).attr, stop=size.attr)
    return s.reshape(last, ())


def number_of(s: Lowering, operand: Any) -> Any:
    """A plain number, or the number that a static size stands for."""
    if isinstance(operand, fx.Node):
        return s.size(operand).static
    return operand
