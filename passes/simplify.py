"""Algebra on single ops: what they amount to, given how their operands are made.

Each function takes an op whose operands are simple already and gives back a value that is equal to
its result, a simpler op, or None.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import Scalar, parse_dtype
from metainfer.ir.graph import Attr, Op, Value, attrs_of
from metainfer.ir.ops.record import attr_value, op_def
from metainfer.ir.types import TensorType
from metainfer.passes.fold import MAKERS, number_in


@dataclass
class Known:
    """How values met so far are made."""

    producers: dict[str, Op] = field(default_factory=dict[str, Op])
    makers: dict[str, Op] = field(default_factory=dict[str, Op])

    def add(self, op: Op) -> None:
        """Remember an op."""
        self.producers.update((v.name, op) for v in op.results)
        if op.name in MAKERS:
            self.makers[op.result.name] = op

    def producer(self, value: Value, name: str) -> Op | None:
        """The op that made a value, if it has this name."""
        found = self.producers.get(value.name)
        return found if found is not None and found.name == name else None


Simplified = Value | Op | None
Simplify = Callable[[Op, Known], Simplified]


def simplify(op: Op, known: Known) -> Simplified:
    """A value equal to the op's result, a simpler op, or None."""
    function = _TABLE.get(op.name)
    made = function(op, known) if function is not None else None
    if isinstance(made, Value) and made.type != op.result.type:
        return None
    return made


def with_normal_attrs(op: Op) -> Op:
    """The op without attributes that have their default, and with plain numbers for static sizes.

    A ``full`` or ``constant`` holds numbers of its own kind, so that 1 and 1.0 do not differ.
    """
    if op.name in ("call", "fused"):
        return op
    defaults = {spec.name: spec.default for spec in op_def(op.name).attrs if not spec.is_required}
    kept: dict[str, Attr] = {}
    for name, value in op.attrs:
        plain = _plain_sizes(value)
        if name in ("value", "values") and op.name in ("full", "constant"):
            plain = _of_kind(plain, parse_dtype(str(op.attr["dtype"])).kind)
        default = defaults.get(name, None)
        if name == "dim" and default == -1 and op.operands:
            # The last dim has two numbers; kernels ask for the default.
            plain = -1 if plain == op.operands[0].tensor.rank - 1 else plain
        if not (name in defaults and plain == default and type(plain) is type(default)):
            kept[name] = plain
    attrs = attrs_of(kept)
    return op if attrs == op.attrs and repr(attrs) == repr(op.attrs) else replace(op, attrs=attrs)


def _plain_sizes(value: Attr) -> Attr:
    if isinstance(value, Dim):
        return value.constant if value.is_static else value
    return tuple(map(_plain_sizes, value)) if isinstance(value, tuple) else value


def _of_kind(value: Attr, kind: str) -> Attr:
    if isinstance(value, tuple):
        return tuple(_of_kind(v, kind) for v in value)
    if not isinstance(value, bool | int | float):
        return value
    if kind == "float":
        return float(value)
    if kind == "bool":
        return bool(value)
    # Infinity and fractions are no integers: they stay as written.
    return int(value) if float(value).is_integer() else value


def _sharded(*values: Value) -> bool:
    return any(v.tensor.sharding.axes for v in values)


# --- views -------------------------------------------------------------------------------------


def _reshape(op: Op, known: Known) -> Simplified:
    (x,) = op.operands
    if x.type == op.result.type:
        return x
    inner = known.producer(x, "reshape")
    if inner is None or _sharded(x, op.result):
        return None
    return replace(op, operands=inner.operands)


def _transpose(op: Op, known: Known) -> Simplified:
    (x,) = op.operands
    perm = cast(tuple[int, ...], op.attr["perm"])
    if perm == tuple(range(len(perm))):
        return x
    inner = known.producer(x, "transpose")
    if inner is None or _sharded(x, op.result):
        return None
    first = cast(tuple[int, ...], inner.attr["perm"])
    composed = tuple(first[i] for i in perm)
    return replace(op, operands=inner.operands, attrs=(("perm", composed),))


def _broadcast(op: Op, known: Known) -> Simplified:
    (x,) = op.operands
    if x.type == op.result.type:
        return x
    inner = known.producer(x, "broadcast")
    if inner is None or _sharded(x, op.result):
        return None
    return replace(op, operands=inner.operands)


def _slice(op: Op, known: Known) -> Simplified:
    (x,) = op.operands
    axis = cast(int, op.attr["dim"]) % x.tensor.rank
    start, stop, step = _bounds(op)
    if (start, step) == (dim(0), 1) and stop == x.tensor.shape[axis]:
        return x
    inner = known.producer(x, "slice")
    if inner is None or _sharded(x, op.result):
        return None
    first, _, inner_step = _bounds(inner)
    if inner_step != 1 or cast(int, inner.attr["dim"]) % x.tensor.rank != axis:
        return None
    attrs: dict[str, Attr] = {"dim": axis, "start": first + start, "stop": first + stop}
    if step != 1:
        attrs["step"] = step
    return with_normal_attrs(replace(op, operands=inner.operands, attrs=attrs_of(attrs)))


def _bounds(op: Op) -> tuple[Dim, Dim, int]:
    attr = op.attr
    start, stop = (dim(cast(Dim | int, attr[k])) for k in ("start", "stop"))
    return start, stop, cast(int, attr_value(op, "step"))


def _concat(op: Op, known: Known) -> Simplified:
    if len(op.operands) == 1:
        return op.operands[0]
    return _joined(op, known)


def _joined(op: Op, known: Known) -> Simplified:
    """Adjacent slices put together again are what they were cut from."""
    axis = cast(int, op.attr["dim"]) % op.result.tensor.rank
    parts = [known.producer(v, "slice") for v in op.operands]
    at = dim(0)
    whole: Value | None = None
    for part in parts:
        if part is None or cast(int, part.attr["dim"]) % op.result.tensor.rank != axis:
            return None
        start, stop, step = _bounds(part)
        whole = whole or part.operands[0]
        if start != at or step != 1 or part.operands[0] != whole:
            return None
        at = stop
    return whole


def _pad(op: Op, known: Known) -> Simplified:
    return op.operands[0] if op.operands[0].type == op.result.type else None


# --- casts -------------------------------------------------------------------------------------

# Types that hold every number of the one on the left.
_WIDER: dict[str, frozenset[str]] = {
    "bool": frozenset("i8 u8 i16 i32 i64 f16 bf16 f32 f64".split()),
    "i8": frozenset("i16 i32 i64 f16 bf16 f32 f64".split()),
    "u8": frozenset("i16 i32 i64 f16 bf16 f32 f64".split()),
    "i16": frozenset("i32 i64 f32 f64".split()),
    "i32": frozenset("i64 f64".split()),
    "f8e4m3": frozenset("f16 bf16 f32 f64".split()),
    "f8e5m2": frozenset("f16 bf16 f32 f64".split()),
    "f16": frozenset("f32 f64".split()),
    "bf16": frozenset("f32 f64".split()),
    "f32": frozenset(["f64"]),
}


def _cast(op: Op, known: Known) -> Simplified:
    (x,) = op.operands
    if x.type == op.result.type:
        return x
    inner = known.producer(x, "cast")
    if inner is None:
        return None
    first = inner.operands[0]
    if not isinstance(first.tensor.dtype, Scalar):
        return None
    if x.tensor.dtype.name not in _WIDER.get(first.tensor.dtype.name, ()):
        return None
    return first if first.type == op.result.type else replace(op, operands=(first,))


# --- arithmetic --------------------------------------------------------------------------------


def _neutral(number: float, *, right_only: bool = False) -> Simplify:
    """An operand that changes nothing."""

    def function(op: Op, known: Known) -> Simplified:
        x, y = op.operands
        if number_in(y, known.makers) == number and not _is_bool(y):
            return x
        if not right_only and number_in(x, known.makers) == number and not _is_bool(x):
            return y
        return None

    return function


def _is_bool(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype.kind == "bool"


def _twice(op: Op, known: Known) -> Simplified:
    """An op that undoes itself."""
    inner = known.producer(op.operands[0], op.name)
    return inner.operands[0] if inner is not None else None


_TABLE: Mapping[str, Simplify] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "slice": _slice,
    "concat": _concat,
    "pad": _pad,
    "cast": _cast,
    "add": _neutral(0),
    "sub": _neutral(0, right_only=True),
    "mul": _neutral(1),
    "div": _neutral(1, right_only=True),
    "floor_div": _neutral(1, right_only=True),
    "pow": _neutral(1, right_only=True),
    "neg": _twice,
    "logical_not": _twice,
}
