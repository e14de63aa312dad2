"""The record of an op, and the registry that one decorator fills.

An op is written as its numpy reference; the signature gives the text form:

    @op("rms_norm", infer=..., flops=..., shard="... D!, D! -> ... D!")
    def rms_norm(x: Array, weight: Array, *, eps: float) -> Array:

Positional parameters are operands (``| None`` makes a trailing one optional, ``*xs`` takes any
number), keyword-only ones are attributes with their defaults.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np

from metainfer.ir.dims import Dim
from metainfer.ir.dtypes import Block
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Attr, Graph, Op, Source, Value, attrs_of
from metainfer.ir.types import StateType, TensorType, Type

Array = np.ndarray[Any, np.dtype[Any]]
Attrs = Mapping[str, Attr]
Infer = Callable[[Sequence[Type], Attrs], tuple[Type, ...]]
Count = Callable[["Sizes"], int]
ShardRule = Callable[[Sequence[Type], Attrs], str]

ELEMENTWISE = "elementwise"  # result element i depends on operand elements i only
VIEW = "view"  # moves no number: may cost nothing
REDUCTION = "reduction"
RAW = "raw"  # the reference takes BlockArrays and states as they are
MOVES = "moves"  # numbers come out as they went in, in another order or number
STATEFUL = "stateful"  # writes a state
NONDETERMINISTIC = "nondeterministic"
COLLECTIVE = "collective"  # changes a sharding and no value; ranks must meet at it


@dataclass(frozen=True)
class Sizes:
    """What a cost function sees: concrete operand and result types.

    Attributes:
        operands: types of the operands.
        results: types of the results.
        attrs: attributes.
        env: values of the size symbols.
    """

    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    attrs: Attrs
    env: Mapping[str, int]

    def shape(self, operand: int) -> tuple[int, ...]:
        """Concrete shape of an operand."""
        return _tensor(self.operands[operand]).concrete(self.env)

    def result_shape(self, result: int = 0) -> tuple[int, ...]:
        """Concrete shape of a result."""
        return _tensor(self.results[result]).concrete(self.env)

    def num_results(self) -> int:
        """Elements of the first result."""
        return int(np.prod(self.result_shape(), dtype=np.int64))


@dataclass(frozen=True)
class OperandSpec:
    """One operand of the signature."""

    name: str
    optional: bool = False
    variadic: bool = False


@dataclass(frozen=True)
class AttrSpec:
    """One attribute; ``default`` is `inspect.Parameter.empty` where the attribute is required."""

    name: str
    default: Any
    annotation: Any

    @property
    def is_required(self) -> bool:
        """Whether the attribute has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def kind(self) -> str:
        """What values are taken, in words."""
        names = (_KINDS.get(t, getattr(t, "__name__", str(t))) for t in self._types())
        return " or ".join(names)

    def takes(self, value: Attr) -> bool:
        """Whether a value is of the annotated type; a whole number passes for a real one."""
        if self.annotation is Attr:
            return True
        types = self._types()
        if isinstance(value, bool):
            return bool in types
        return isinstance(value, types) or (float in types and isinstance(value, int))

    def _types(self) -> tuple[type, ...]:
        parts = get_args(self.annotation) if _is_union(self.annotation) else (self.annotation,)
        return tuple(get_origin(p) or p for p in parts)


@dataclass(frozen=True)
class OpDef:
    """Everything the house knows about an op.

    Attributes:
        name: name in text.
        operands: operand names in order.
        attrs: attributes with defaults.
        infer: operand types and attributes -> result types.
        reference: numpy function: float32 arrays (and integer arrays) in and out.
        flops: floating-point operations at concrete sizes.
        bytes: compulsory memory traffic at concrete sizes.
        shard: sharding rule (see `ir.shard_rule`), or what makes one from operand types and
            complete attributes.
        traits: properties that passes ask for.
    """

    name: str
    operands: tuple[OperandSpec, ...]
    attrs: tuple[AttrSpec, ...]
    infer: Infer
    reference: Callable[..., Any]
    flops: Count
    bytes: Count
    shard: str | ShardRule
    traits: frozenset[str]

    def has(self, trait: str) -> bool:
        """Whether the op has a trait."""
        return trait in self.traits

    def shard_rule(self, operands: Sequence[Type], attrs: Attrs) -> str:
        """The sharding rule as text, "" where there is none; ``attrs`` are complete."""
        return self.shard if isinstance(self.shard, str) else self.shard(operands, attrs)

    def complete(self, attrs: Attrs) -> dict[str, Attr]:
        """Attributes with defaults filled in.

        Raises: TypeMismatch for an unknown or missing attribute, or one of a wrong kind.
        """
        known = {spec.name: spec for spec in self.attrs}
        unknown = [name for name in attrs if name not in known]
        if unknown:
            raise TypeMismatch(
                f"{self.name} has no attribute {unknown[0]!r}",
                advice=f"it has: {', '.join(known) or 'none'}",
            )
        missing = [s.name for s in self.attrs if s.is_required and s.name not in attrs]
        if missing:
            raise TypeMismatch(f"{self.name} needs the attribute {missing[0]!r}")
        for name, value in attrs.items():
            if not known[name].takes(value):
                raise TypeMismatch(
                    f"{self.name}: attribute {name} = {value!r} is no {known[name].kind}"
                )
        return {spec.name: attrs.get(spec.name, spec.default) for spec in self.attrs}

    def check_arity(self, count: int) -> None:
        """Check the number of operands.

        Raises: TypeMismatch if it does not fit the signature.
        """
        least = sum(1 for o in self.operands if not o.optional and not o.variadic)
        most = None if any(o.variadic for o in self.operands) else len(self.operands)
        if count < least or (most is not None and count > most):
            names = ", ".join(
                o.name + ("?" if o.optional else "...") * (o.optional or o.variadic)
                for o in self.operands
            )
            raise TypeMismatch(f"{self.name}({names}) got {count} operands")


OPS: dict[str, OpDef] = {}


_KINDS = {int: "whole number", float: "number", bool: "truth value", str: "text"}


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _tensor(type_: Type) -> TensorType:
    if isinstance(type_, TensorType):
        return type_
    raise TypeMismatch("a state where a tensor is needed")


def _default_bytes(sizes: Sizes) -> int:
    tensors = [t for t in (*sizes.operands, *sizes.results) if isinstance(t, TensorType)]
    return sum(t.bytes_at(sizes.env) for t in tensors)


def _no_flops(sizes: Sizes) -> int:
    return 0


def op(
    name: str,
    *,
    infer: Infer,
    flops: Count = _no_flops,
    bytes: Count = _default_bytes,
    shard: str | ShardRule = "",
    traits: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an op; the decorated function is its numpy reference.

    Raises: ValueError if the name is taken.
    """

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        if name in OPS:
            raise ValueError(f"op {name!r} is registered twice")
        operands, attrs = _signature(reference)
        OPS[name] = OpDef(
            name, operands, attrs, infer, reference, flops, bytes, shard, frozenset(traits)
        )
        return reference

    return register


def _signature(
    reference: Callable[..., Any],
) -> tuple[tuple[OperandSpec, ...], tuple[AttrSpec, ...]]:
    operands: list[OperandSpec] = []
    attrs: list[AttrSpec] = []
    for p in inspect.signature(reference).parameters.values():
        if p.kind is inspect.Parameter.KEYWORD_ONLY:
            attrs.append(AttrSpec(p.name, p.default, p.annotation))
        else:
            variadic = p.kind is inspect.Parameter.VAR_POSITIONAL
            operands.append(OperandSpec(p.name, p.default is None, variadic))
    return tuple(operands), tuple(attrs)


def op_def(name: str) -> OpDef:
    """The record of an op.

    Raises: TypeMismatch if the name is unknown.
    """
    found = OPS.get(name)
    if found is not None:
        return found
    import difflib

    near = difflib.get_close_matches(name, OPS, n=3)
    advice = (
        f"did you mean {', '.join(near)}?"
        if near
        else "add a record in ir/ops/ (CONTRIBUTING, recipe a)"
    )
    raise TypeMismatch(f"unknown op {name!r}", advice=advice)


def infer_types(name: str, operands: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    """Result types of an op, shardings apart.

    Raises: TypeMismatch naming the op if operands or attributes do not fit.
    """
    record = op_def(name)
    record.check_arity(len(operands))
    complete = record.complete(attrs)
    try:
        results = record.infer(operands, complete)
    except TypeMismatch as error:
        if error.what.startswith(name):
            raise
        raise TypeMismatch(f"{name}: {error.what}", advice=error.advice) from None
    if not record.has(RAW) and any(_is_block(t) for t in results):
        raise TypeMismatch(
            f"{name} cannot make a block format: {results[0]}", advice="dequantize the operand"
        )
    return results


def _is_block(type_: Type) -> bool:
    return isinstance(type_, TensorType) and isinstance(type_.dtype, Block)


def attr_value(op: Op, name: str) -> Attr:
    """An attribute of an op: as it stands there, else the default of the op's record.

    Raises: TypeMismatch if the op has no such attribute, or needs it and lacks it.
    """
    if op.name in ("fused", "call"):
        if name not in op.attr:
            raise TypeMismatch(f"{op.name} lacks the attribute {name!r}")
        return op.attr[name]
    complete = op_def(op.name).complete(op.attr)
    if name not in complete:
        raise TypeMismatch(f"{op.name} has no attribute {name!r}")
    return complete[name]


def op_sizes(op: Op, env: Mapping[str, int]) -> Sizes:
    """Concrete sizes of an op, for its cost functions."""
    attrs = op.attr if op.name in ("fused", "call") else op_def(op.name).complete(op.attr)
    return Sizes(tuple(v.type for v in op.operands), tuple(v.type for v in op.results), attrs, env)


class Builder:
    """Grows a list of ops with inferred types and fresh names.

    Args:
        start: number of the first fresh name.
    """

    def __init__(self, start: int = 0) -> None:
        self.ops: list[Op] = []
        self._next = start

    def fresh(self, type_: Type) -> Value:
        """A new value name."""
        value = Value(f"%{self._next}", type_)
        self._next += 1
        return value

    def emit(
        self, name: str, *operands: Value, source: Source | None = None, **attrs: Attr
    ) -> Value:
        """Append an op with one result and return it."""
        return self.emit_many(name, *operands, source=source, **attrs)[0]

    def emit_many(
        self, name: str, *operands: Value, source: Source | None = None, **attrs: Attr
    ) -> tuple[Value, ...]:
        """Append an op and return its results."""
        types = _sharded_types(name, [v.type for v in operands], attrs)
        results = tuple(self.fresh(t) for t in types)
        # Defaults are left out of the text: what is printed is what differs.
        kept = {k: v for k, v in attrs.items() if v != _default(name, k)}
        self.ops.append(Op(name, operands, results, attrs_of(kept), source=source))
        return results

    def append(self, op: Op) -> None:
        """Append a finished op."""
        self.ops.append(op)


def _sharded_types(name: str, operands: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    # Imported here since `ir.sharding` reads the records.
    from metainfer.ir.sharding import propagate

    return propagate(name, operands, attrs, infer_types(name, operands, attrs))


def _default(name: str, attr: str) -> Any:
    return next((s.default for s in op_def(name).attrs if s.name == attr), inspect.Parameter.empty)


def with_types(op: Op, types: Sequence[Type]) -> Op:
    """The op with other result types."""
    results = tuple(replace(v, type=t) for v, t in zip(op.results, types, strict=True))
    return replace(op, results=results)


__all__ = [
    "COLLECTIVE",
    "ELEMENTWISE",
    "MOVES",
    "NONDETERMINISTIC",
    "OPS",
    "RAW",
    "REDUCTION",
    "STATEFUL",
    "VIEW",
    "Array",
    "Attrs",
    "Builder",
    "Dim",
    "Graph",
    "OpDef",
    "ShardRule",
    "Sizes",
    "StateType",
    "attr_value",
    "infer_types",
    "op",
    "op_def",
    "op_sizes",
    "with_types",
]
