"""The state of lowering an exported program: values by node, sizes by symbol, errors by line."""

import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

import metainfer
from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import Scalar, parse_dtype
from metainfer.ir.errors import MetainferError, TypeMismatch, Unsupported
from metainfer.ir.graph import Attr, Source, Value
from metainfer.ir.ops.record import Builder
from metainfer.ir.types import TensorType

DTYPES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
}
# Frames of these are never the user's model.
_LIBRARY = (
    "/torch/",
    "torch/fx/",
    "/models/functional.py",
    "/compiler/known_experts.py",
    "/transformers/",
)


def scalar_name(dtype: torch.dtype, what: str = "a tensor") -> str:
    """Name of a torch element type.

    Raises: Unsupported for types outside the language (complex numbers, say).
    """
    if dtype not in DTYPES:
        raise Unsupported(
            f"{what} has element type {dtype}", advice=f"known: {', '.join(DTYPES.values())}"
        )
    return DTYPES[dtype]


def shown_path(file: str) -> str:
    """A model file's name as plans show it: relative to the package, a site folder or here."""
    path = Path(file)
    for root in (Path(metainfer.__file__).parent, Path.cwd()):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    parts = path.parts
    for marker in ("site-packages", "metainfer"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) + 1 :])
    return path.name


@functools.cache
def _is_library(file: str) -> bool:
    return any(part in file for part in _LIBRARY)


def source_of(node: fx.Node) -> Source | None:
    """Innermost line of the model that made a node."""
    trace = node.meta.get("stack_trace") or ""
    return _parse_trace(trace)


@functools.lru_cache(maxsize=65536)
def _parse_trace(trace: str) -> Source | None:
    for line in reversed(trace.splitlines()):
        text = line.strip()
        if not text.startswith('File "'):
            continue
        file, _, rest = text[6:].partition('", line ')
        if not _is_library(file):
            return Source(shown_path(file), int(rest.split(",")[0]))
    return None


@dataclass
class Lowering:
    """Lowers nodes of one exported program to ops.

    Attributes:
        builder: grows the list of ops.
        values: lowered value (or tuple of values, or size) of each node.
        symbols: name of each sympy symbol.
        node: the node in hand, for sources and errors.
        states: states met so far, by full name.
        final: last version of each state.
        owner: module path that each op came from, parallel to builder.ops.
    """

    builder: Builder
    values: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    symbols: dict[str, str] = field(default_factory=dict[str, str])
    node: fx.Node | None = None
    states: dict[str, Value] = field(default_factory=dict[str, Value])
    final: dict[str, Value] = field(default_factory=dict[str, Value])
    owner: list[str] = field(default_factory=list[str])

    def emit(self, name: str, *operands: Value, **attrs: Attr) -> Value:
        """Append an op at the current node's source line."""
        return self.emit_many(name, *operands, **attrs)[0]

    def emit_many(self, name: str, *operands: Value, **attrs: Attr) -> tuple[Value, ...]:
        """Append an op with any number of results."""
        source = source_of(self.node) if self.node is not None else None
        results = self.builder.emit_many(name, *operands, source=source, **attrs)
        self.owner.append(module_path(self.node) if self.node is not None else "")
        return results

    def value(self, argument: Any) -> Value:
        """The tensor value of an argument; numbers become constants of the node's dtype.

        Raises: Unsupported for anything else.
        """
        if isinstance(argument, fx.Node):
            found = self.values.get(argument)
            if isinstance(found, Value):
                return found
            argument = self.size(argument).static if found is None else found
        if isinstance(argument, bool | int | float):
            return self.scalar(argument)
        raise Unsupported(f"an operand {argument!r} that is no tensor")

    def scalar(self, number: bool | int | float, dtype: str = "") -> Value:
        """A constant of rank 0; its type is the node's result type unless given."""
        name = dtype or scalar_name(fake(self.node).dtype)
        return self.emit("full", shape=(), value=number, dtype=name)

    def size(self, argument: Any) -> Dim:
        """A size argument: a number, or a symbolic integer.

        Raises: Unsupported if the size depends on data.
        """
        if isinstance(argument, fx.Node):
            argument = argument.meta["val"]
        return self.to_dim(argument)

    def sizes(self, arguments: Sequence[Any]) -> tuple[Dim, ...]:
        """Several sizes."""
        return tuple(self.size(a) for a in arguments)

    def to_dim(self, number: Any) -> Dim:
        """A concrete or symbolic integer as a size."""
        if isinstance(number, torch.SymInt):
            return self._from_sympy(number.node.expr)
        return dim(int(number))

    def _from_sympy(self, expression: Any) -> Dim:
        kind = type(expression).__name__
        if expression.is_Symbol:
            return self._symbol(str(expression))
        if expression.is_Integer:
            return dim(int(expression))
        if kind == "Add":
            return sum((self._from_sympy(a) for a in expression.args), start=Dim())
        if kind == "Mul" and sum(not a.is_Integer for a in expression.args) == 1:
            return functools.reduce(operator.mul, (self._from_sympy(a) for a in expression.args))
        if kind in ("FloorDiv", "CleanDiv") and expression.args[1].is_Integer:
            return self._from_sympy(expression.args[0]) // int(expression.args[1])
        if kind == "CeilToInt":
            inner = expression.args[0]
            if type(inner).__name__ == "IntTrueDiv":
                return self._from_sympy(inner.args[0]).ceildiv(int(inner.args[1]))
        raise Unsupported(
            f"size {self._named(expression)} is not affine",
            advice="sizes may be sums, products with numbers, and divisions by numbers; fix all "
            "but one of the sizes that are multiplied, or keep them in dims of their own",
        )

    def _named(self, expression: Any) -> str:
        """The expression with the symbols' names of the user."""
        return re.sub(r"[A-Za-z_]\w*", lambda m: self.symbols.get(m[0], m[0]), str(expression))

    def _symbol(self, name: str) -> Dim:
        if name in self.symbols:
            return dim(self.symbols[name])
        raise Unsupported(
            f"size {name} depends on data",
            advice="no size may come from a tensor's values (nonzero, item, boolean indexing); "
            "pad to a fixed bound, or use a structured op of metainfer.models.functional",
        )

    def type_of(self, tensor: torch.Tensor) -> TensorType:
        """Type of a fake tensor."""
        shape = tuple(self.to_dim(n) for n in tensor.shape)
        return TensorType(shape, parse_dtype(scalar_name(tensor.dtype)))

    def cast(self, value: Value, dtype: str) -> Value:
        """Convert unless the type is the same already."""
        if value.tensor.dtype.name == dtype:
            return value
        return self.emit("cast", value, dtype=dtype)

    def reshape(self, value: Value, shape: Sequence[Dim]) -> Value:
        """Reshape unless the shape is the same already."""
        wanted = tuple(shape)
        if value.tensor.shape == wanted:
            return value
        return self.emit("reshape", value, shape=as_attr(wanted))

    def axis(self, number: int, rank: int) -> int:
        """A non-negative dim number."""
        return int(number) % max(rank, 1)


def as_attr(sizes: Sequence[Dim]) -> tuple[Attr, ...]:
    """Sizes as an attribute: plain numbers where static."""
    return tuple(n.constant if n.is_static else n for n in sizes)


def fake(node: fx.Node | None) -> torch.Tensor:
    """The fake tensor of a node's (first) result."""
    if node is None:
        raise TypeMismatch("no node in hand")
    value = node.meta["val"]
    return cast(torch.Tensor, value[0] if isinstance(value, list | tuple) else value)


def module_path(node: fx.Node) -> str:
    """Path of the nn.Module whose forward made a node ("model.layers.3.mlp")."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return paths[-1] if paths else ""


def lower_node(state: Lowering, node: fx.Node, table: "Table") -> None:
    """Lower one call, checking the result's type against the one that torch inferred.

    Raises: Unsupported or TypeMismatch naming the op and the model's line.
    """
    state.node = node
    name = target_name(node)
    try:
        lower = table.get(name)
        if lower is None:
            raise unknown_op(name)
        result = lower(state, node)
        _check_result(state, node, result)
    except MetainferError as error:
        source = source_of(node)
        text = error.text or f"%{node.name} = {name}({', '.join(map(str, node.args))})"
        raise type(error)(
            error.what,
            text=text,
            origin=str(source) if source else error.origin,
            advice=error.advice,
        ) from None
    state.values[node] = result


Table = dict[str, Callable[[Lowering, fx.Node], Any]]


def target_name(node: fx.Node) -> str:
    """Name of a call's target without its overload ("aten.add", "metainfer.rms_norm")."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return getattr(target, "__name__", str(target))


# Results whose size or value is known only when the program runs.
_DATA_DEPENDENT = frozenset(
    f"aten.{name}"
    for name in (
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "item",
        "_local_scalar_dense",
    )
)


def unknown_op(name: str) -> Unsupported:
    """The error for an op that no table knows."""
    if name in _DATA_DEPENDENT:
        return Unsupported(
            f"the result of {name} depends on data, so its size is not known when compiling",
            advice="pad to a fixed size, choose with torch.where, or call a structured op of "
            "metainfer.models.functional",
        )
    return Unsupported(
        f"the compiler does not know {name}",
        advice="write the line with known ops, or add the op: a record in ir/ops/ and one line "
        "in compiler/aten/ (CONTRIBUTING, recipe a)",
    )


def _check_result(state: Lowering, node: fx.Node, result: Any) -> None:
    expected = node.meta.get("val")
    if isinstance(result, Value) and isinstance(expected, torch.Tensor) and not result.is_state:
        wanted = state.type_of(expected)
        if (result.tensor.shape, result.tensor.dtype) != (wanted.shape, wanted.dtype):
            raise TypeMismatch(f"lowered to {result.type}, torch says {wanted}")


def parse_scalar(name: str) -> Scalar:
    """A scalar type by name."""
    return cast(Scalar, parse_dtype(name))
