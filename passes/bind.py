"""Binding a pattern's variables: sizes, element types and attributes.

A binding that fails leaves the `Bindings` in no defined state: work on a copy.
"""

from dataclasses import dataclass, field
from typing import cast

from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import DType
from metainfer.ir.graph import Attr, Op, Value
from metainfer.ir.ops.record import op_def
from metainfer.ir.patterns import (
    AnyPattern,
    AttrVar,
    DTypeVar,
    PatternAttr,
    PatternOp,
    StatePattern,
    TypePattern,
)
from metainfer.ir.printer import print_attr
from metainfer.ir.types import TensorType

# Attributes that number dims of the first operand.
_AXES = frozenset(["dim", "dims"])


@dataclass
class Bindings:
    """What the variables of a pattern stand for.

    Attributes:
        values: pattern name -> value of the graph.
        sizes: size variables.
        dtypes: variables for element types.
        attrs: attribute variables, without their sigils.
        pending: sizes over several variables, to be checked when those are bound.
    """

    values: dict[str, Value] = field(default_factory=dict[str, Value])
    sizes: dict[str, Dim] = field(default_factory=dict[str, Dim])
    dtypes: dict[str, DType] = field(default_factory=dict[str, DType])
    attrs: dict[str, Attr] = field(default_factory=dict[str, Attr])
    pending: list[tuple[Dim, Dim]] = field(default_factory=list[tuple[Dim, Dim]])

    def copy(self) -> "Bindings":
        """Bindings that can be changed without changing these."""
        return Bindings(
            dict(self.values),
            dict(self.sizes),
            dict(self.dtypes),
            dict(self.attrs),
            list(self.pending),
        )

    def bind_value(self, name: str, value: Value) -> bool:
        """Let a pattern's value be this value, if it is no other one."""
        known = self.values.setdefault(name, value)
        return known.name == value.name

    def bind_type(self, pattern: AnyPattern, value: Value) -> bool:
        """Match a value's type."""
        if isinstance(pattern, StatePattern):
            return value.is_state
        return isinstance(value.type, TensorType) and self._bind_tensor(pattern, value.type)

    def _bind_tensor(self, pattern: TypePattern, type_: TensorType) -> bool:
        if isinstance(pattern.dtype, DTypeVar):
            if self.dtypes.setdefault(pattern.dtype.name, type_.dtype) != type_.dtype:
                return False
        elif pattern.dtype != type_.dtype:
            return False
        lead = type_.rank - len(pattern.shape)
        if lead < 0 or (lead and not pattern.free_lead):
            return False
        pairs = zip(pattern.shape, type_.shape[lead:], strict=True)
        return all(self.bind_size(wanted, size) for wanted, size in pairs)

    def bind_size(self, pattern: Dim, size: Dim) -> bool:
        """Match a size; one over several unbound variables is left for `settle`."""
        unbound = pattern.symbols() - self.sizes.keys()
        if not unbound:
            return pattern.substitute(self.sizes) == size
        if len(unbound) > 1:
            self.pending.append((pattern, size))
            return True
        return self._solve(pattern, next(iter(unbound)), size)

    def _solve(self, pattern: Dim, symbol: str, size: Dim) -> bool:
        """Bind the one unbound variable of ``2*F + H``; it may stand in no quotient."""
        factor = dict(pattern.terms).get(symbol, 0)
        others = Dim(tuple(t for t in pattern.terms if t[0] != symbol), pattern.constant)
        if factor <= 0 or symbol in others.symbols():
            return False
        rest = size - others.substitute(self.sizes)
        whole = rest // factor
        if whole * factor != rest:
            return False
        self.sizes[symbol] = whole
        return True

    def settle(self) -> bool:
        """Match the sizes that were left, as far as others bind their variables."""
        while self.pending:
            waiting, self.pending = self.pending, []
            if not all(self.bind_size(pattern, size) for pattern, size in waiting):
                return False
            if len(self.pending) == len(waiting):
                return False
        return True

    def bind_attrs(self, pattern: PatternOp, op: Op) -> bool:
        """Match all attributes; one that the pattern does not name must have its default.

        A negative dim of the pattern counts from the end, as everywhere.
        """
        wanted = dict(pattern.attrs)
        actual = op_def(op.name).complete(op.attr)
        defaults = {spec.name: spec.default for spec in op_def(op.name).attrs}
        for name, value in actual.items():
            expected: PatternAttr = wanted[name] if name in wanted else defaults[name]
            if name in _AXES and op.operands:
                value = _counted_alike(expected, value, op.operands[0].tensor.rank)
            if not self._bind_attr(expected, value):
                return False
        return wanted.keys() <= actual.keys()

    def _bind_attr(self, pattern: PatternAttr, value: Attr) -> bool:
        if isinstance(pattern, AttrVar):
            known = self.attrs.setdefault(pattern.name, value)
            return known is value or print_attr(known) == print_attr(value)
        if isinstance(pattern, Dim):
            return _is_size(value) and self.bind_size(pattern, dim(cast(Dim | int, value)))
        if isinstance(pattern, tuple):
            if not isinstance(value, tuple) or len(value) != len(pattern):
                return False
            return all(self._bind_attr(p, v) for p, v in zip(pattern, value, strict=True))
        if isinstance(value, Dim):
            return _is_size(pattern) and value == dim(cast(int, pattern))
        return pattern == value and isinstance(pattern, str) == isinstance(value, str)

    def attr(self, pattern: PatternAttr) -> Attr:
        """An attribute of ``after`` with its variables replaced; static sizes as numbers."""
        if isinstance(pattern, AttrVar):
            return self.attrs[pattern.name]
        if isinstance(pattern, Dim):
            size = pattern.substitute(self.sizes)
            return size.constant if size.is_static else size
        if isinstance(pattern, tuple):
            return tuple(self.attr(p) for p in pattern)
        return pattern


def _counted_alike(expected: object, axis: Attr, rank: int) -> Attr:
    """A dim number counted from the end where the expected one is."""
    if isinstance(expected, tuple) and isinstance(axis, tuple) and len(expected) == len(axis):
        pairs = zip(expected, axis, strict=True)
        return tuple(_counted_alike(e, a, rank) for e, a in pairs)
    if isinstance(expected, int) and isinstance(axis, int) and expected < 0 <= axis:
        return axis - rank
    return axis


def _is_size(value: object) -> bool:
    return isinstance(value, Dim) or (isinstance(value, int) and not isinstance(value, bool))
