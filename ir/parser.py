"""Read the text form of modules and graphs: ``parse(print(m)) == m``.

Example of a bare graph, as test cases use it::

    graph f(%x: bf16[T,4096], %r: bf16[T,4096], @w: bf16[4096]) {
      %0 = add(%x, %r) : bf16[T,4096]
      %1 = rms_norm(%0, @w) {eps = 1e-06} : bf16[T,4096]
      return %0, %1
    }

Weights and states may stand among the parameters, as here, or in sections of their own, as the
printer writes them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from metainfer.ir.dims import Dim
from metainfer.ir.dtypes import parse_dtype
from metainfer.ir.errors import ParseError, TypeMismatch
from metainfer.ir.graph import Attr, Choice, Graph, Module, Op, Source, Value, attrs_of
from metainfer.ir.step import step_value
from metainfer.ir.syntax import (
    MAX_NESTING,
    RawChoice,
    RawClause,
    RawDecl,
    RawDim,
    RawGraph,
    RawModule,
    RawOp,
    RawState,
    RawTensor,
    RawTuple,
    RawType,
    SourceText,
    integer,
    nearest,
    parse_raw,
    parse_shape,
    ref_name,
    unquote,
)
from metainfer.ir.types import PARTIAL, Mesh, Sharding, StateType, Symbol, TensorType, Type

if TYPE_CHECKING:
    from lark import Token

_CLAUSE_ORDER = ("attrs", "types", "loc", "stream", "after", "by", "body")
_SECTION_SIGILS = {"weights": "@", "states": "$"}


def parse_module(text: str, *, origin: str = "") -> Module:
    """Read a module.

    Args:
        text: the whole text.
        origin: where it came from, for messages.

    Raises: ParseError with line and column where the text is no module: syntax, names not defined
        or defined twice, unknown element types, undeclared sizes, wrong numbers of result types.
    """
    source = SourceText(text, origin)
    raw: RawModule = parse_raw(source, "module")
    return _module(source, raw)


def parse_graph(text: str, *, origin: str = "") -> Graph:
    """Read a bare graph; it declares no sizes, so that any size symbol may stand in it.

    Raises: ParseError as `parse_module` does.
    """
    source = SourceText(text, origin)
    raw: RawGraph = parse_raw(source, "graph")
    return _GraphReader(source, None).graph(raw)


def _module(source: SourceText, raw: RawModule) -> Module:
    symbols = _symbols(source, raw)
    mesh = _mesh(source, [c for c in raw.items if c.tag == "mesh"])
    steps = [c.payload[0] for c in raw.items if c.tag == "step"]
    if len(steps) > 1:
        raise source.error(steps[1], "`step` stands twice", "one is enough")
    reader = _GraphReader(source, frozenset(s.name for s in symbols))
    return Module(
        name=unquote(source, raw.name),
        symbols=symbols,
        mesh=mesh,
        graphs=_graphs(reader, raw, "graph"),
        loads=_graphs(reader, raw, "load"),
        has_step=bool(steps),
    )


def _graphs(reader: "_GraphReader", raw: RawModule, tag: str) -> tuple[Graph, ...]:
    found: dict[str, Graph] = {}
    for item in raw.items:
        if item.tag != tag:
            continue
        graph = reader.graph(item.payload)
        if graph.name in found:
            what = "load graph" if tag == "load" else "graph"
            raise reader.source.error(
                item.payload.name, f"{what} {graph.name} is defined twice", "rename one of them"
            )
        found[graph.name] = graph
    return tuple(found.values())


def _symbols(source: SourceText, raw: RawModule) -> tuple[Symbol, ...]:
    found: dict[str, Symbol] = {}
    for item in raw.items:
        if item.tag != "size":
            continue
        token, low, high = item.payload
        if not token.isidentifier():
            raise source.error(token, f"{token} is no name of a size", "letters, digits and _")
        if token in found:
            raise source.error(token, f"size {token} is declared twice", "remove one of them")
        found[str(token)] = Symbol(str(token), integer(source, low), integer(source, high))
    return tuple(found.values())


def _mesh(source: SourceText, clauses: list[RawClause]) -> Mesh:
    if not clauses:
        return Mesh()
    if len(clauses) > 1:
        raise source.error(clauses[1].payload[0], "`mesh` stands twice", "declare all axes in one")
    axes: dict[str, int] = {}
    for token, size in clauses[0].payload[1:]:
        name = unquote(source, token)
        if name in axes:
            raise source.error(token, f"mesh axis {name} is declared twice")
        axes[name] = integer(source, size)
    return Mesh(tuple(axes.items()))


class TypeReader:
    """Turns raw types and attribute values into values, each spelling once.

    Attributes:
        source: the text, for errors.
        symbols: sizes that may be used, None for any.
    """

    def __init__(self, source: SourceText, symbols: frozenset[str] | None) -> None:
        """Read types of one text."""
        self.source = source
        self.symbols = symbols
        self._tensors: dict[str, TensorType] = {}

    def type(self, raw: RawType) -> Type:
        """Read a tensor's or a state's type."""
        if isinstance(raw, RawTensor):
            return self.tensor(raw)
        if isinstance(raw, RawState):
            return self._state(raw)
        raise self.source.error(
            raw.token,
            f"{raw.token} is no type",
            "a tensor is f32[T,64], a state pages(k: bf16[3,64]) per token",
        )

    def tensor(self, raw: RawTensor) -> TensorType:
        """Read a tensor's type."""
        plain = self._tensors.get(raw.token)
        if plain is None:
            plain = self._tensors[str(raw.token)] = self._plain(raw.token)
        if not raw.sharding and raw.layout is None:
            return plain
        sharding = self._sharding(raw.sharding, plain)
        layout = unquote(self.source, raw.layout) if raw.layout is not None else ""
        return TensorType(plain.shape, plain.dtype, sharding, layout)

    def _plain(self, token: "Token") -> TensorType:
        head, _, rest = token.partition("[")
        try:
            dtype = parse_dtype(head)
        except TypeMismatch as error:
            raise self.source.reword(token, error) from None
        except ValueError:
            raise self.source.error(token, f"bad element type {head[:40]!r}") from None
        shape = parse_shape(self.source, token, "[" + rest, len(head))
        for size in shape:
            self.check_symbols(token, size)
        return TensorType(shape, dtype)

    def check_symbols(self, token: "Token", size: Dim) -> None:
        """Refuse a size that names an undeclared symbol."""
        if self.symbols is None:
            return
        for name in sorted(size.symbols() - self.symbols):
            raise self.source.error(
                token, f"size symbol {name} is not declared", f"add: dim {name} in [1, ...]"
            )

    def _sharding(self, raw: "list[tuple[Token, Token]]", type_: TensorType) -> Sharding:
        placements: dict[str, int | str] = {}
        for axis_token, place in raw:
            axis = unquote(self.source, axis_token)
            if axis in placements:
                raise self.source.error(axis_token, f"mesh axis {axis} stands twice in a sharding")
            placements[axis] = self._placement(place, type_)
        return Sharding.of(placements)

    def _placement(self, token: "Token", type_: TensorType) -> int | str:
        if token == PARTIAL:
            return PARTIAL
        digits = token[1:]
        if token[0] != "S" or not (digits.isascii() and digits.isdigit()) or len(digits) > 3:
            raise self.source.error(
                token, f"bad sharding {token}", "write S0, S1, ... (a dim) or partial"
            )
        if int(digits) >= type_.rank:
            raise self.source.error(
                token,
                f"bad sharding {token}: the tensor has {type_.rank} dims",
                "dims are counted from 0",
            )
        return int(digits)

    def _state(self, raw: RawState) -> StateType:
        fields: dict[str, TensorType] = {}
        for token, field in raw.fields:
            name = unquote(self.source, token)
            if name in fields:
                raise self.source.error(token, f"state field {name} stands twice")
            fields[name] = self.tensor(field)
        page = integer(self.source, raw.page) if raw.page is not None else 0
        growth = str(raw.growth)
        try:
            return StateType(str(raw.token), tuple(fields.items()), growth, page)
        except TypeMismatch as error:
            at = raw.growth if "grows" in error.what else raw.token
            raise self.source.reword(at, error) from None

    def attrs(self, raw: "Iterable[tuple[Token, Any]]") -> dict[str, Any]:
        """Read attributes: name to value."""
        found: dict[str, Any] = {}
        for token, value in raw:
            name = unquote(self.source, token)
            if name in found:
                raise self.source.error(token, f"attribute {name} is given twice")
            found[name] = self.value(value, token)
        return found

    def label(self, name: "Token", label: "Token", attrs: dict[str, Any]) -> None:
        """Add the word of ``fused[WORD]`` or ``call WORD`` to the attributes."""
        key = "kind" if name == "fused" else "block"
        if key in attrs:
            raise self.source.error(label, f"{name}: {key} is given twice")
        attrs[key] = unquote(self.source, label)

    def value(self, raw: Any, at: "Token", depth: int = 0) -> Attr:
        """Read one attribute's value; ``at`` is the attribute's name."""
        if isinstance(raw, RawTuple):
            if depth == MAX_NESTING:
                raise self.source.error(at, "an attribute is nested too deeply")
            return tuple([self.value(item, at, depth + 1) for item in raw.items])
        if isinstance(raw, RawDim):
            return self._dim(raw)
        match raw.type:
            case "NUMBER":
                return self._number(raw)
            case "STRING":
                return unquote(self.source, raw)
            case "BOOL":
                return bool(raw == "true")
        return self.variable(raw)

    def variable(self, token: "Token") -> Any:
        """Read ``$name`` where an attribute's value stands: only rules have that."""
        raise self.source.error(
            token, f"{token} is no value of an attribute", "$name stands for one only in rules"
        )

    def _dim(self, raw: RawDim) -> Dim:
        if isinstance(raw.size, TypeMismatch):
            raise self.source.reword(raw.token, raw.size)
        self.check_symbols(raw.token, raw.size)
        return raw.size

    def _number(self, token: "Token") -> int | float:
        if token.lstrip("-").isdigit():
            return integer(self.source, token)
        # The constant itself, so that a tuple that holds it equals one read from its text.
        return math.nan if token.endswith("nan") else float(token)


class _GraphReader:
    """Resolves the names of raw graphs."""

    def __init__(self, source: SourceText, symbols: frozenset[str] | None) -> None:
        self.source = source
        self._types = TypeReader(source, symbols)
        self._symbols = symbols
        self._depth = 0
        self._clauses: dict[str, Callable[[list[Any], dict[str, Any]], None]] = {
            "loc": self._loc,
            "stream": self._stream,
            "by": self._by,
        }

    def graph(self, raw: RawGraph, name: str = "") -> Graph:
        """Read a graph; scopes do not nest, a body sees its own parameters only."""
        scope: dict[str, Value] = {}
        declared = [self._declare(decl, scope) for decl in raw.params]
        for keyword, decls in raw.sections:
            declared += [self._declare(d, scope, _SECTION_SIGILS[keyword]) for d in decls]
        ops = tuple([self._op(op, scope) for op in raw.ops])
        return Graph(
            name=unquote(self.source, raw.name) if raw.name is not None else name,
            inputs=tuple(v for v in declared if v.name[0] == "%"),
            weights=tuple(v for v in declared if v.name[0] == "@"),
            states=tuple(v for v in declared if v.name[0] == "$"),
            ops=ops,
            outputs=self._values(raw.outputs, scope),
            state_outputs=self._values(raw.state_outputs, scope),
        )

    def _declare(self, decl: RawDecl, scope: dict[str, Value], sigil: str = "") -> Value:
        name = ref_name(self.source, decl.name)
        if name[0] == "s" or (sigil and name[0] != sigil):
            wanted = f"{sigil}name" if sigil else "%name, @name or $name"
            raise self.source.error(decl.name, f"{name} cannot be declared here", f"use {wanted}")
        return self._define(decl.name, Value(name, self._types.type(decl.type)), scope)

    def _define(self, token: "Token", value: Value, scope: dict[str, Value]) -> Value:
        if value.name in scope:
            raise self.source.error(
                token, f"{value.name} is defined twice", "every value has one definition: rename it"
            )
        scope[value.name] = value
        return value

    def _values(self, tokens: "Sequence[Token]", scope: dict[str, Value]) -> tuple[Value, ...]:
        # The fast path: most names are in scope as they are spelt.
        return tuple([scope.get(t) or self._value(t, scope) for t in tokens])

    def _value(self, token: "Token", scope: dict[str, Value]) -> Value:
        name = ref_name(self.source, token)
        found = scope.get(name)
        if found is not None:
            return found
        if name[0] == "s":
            try:
                return step_value(name.removeprefix("step."))
            except TypeMismatch as error:
                raise self.source.reword(token, error) from None
        same_role = [known for known in scope if known[0] == name[0]]
        raise self.source.error(
            token,
            f"{name} is used but not defined",
            nearest(name, same_role) or "define it before it is used",
        )

    def _op(self, raw: RawOp, scope: dict[str, Value]) -> Op:
        name = unquote(self.source, raw.name)
        operands = self._values(raw.operands, scope)
        attrs: dict[str, Attr] = {}
        types: list[RawType] = []
        extra: dict[str, Any] = {}
        last = -1
        for tag, payload in raw.clauses:
            place = _CLAUSE_ORDER.index(tag)
            if place <= last:
                raise self._misplaced(raw, tag, _CLAUSE_ORDER[last])
            last = place
            if tag == "attrs":
                attrs = self._types.attrs(payload)
            elif tag == "types":
                types = payload
            elif tag == "body":
                extra["body"] = self._body(raw, payload)
            elif tag == "after":
                extra["after"] = tuple([v.name for v in self._values(payload, scope)])
            else:
                self._clauses[tag](payload, extra)
        if raw.label is not None:
            self._types.label(raw.name, raw.label, attrs)
        results = self._results(raw, types, scope)
        return Op(name, operands, results, attrs_of(attrs), **extra)

    def _misplaced(self, raw: RawOp, tag: str, last: str) -> ParseError:
        what = f"{tag} stands twice" if tag == last else f"{tag} stands after {last}"
        order = ", ".join(_CLAUSE_ORDER)
        return self.source.error(raw.name, f"{raw.name}: {what}", f"the order is: {order}")

    def _results(
        self, raw: RawOp, types: list[RawType], scope: dict[str, Value]
    ) -> tuple[Value, ...]:
        if len(raw.targets) != len(types):
            raise self.source.error(
                raw.targets[0] if raw.targets else raw.name,
                f"{raw.name}: {len(raw.targets)} results but {len(types)} result types",
                "write one type per result after `:`",
            )
        return tuple([self._result(t, r, scope) for t, r in zip(raw.targets, types, strict=True)])

    def _result(self, token: "Token", raw: RawType, scope: dict[str, Value]) -> Value:
        name = ref_name(self.source, token)
        if name[0] != "%":
            raise self.source.error(token, f"{name} cannot be a result", "results are named %name")
        return self._define(token, Value(name, self._types.type(raw)), scope)

    def _loc(self, payload: list[Any], extra: dict[str, Any]) -> None:
        file, line = payload
        extra["source"] = Source(unquote(self.source, file), integer(self.source, line))

    def _stream(self, payload: list[Any], extra: dict[str, Any]) -> None:
        extra["stream"] = integer(self.source, payload[0])

    def _by(self, payload: list[Any], extra: dict[str, Any]) -> None:
        for choice in payload[:-1]:
            if choice.symbol is None:
                raise self.source.error(choice.kernel, "rows after `else` are never chosen")
        extra["choices"] = tuple(map(self._choice, payload))

    def _choice(self, raw: RawChoice) -> Choice:
        kernel = unquote(self.source, raw.kernel)
        if raw.symbol is None or raw.limit is None:
            return Choice(kernel)
        if self._symbols is not None and raw.symbol not in self._symbols:
            raise self.source.error(
                raw.symbol,
                f"size symbol {raw.symbol} is not declared",
                nearest(raw.symbol, sorted(self._symbols)),
            )
        return Choice(kernel, str(raw.symbol), integer(self.source, raw.limit))

    def _body(self, raw: RawOp, body: RawGraph) -> Graph:
        if self._depth == MAX_NESTING:
            raise self.source.error(raw.name, "bodies are nested too deeply")
        self._depth += 1
        graph = self.graph(body, "body")
        self._depth -= 1
        # The group hands its weights and states in as operands: in a body all are parameters.
        names = [ref_name(self.source, decl.name) for decl in body.params]
        params = {v.name: v for v in (*graph.inputs, *graph.weights, *graph.states)}
        inputs = tuple(params[name] for name in names)
        return replace(graph, inputs=inputs, weights=(), states=())
