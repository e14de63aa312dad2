"""Hypothesis strategy for graphs whose types fit: what passes are tested on as a property."""

from collections.abc import Callable

from hypothesis import strategies as st

from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import BF16, F32
from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Attr, Graph, Module, Value
from metainfer.ir.ops.record import Builder
from metainfer.ir.types import Symbol, tensor

WIDTHS = (1, 4, 6, 8)
UNARY = ("neg", "sigmoid", "silu", "relu", "gelu", "tanh", "abs")
BINARY = ("add", "mul", "sub", "maximum", "silu_mul", "gelu_mul")
NUMBERS = (0.0, 1.0, -1.0, 0.5, 2.0, -0.0)


class _Grower:
    """Grows a graph op by op; an op that does not fit is left away."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.builder = Builder()
        self.weights: dict[str, Value] = {}
        dtype = draw(st.sampled_from([F32, F32, BF16]))
        self.inputs = (
            Value("%x", tensor(dtype, "T", 8)),
            Value("%y", tensor(dtype, "T", 8)),
            Value("%z", tensor(dtype, 8)),
        )
        self.values = list(self.inputs)

    def value(self) -> Value:
        """Any value, later ones more often."""
        late = st.sampled_from(self.values[-4:])
        return self.draw(late | st.sampled_from(self.values))

    def weight(self, *shape: int) -> Value:
        """A weight of the shape, maybe one that is there already."""
        name = "@" + "x".join(map(str, shape)) + self.draw(st.sampled_from("abc"))
        return self.weights.setdefault(name, Value(name, tensor(F32, *shape)))

    def emit(self, name: str, *operands: Value, **attrs: Attr) -> None:
        """Append an op if it fits."""
        try:
            self.values.append(self.builder.emit(name, *operands, source=None, **attrs))
        except MetainferError:
            return


def _unary(g: _Grower) -> None:
    g.emit(g.draw(st.sampled_from(UNARY)), g.value())


def _binary(g: _Grower) -> None:
    g.emit(g.draw(st.sampled_from(BINARY)), g.value(), g.value())


def _constant(g: _Grower) -> None:
    x = g.value()
    shape = () if g.draw(st.booleans()) else tuple(map(_attr, x.tensor.shape))
    number = g.draw(st.sampled_from(NUMBERS))
    g.emit("full", shape=shape, value=number, dtype=x.tensor.dtype.name)
    g.emit(g.draw(st.sampled_from(("add", "mul", "sub", "div", "maximum"))), x, g.values[-1])


def _attr(size: Dim) -> Attr:
    return size.constant if size.is_static else size


def _reshape(g: _Grower) -> None:
    x = g.value()
    sizes = list(x.tensor.shape)
    if len(sizes) > 1 and sizes[-1].is_static and sizes[-2].is_static:
        sizes[-2:] = [sizes[-2] * sizes[-1]]
    elif sizes and sizes[-1].is_static and sizes[-1].constant % 2 == 0:
        sizes[-1:] = [dim(2), sizes[-1] // 2]
    g.emit("reshape", x, shape=tuple(map(_attr, sizes)))


def _transpose(g: _Grower) -> None:
    x = g.value()
    g.emit("transpose", x, perm=tuple(g.draw(st.permutations(range(x.tensor.rank)))))


def _slice(g: _Grower) -> None:
    x = g.value()
    axis = x.tensor.rank - 1
    if axis < 0 or not x.tensor.shape[axis].is_static:
        return
    size = x.tensor.shape[axis].constant
    cut = g.draw(st.sampled_from([0, size // 2, size]))
    start, stop = g.draw(st.sampled_from([(0, cut), (cut, size), (0, size)]))
    if start < stop:
        g.emit("slice", x, dim=axis, start=start, stop=stop)


def _concat(g: _Grower) -> None:
    x = g.value()
    if x.tensor.rank and x.tensor.shape[-1].is_static and x.tensor.shape[-1].constant <= 8:
        g.emit("concat", x, g.value(), dim=x.tensor.rank - 1)


def _broadcast(g: _Grower) -> None:
    x = g.value()
    g.emit("broadcast", x, shape=(3, *map(_attr, x.tensor.shape)) if x.tensor.rank < 3 else ())


def _cast(g: _Grower) -> None:
    g.emit("cast", g.value(), dtype=g.draw(st.sampled_from(["f32", "bf16"])))


def _norm(g: _Grower) -> None:
    x = g.value()
    if x.tensor.rank and x.tensor.shape[-1].is_static:
        width = x.tensor.shape[-1].constant
        g.emit("rms_norm", x, g.weight(width), eps=g.draw(st.sampled_from([1e-5, 1e-6])))


def _linear(g: _Grower) -> None:
    x = g.value()
    if x.tensor.rank and x.tensor.shape[-1].is_static and x.tensor.dtype == F32:
        width = x.tensor.shape[-1].constant
        out = g.draw(st.sampled_from(WIDTHS))
        bias = [g.weight(out)] if g.draw(st.booleans()) else []
        g.emit("linear", x, g.weight(out, width), *bias)


STEPS: tuple[Callable[[_Grower], None], ...] = (
    _unary,
    _binary,
    _binary,
    _constant,
    _reshape,
    _reshape,
    _transpose,
    _slice,
    _concat,
    _broadcast,
    _cast,
    _norm,
    _linear,
)


@st.composite
def typed_modules(draw: st.DrawFn) -> Module:
    """Modules of one graph of a few ops that verify and can be run."""
    grower = _Grower(draw)
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=14)):
        step(grower)
    outputs = draw(st.lists(st.sampled_from(grower.values), min_size=1, max_size=3))
    graph = Graph(
        "main",
        grower.inputs,
        tuple(grower.weights.values()),
        ops=tuple(grower.builder.ops),
        outputs=(grower.values[-1], *outputs),
    )
    return Module("random", (Symbol("T", 1, 64),), graphs=(graph,))
