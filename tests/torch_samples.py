"""Sample ops with data for the torch kernels, and how their results are judged."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from metainfer.backends.kernel import Kernel, Registry
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.check import difference, make_op, run_kernel, run_reference
from metainfer.backends.torch.records import register
from metainfer.ir.dtypes import Block, BlockArray, DType, Scalar, parse_dtype, quantize
from metainfer.ir.graph import Graph, Op, Value, attrs_of
from metainfer.ir.interpret import Data
from metainfer.ir.types import StateType, TensorType, tensor

KERNELS, LAYOUTS = Registry(), LayoutRegistry()
register(KERNELS, LAYOUTS)
RNG = np.random.default_rng(7)
FLOATS = ("f32", "bf16", "f16", "f64")
# Relative to the largest magnitude: one rounding of the type and the sums' own order.
TOLERANCE = {
    "f64": 1e-6,
    "f32": 2e-5,
    "bf16": 2.0**-7,
    "f16": 2.0**-10,
    "f8e8m0": 0.0,
    "f8e4m3": 2.0**-3,
    "f8e5m2": 2.0**-2,
}

Spec = tuple[str, np.ndarray]
Case = tuple[str, Sequence[Spec], dict[str, Any]]


def scalar(name: str) -> Scalar:
    """A scalar type by name."""
    found = parse_dtype(name)
    assert isinstance(found, Scalar)
    return found


def floats(*shape: int, low: float = -3.0, high: float = 3.0) -> Spec:
    """A float operand, of the case's type."""
    return "float", RNG.uniform(low, high, shape)


def ints(*shape: int, low: int = -9, high: int = 9, dtype: str = "i32") -> Spec:
    """An integer operand."""
    return dtype, RNG.integers(low, high, shape)


def weight(format: str, *shape: int) -> Spec:
    """A weight of a block format or a type."""
    return format, RNG.uniform(-1, 1, shape)


POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal")
UNARY = "neg abs exp sin cos tanh erf sigmoid relu silu floor gelu".split()
BINARY = "add sub mul div maximum minimum eq ne lt le gt ge floor_div remainder".split()
_STACKS = [floats(4, 24, 16), floats(4, 24, 16), floats(4, 16, 24)]
ROPE = {"theta": 5e5, "scaling": "llama3", "factor": 8.0}
FLOAT_CASES: list[Case] = [
    *((n, [floats(3, 17)], {}) for n in UNARY),
    ("gelu", [floats(3, 17)], {"approximate": "tanh"}),
    *((n, [floats(3, 17, low=0.2)], {}) for n in POSITIVE),
    *((n, [floats(3, 1, 5), floats(4, 5, low=0.3)], {}) for n in BINARY),
    ("pow", [floats(5, low=0.1), floats(5)], {}),
    ("where", [("bool", RNG.random((4, 1)) > 0.5), floats(4, 3), floats(3)], {}),
    ("silu_mul", [floats(4, 6), floats(4, 6)], {}),
    ("gelu_mul", [floats(4, 6), floats(4, 6)], {"approximate": "tanh"}),
    ("silu_mul_halves", [floats(4, 6)], {}),
    ("sum", [floats(3, 4, 5)], {"dims": (0, -1)}),
    ("sum", [floats(3, 4)], {"dims": ()}),
    ("mean", [floats(3, 4, 5)], {"dims": (1,), "keep": True}),
    ("max", [floats(3, 4, 5)], {"dims": (1, 2)}),
    ("min", [floats(3, 4, 5)], {"dims": (2,), "keep": True}),
    ("argmax", [("float", np.array([[1, 3, 3, 0], [2, 2, 2, 2.0]]))], {"dim": -1}),
    ("softmax", [floats(3, 9)], {}),
    ("softmax", [("float", np.array([[-np.inf] * 3, [0, -np.inf, 1.0]]))], {"dim": 1}),
    ("cumsum", [floats(3, 9)], {"dim": 0}),
    ("choose_experts", [floats(7, 12), floats(12)], {"k": 4, "groups": 3, "chosen_groups": 2}),
    ("choose_experts", [floats(5, 12), floats(12)], {"k": 3, "renormalise": False, "scaling": 2.5}),
    ("topk", [("float", np.array([[1, 5, 5, 2, 5], [0, 0, 0, 0, 1.0]]))], {"k": 3}),
    ("rms_norm", [floats(3, 32), floats(32)], {"eps": 1e-5}),
    ("layer_norm", [floats(3, 32), floats(32), floats(32)], {"eps": 1e-5}),
    ("layer_norm", [floats(3, 32)], {"eps": 1e-5}),
    ("reshape", [floats(3, 4)], {"shape": (2, 6)}),
    ("transpose", [floats(2, 3, 4)], {"perm": (2, 0, 1)}),
    ("broadcast", [floats(3, 1)], {"shape": (2, 3, 4)}),
    ("slice", [floats(3, 9)], {"dim": 1, "start": 1, "stop": 8, "step": 3}),
    ("concat", [floats(3, 2), floats(3, 4)], {"dim": -1}),
    ("pad", [floats(3, 2)], {"dim": -2, "before": 1, "after": 2, "value": 0.5}),
    ("gather", [floats(7, 3), ints(2, 4, low=0, high=7)], {}),
    ("linear", [floats(2, 3, 24), floats(5, 24), floats(5)], {}),
    ("linear", [floats(3, 24), floats(5, 24)], {}),
    ("quantize", [floats(2, 3, 48)], {"format": "f8e4m3/16:f32"}),
    ("quantize", [floats(3, 48)], {"format": "f8e4m3/row:f32"}),
    ("matmul", [floats(2, 1, 3, 8), floats(4, 8, 5)], {}),
    ("matmul", [floats(3, 8), floats(5, 8)], {"transpose_b": True}),
    ("experts", [floats(6, 16), ints(6, 3, low=-1, high=4), floats(6, 3), *_STACKS], {}),
    ("experts", [floats(2, 16), ints(2, 3, low=-1, high=4, dtype="i64"),
                 ("f32", RNG.random((2, 3))), *_STACKS], {"activation": "gelu_tanh", "total": 8}),
    ("conv2d", [floats(2, 4, 7, 8), floats(6, 2, 3, 3), floats(6)],
     {"stride": (2, 1), "padding": (1, 0), "groups": 2}),
    ("conv2d", [floats(1, 3, 5, 5), floats(2, 3, 2, 2)], {}),
    ("rope", [floats(5, 3, 16), ints(5, low=0, high=9000)], {}),
    ("rope", [floats(5, 3, 16), ints(5, low=0, high=300)], {"width": 8, "interleaved": True}),
    ("rope", [floats(5, 2, 16), ints(5, low=0, high=300)], ROPE),
    ("rope", [floats(2, 5, 2, 16), ints(2, 5, low=0, high=300)],
     {"scaling": "yarn", "factor": 4.0, "original_max": 64}),
    ("sdpa", [floats(2, 4, 5, 8), floats(2, 2, 5, 8), floats(2, 2, 5, 6)], {"causal": True}),
    ("sdpa", [floats(4, 3, 8), floats(4, 5, 8), floats(4, 5, 8), floats(3, 5)], {"scale": 0.3}),
    ("sdpa", [floats(4, 2, 8), floats(4, 3, 8), floats(4, 3, 8),
              ("bool", np.array([[1, 0, 1], [0, 0, 0]], bool))], {}),
]  # fmt: skip
OTHER_CASES: list[Case] = [
    *((n, [ints(3, 5), ints(5)], {}) for n in (*BINARY, "logical_and", "logical_or")),
    ("div", [ints(4), ("i32", np.array([0, 2, -3, 0]))], {}),
    ("remainder", [ints(4), ("i32", np.array([0, 2, -3, 0]))], {}),
    ("pow", [ints(4), ints(4, low=0, high=4)], {}),
    ("neg", [ints(4, dtype="i64")], {}),
    ("abs", [ints(4, dtype="i16")], {}),
    ("logical_not", [("bool", RNG.random(5) > 0.5)], {}),
    ("logical_and", [("bool", RNG.random(5) > 0.5), ("bool", RNG.random(5) > 0.5)], {}),
    ("where", [("bool", RNG.random(4) > 0.5), ints(4), ints(4)], {}),
    ("sum", [ints(3, 4)], {"dims": (1,)}),
    ("sum", [("bool", RNG.random((3, 4)) > 0.9)], {"dims": (1,)}),
    ("max", [ints(3, 4)], {"dims": (0, 1)}),
    ("cumsum", [ints(3, 4)], {"dim": 1}),
    ("topk", [ints(3, 8, low=0, high=3)], {"k": 4}),
    ("cast", [floats(3, 5, low=-100, high=100)], {"dtype": "i32"}),
    ("cast", [floats(3, 5)], {"dtype": "bf16"}),
    ("cast", [("float", np.array([0.1, 463, 464, 465, -1e9, np.nan]))], {"dtype": "f8e4m3"}),
    ("cast", [floats(3, 5)], {"dtype": "f8e5m2"}),
    ("cast", [ints(3, 5)], {"dtype": "bool"}),
    ("cast", [("bf16", RNG.random(4))], {"dtype": "f32"}),
    ("add", [("f8e4m3", RNG.random(4)), ("f8e4m3", RNG.random(4))], {}),
    ("gather", [ints(7, 3, dtype="i64"), ints(4, low=0, high=7, dtype="u8")], {}),
    ("route", [ints(7, 3, low=-1, high=5), ints(4, 3, low=0, high=9), ints(4, low=1, high=4)], {}),
    ("route", [ints(2, 3, low=-1, high=5, dtype="i64"), ints(4, 3, low=0, high=9),
               ints(4, low=1, high=4, dtype="u8")], {}),
    ("full", [], {"shape": (2, 3), "value": 1.5, "dtype": "bf16"}),
    ("full", [], {"shape": (), "value": True, "dtype": "bool"}),
    ("iota", [], {"size": 5, "start": 3, "step": -2}),
    ("iota", [], {"size": 5, "dtype": "f32"}),
    ("iota", [], {"size": 0}),
    ("constant", [], {"shape": (2, 2), "values": (1, 2, 3, 4), "dtype": "f32"}),
]  # fmt: skip
FORMATS = (
    "i8/32:f16", "u4/32:f16+f16", "i4/32:f16", "i8/row:f32", "f8e4m3/row:f32",
    "f4e2m1/32:f8e8m0", "f4e2m1/16:f8e4m3", "f8e4m3/128x128:f32", "f8e4m3/16x16:f32",
    "f8e4m3/tensor:f32", "f8e4m3/32:f8e8m0",
    "bf16", "f16",
)  # fmt: skip


def materialise(spec: Spec, float_type: str) -> tuple[TensorType, Data]:
    """Type and data of an operand."""
    dtype = parse_dtype(float_type if spec[0] == "float" else spec[0])
    shape = spec[1].shape
    if isinstance(dtype, Block):
        return tensor(dtype, *shape), quantize(spec[1].astype(np.float32), dtype)
    return tensor(dtype, *shape), spec[1].astype(dtype.numpy)


def build(
    case: Case, float_type: str = "f32", weights: Sequence[int] = ()
) -> tuple[Op, list[Data]]:
    """A case as an op with inferred results, and its data."""
    name, specs, attrs = case
    pairs = [materialise(s, float_type) for s in specs]
    return make_op(name, [t for t, _ in pairs], attrs, weights), [d for _, d in pairs]


def assert_close(found: Data, wanted: Data, dtype: DType, extra: float = 0.0) -> None:
    """Within one rounding of the result's type, relative to the largest magnitude."""
    if isinstance(dtype, Block):
        assert isinstance(found, BlockArray)
        assert found.format == dtype
        assert difference(found, wanted) <= TOLERANCE.get(dtype.element.name, 0.0) + extra
    elif dtype.is_float:
        assert difference(found, wanted) <= TOLERANCE[dtype.name] + extra
    else:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def check(kernel: Kernel, op: Op, data: list[Data], device: str = "cpu") -> None:
    """A kernel's results are the reference's, within its type's rounding and its stated error."""
    found = run_kernel(kernel, op, data, LAYOUTS, device=device)
    wanted = run_reference(op, data)
    results = [v for v in op.results if not v.is_state]
    for f, w, value in zip(found, wanted, results, strict=False):
        assert_close(f, w, value.tensor.dtype, kernel.error)


def paged(dtype: str, lengths: list[int], new: list[int], width: int = 8) -> Any:
    """A state's type and pages, and the step's fields for some sequences.

    The null page holds NaN: no sequence may read it.
    """
    entry = tensor(scalar(dtype), 2, width)
    return paged_state({"k": entry, "v": entry}, lengths, new)


def paged_state(fields: dict[str, TensorType], lengths: list[int], new: list[int]) -> Any:
    """The same of a state with any fields of numbers."""
    page_size, longest = 4, max(-(-n // 4) for n in lengths)
    num_pages = 1 + longest * len(lengths)
    type_ = StateType("pages", tuple(fields.items()), page_size=page_size)
    state = {}
    for name, entry in fields.items():
        shape = (num_pages, page_size, *entry.concrete({}))
        state[name] = RNG.uniform(-2, 2, shape).astype(cast(Scalar, entry.dtype).numpy)
        state[name][0] = np.nan
    pages = np.zeros((len(lengths), longest), np.int32)
    order = RNG.permutation(np.arange(1, num_pages)).astype(np.int32)
    for b, n in enumerate(lengths):
        used = -(-n // page_size)
        pages[b, :used], order = order[:used], order[used:]
    starts = np.cumsum([0, *new]).astype(np.int32)
    return type_, state, starts, np.array(lengths, np.int32), pages


# (lengths, new tokens) of the sequences: mixed, decode, one prefill, one without new tokens.
BATCHES = [([9, 1, 5], [3, 1, 5]), ([7, 12], [1, 1]), ([6], [6]), ([4, 3], [0, 3])]


def attention_case(
    dtype: str,
    batch: tuple[list[int], list[int]],
    attrs: dict[str, Any],
    width: int = 8,
    padding: int = 2,
) -> tuple[Op, list[Data]]:
    """An attention op over paged sequences, with padded rows after them."""
    lengths, new = batch
    type_, state, *step = paged(dtype, lengths, new, width)
    rows = sum(new) + padding
    fields = [tensor(scalar("i32"), *a.shape) for a in step]
    types = [tensor(scalar(dtype), rows, 4, width), type_, *fields]
    q = RNG.uniform(-2, 2, (rows, 4, width)).astype(scalar(dtype).numpy)
    return make_op("attention", types, attrs), [q, state, *step]


def latent_case(
    dtype: str, batch: tuple[list[int], list[int]], heads: int = 3, padding: int = 2
) -> tuple[Op, list[Data]]:
    """A latent_attention op over paged sequences, with padded rows after them."""
    lengths, new = batch
    entries = {"c": tensor(scalar(dtype), 16), "r": tensor(scalar(dtype), 8)}
    type_, state, *step = paged_state(entries, lengths, new)
    rows = sum(new) + padding
    queries = [RNG.uniform(-2, 2, (rows, heads, w)).astype(scalar(dtype).numpy) for w in (16, 8)]
    types = [tensor(scalar(dtype), *q.shape) for q in queries]
    fields = [tensor(scalar("i32"), *a.shape) for a in step]
    op = make_op("latent_attention", [*types, type_, *fields], {"scale": 0.2})
    return op, [*queries, state, *step]


def fused(
    kind: str,
    lead: tuple[int, ...],
    bias: bool,
    follows: str,
    attrs: dict[str, Any],
    dtype: str = "f32",
    size: tuple[int, int] = (6, 16),
) -> tuple[Op, list[Data]]:
    """A fused group of a linear and one op after it, operands as the rules order them."""
    rows, columns = size
    type_ = scalar(dtype)
    types = [tensor(type_, *lead, columns), tensor(type_, rows, columns)]
    types += [tensor(type_, rows)] * bias
    residual = [tensor(type_, *lead, rows)] * (follows == "add")
    sigils = ["%", "@", "@"] if bias else ["%", "@"]
    inputs = [Value(f"{s}{i}", t) for i, (s, t) in enumerate(zip(sigils, types, strict=True))]
    others = [Value("%r", t) for t in residual]
    product = Value("%p", tensor(type_, *lead, rows))
    result = Value("%y", product.type)
    body = Graph(
        kind,
        tuple(Value(f"%{v.name[1:]}", v.type) for v in (*inputs, *others)),
        ops=(
            Op("linear", tuple(Value(f"%{v.name[1:]}", v.type) for v in inputs), (product,)),
            Op(follows, (product, *others), (result,), attrs_of(attrs)),
        ),
        outputs=(result,),
    )
    op = Op("fused", (*inputs, *others), (result,), attrs_of({"kind": kind}), body)
    values = (*inputs, *others)
    shapes = [v.tensor.concrete({}) for v in values]
    return op, [RNG.uniform(-1, 1, s).astype(type_.numpy) for s in shapes]
