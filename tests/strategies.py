"""Hypothesis strategies for sizes, types, graphs and modules.

Graphs are well formed as text (every name defined once, before use) but their ops are arbitrary
words: types need not fit. Use them where structure matters, not numbers.

Strategies are kept: hypothesis checks each object once, which takes as long as many draws from it.
"""

import math
import string
from functools import cache
from typing import Any

from hypothesis import strategies as st

from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import GGUF_FORMATS, MXFP4, NVFP4, SCALAR_NAMES, Block, DType, parse_dtype
from metainfer.ir.graph import Attr, Choice, Graph, Module, Op, Source, Value, attrs_of
from metainfer.ir.step import STEP_FIELDS, step_value
from metainfer.ir.types import PARTIAL, Mesh, Sharding, StateType, Symbol, TensorType, Type

SYMBOLS = ("T", "B", "P", "R", "n_1")
STEP_SYMBOLS = ("T", "B", "P", "R")

_NAME_CHARACTERS = string.ascii_letters + string.digits + "_.-/"
BARE = st.text(_NAME_CHARACTERS, min_size=1, max_size=12)
TRAPS = st.sampled_from(
    [
        "x:state",
        "x:f32",
        "a:pages",
        "l0:q/2",
        "e.*.w",
        "*.w",
        "e.*",
        "e*.w",
        "a.*.*.b:c",
        "a b",
        'q"',
        "back\\slash",
        "",
        "#",
        "return",
        "é",
    ]
)
TEXTS = st.text(max_size=12) | st.sampled_from(['"', "\\", "\n", "\u2028", "# no", "模型", "\x00"])
VALUE_NAMES = st.one_of(BARE, BARE, TRAPS, TEXTS)
KEYWORDS = st.sampled_from(
    [
        "module",
        "main",
        "dim",
        "step",
        "else",
        "loc",
        "by",
        "body",
        "return",
        "page",
        "call",
        "after",
    ]
)
WORDS = st.one_of(BARE.map("w".__add__), KEYWORDS, TEXTS)
OP_NAMES = st.sampled_from(["add", "linear", "rms_norm", "matmul", "kv_write", "copy"]) | WORDS


@cache
def dims(symbols: tuple[str, ...] = SYMBOLS) -> st.SearchStrategy[Dim]:
    """Sizes over the symbols, numbers included."""
    leaves = st.integers(0, 1 << 40).map(dim)
    if symbols:
        leaves |= st.sampled_from(symbols).map(dim)
    constants = st.integers(-9, 9)
    divisors = st.integers(1, 9)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda p: p[0] + p[1]),
            st.tuples(inner, inner).map(lambda p: p[0] - p[1]),
            st.tuples(inner, constants).map(lambda p: p[0] * p[1]),
            st.tuples(inner, divisors).map(lambda p: p[0] // p[1]),
            st.tuples(inner, divisors).map(lambda p: p[0].ceildiv(p[1])),
        ),
        max_leaves=5,
    )


@cache
def dtypes() -> st.SearchStrategy[DType]:
    """Scalars and block formats."""
    scalars = st.sampled_from(SCALAR_NAMES).map(parse_dtype)
    made = st.builds(
        lambda element, block, scale, offset: Block(element, tuple(block), scale, offset),
        scalars,
        st.lists(st.integers(1, 256), min_size=1, max_size=2) | st.sampled_from([[0], [0, 0]]),
        scalars,
        scalars | st.none(),
    )
    return st.one_of(
        scalars, scalars, st.sampled_from([*GGUF_FORMATS.values(), MXFP4, NVFP4]), made
    )


@cache
def _shapes(symbols: tuple[str, ...]) -> st.SearchStrategy[list[Dim]]:
    return st.lists(dims(symbols), max_size=4)


@cache
def _axes(rank: int) -> st.SearchStrategy[dict[str, Any]]:
    """Where axes of a mesh lie in a tensor of so many dims."""
    places = st.just(PARTIAL) | st.integers(0, max(0, rank - 1))
    return st.dictionaries(st.sampled_from(["tp", "ep", "odd axis"]), places, max_size=2)


_QUARTER = st.integers(0, 3)  # what is drawn one time in four
_LAYOUTS = TEXTS | st.just("cpu.u4g32_n8")


@st.composite
def tensor_types(draw: st.DrawFn, symbols: tuple[str, ...] = SYMBOLS) -> TensorType:
    """Tensor types, some sharded, some with a layout."""
    shape = tuple(draw(_shapes(symbols)))
    sharding = Sharding()
    if draw(_QUARTER) == 0:
        axes = draw(_axes(len(shape)))
        sharding = Sharding.of({a: p for a, p in axes.items() if shape or p == PARTIAL})
    layout = draw(_LAYOUTS) if draw(_QUARTER) == 0 else ""
    return TensorType(shape, draw(dtypes()), sharding, layout)


@cache
def state_types(symbols: tuple[str, ...] = SYMBOLS) -> st.SearchStrategy[StateType]:
    """State types of every kind and growth."""
    return st.builds(
        lambda kind, fields, growth, page: StateType(kind, tuple(fields.items()), growth, page),
        st.sampled_from(["pages", "ring", "slot"]),
        st.dictionaries(WORDS, tensor_types(symbols), max_size=3),
        st.sampled_from(["token", "sequence"]),
        st.sampled_from([0, 0, 1, 16]),
    )


@cache
def types(symbols: tuple[str, ...] = SYMBOLS) -> st.SearchStrategy[Type]:
    """Types of any value."""
    plain = tensor_types(symbols)
    return st.one_of(plain, plain, plain, state_types(symbols))


@cache
def attr_values(symbols: tuple[str, ...] = SYMBOLS) -> st.SearchStrategy[Attr]:
    """Values of attributes, nested tuples included."""
    leaves: st.SearchStrategy[Any] = st.one_of(
        st.integers(),
        st.floats(allow_nan=False),
        st.just(math.nan),
        st.booleans(),
        TEXTS,
        dims(symbols),
    )
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@cache
def _rows(symbols: tuple[str, ...]) -> st.SearchStrategy[list[Choice]]:
    row = st.builds(Choice, WORDS, st.sampled_from(symbols), st.integers(1, 1 << 20))
    return st.lists(row, max_size=2)


@st.composite
def _choices(draw: st.DrawFn, symbols: tuple[str, ...]) -> tuple[Choice, ...]:
    if not symbols or draw(_QUARTER):
        return ()
    return (*draw(_rows(symbols)), Choice(draw(WORDS)))


@cache
def _attrs(symbols: tuple[str, ...]) -> st.SearchStrategy[dict[str, Attr]]:
    return st.dictionaries(WORDS, attr_values(symbols), max_size=2)


_NAMES = OP_NAMES | st.sampled_from(["fused", "call"])
_BODY_NAMES = st.just("body") | WORDS
_SOURCES = st.none() | st.builds(Source, TEXTS, st.integers(1, 9999))
_TAILS = st.lists(VALUE_NAMES, max_size=2, unique=True)


def _after(scope: dict[str, Value], results: list[Value]) -> st.SearchStrategy[tuple[str, ...]]:
    """Names that an op may wait for: values before it."""
    names = [name for name in scope if name not in {v.name for v in results}]
    some = st.lists(st.sampled_from(names), max_size=2).map(tuple) if names else st.just(())
    return st.just(()) | some


@st.composite
def ops(draw: st.DrawFn, scope: dict[str, Value], symbols: tuple[str, ...], depth: int = 0) -> Op:
    """One op over the values in scope; its results are added to the scope."""
    readable = [*scope.values(), *map(step_value, STEP_FIELDS)]
    operands = draw(st.lists(st.sampled_from(readable), max_size=3))
    results = []
    for _ in range(draw(st.integers(0, 2))):
        name = "%" + draw(VALUE_NAMES | st.just(str(len(scope))))
        if name not in scope:
            results.append(Value(name, draw(types(symbols))))
            scope[name] = results[-1]
    name = draw(_NAMES)
    attrs = draw(_attrs(symbols))
    if name in ("fused", "call") and draw(st.booleans()):
        attrs["kind" if name == "fused" else "block"] = draw(WORDS)
    has_body = name == "fused" and depth < 2 and draw(st.booleans())
    body_name = draw(_BODY_NAMES)
    return Op(
        name,
        tuple(operands),
        tuple(results),
        attrs_of(attrs),
        body=draw(graphs(symbols, body_name, depth + 1)) if has_body else None,
        source=draw(_SOURCES),
        stream=draw(st.sampled_from([0, 0, 1, 2])),
        after=draw(_after(scope, results)),
        choices=draw(_choices(symbols)),
    )


@st.composite
def graphs(
    draw: st.DrawFn, symbols: tuple[str, ...] = SYMBOLS, name: str = "f", depth: int = 0
) -> Graph:
    """Graphs with odd names, states, bodies, sources, streams and choices."""
    scope: dict[str, Value] = {}
    declared: dict[str, list[Value]] = {"%": [], "@": [], "$": []}
    for sigil, values in declared.items():
        for tail in draw(_TAILS):
            type_ = draw(state_types(symbols) if sigil == "$" else types(symbols))
            values.append(Value(sigil + tail, type_))
            scope[sigil + tail] = values[-1]
    made = tuple(draw(ops(scope, symbols, depth)) for _ in range(draw(st.integers(0, 3))))
    leaving = st.lists(st.sampled_from(list(scope.values())), max_size=2) if scope else st.just([])
    if depth:
        params = draw(st.permutations([v for values in declared.values() for v in values]))
        return Graph(name, tuple(params), ops=made, outputs=tuple(draw(leaving)))
    return Graph(
        name,
        tuple(declared["%"]),
        tuple(declared["@"]),
        tuple(declared["$"]),
        made,
        tuple(draw(leaving)),
        tuple(draw(leaving)),
    )


_ODD_SIZES = st.sets(st.sampled_from(["n_1", "ceil", "S0"]))
_BLOCKS = st.lists(WORDS.filter(lambda w: w != "main"), max_size=2, unique=True)
_MESHES = st.dictionaries(WORDS, st.integers(1, 8), max_size=2)


@st.composite
def modules(draw: st.DrawFn) -> Module:
    """Modules whose graphs use only declared sizes; those of the step are always declared."""
    names = (*STEP_SYMBOLS, *sorted(draw(_ODD_SIZES)))
    low = draw(st.integers(0, 4))
    blocks = draw(_BLOCKS)
    loads = draw(st.lists(st.sampled_from([*blocks, "main"]), max_size=2, unique=True))
    mesh = draw(_MESHES)
    return Module(
        name=draw(WORDS),
        symbols=tuple(Symbol(n, low, 8192) for n in names),
        mesh=Mesh(tuple(mesh.items())),
        graphs=tuple(draw(graphs(names, name)) for name in [*blocks, "main"]),
        loads=tuple(draw(graphs((), name)) for name in loads),
        has_step=draw(st.booleans()),
    )
