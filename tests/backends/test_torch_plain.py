"""Every plain implementation against its op's reference."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from metainfer.backends.kernel import Kernel, Registry
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.check import run_kernel, run_reference
from metainfer.backends.torch.plain import LOAD_OPS, PLAIN, VIEWS
from metainfer.backends.torch.records import register
from metainfer.ir.dtypes import Block, Scalar, parse_dtype, quantize
from metainfer.ir.graph import Op, Value, attrs_of
from metainfer.ir.interpret import Data
from metainfer.ir.ops import OPS, infer_types
from metainfer.ir.types import StateType, tensor

KERNELS, LAYOUTS = Registry(), LayoutRegistry()
register(KERNELS, LAYOUTS)
RNG = np.random.default_rng(7)
FLOATS = ("f32", "bf16", "f16", "f64")
# Relative to the largest magnitude: one rounding of the type and the sums' own order.
TOLERANCE = {"f64": 1e-6, "f32": 2e-5, "bf16": 2.0**-7, "f16": 2.0**-10, "f8e4m3": 2.0**-3}

Case = tuple[str, Sequence[Any], dict[str, Any]]


def floats(*shape: int, low: float = -3.0, high: float = 3.0) -> tuple[str, np.ndarray]:
    """A float operand, rounded to the case's type later."""
    return "float", RNG.uniform(low, high, shape)


def ints(*shape: int, low: int = -9, high: int = 9, dtype: str = "i32") -> tuple[str, np.ndarray]:
    return dtype, RNG.integers(low, high, shape)


def weight(format: str, *shape: int) -> tuple[str, np.ndarray]:
    return format, RNG.uniform(-1, 1, shape)


POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal")
UNARY = "neg abs exp sin cos tanh erf sigmoid relu silu floor gelu".split()
BINARY = "add sub mul div maximum minimum eq ne lt le gt ge floor_div remainder".split()
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
    ("matmul", [floats(2, 1, 3, 8), floats(4, 8, 5)], {}),
    ("matmul", [floats(3, 8), floats(5, 8)], {"transpose_b": True}),
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
    "bf16", "f16",
)  # fmt: skip


def materialise(spec: tuple[str, np.ndarray], float_type: str) -> tuple[Any, Data]:
    """Type and data of an operand."""
    name = float_type if spec[0] == "float" else spec[0]
    dtype = parse_dtype(name)
    shape = spec[1].shape
    if isinstance(dtype, Block):
        return tensor(dtype, *shape), quantize(spec[1].astype(np.float32), dtype)
    return tensor(dtype, *shape), spec[1].astype(dtype.numpy)


def build(case: Case, float_type: str) -> tuple[Op, list[Data]]:
    """A case as an op with inferred results, and its data."""
    name, specs, attrs = case
    pairs = [materialise(s, float_type) for s in specs]
    operands = tuple(Value(f"%{i}", type_) for i, (type_, _) in enumerate(pairs))
    types = infer_types(name, [v.type for v in operands], attrs)
    results = tuple(Value(f"%r{i}", t) for i, t in enumerate(types))
    return Op(name, operands, results, attrs_of(attrs)), [d for _, d in pairs]


def assert_close(found: Data, wanted: Data, dtype: Scalar) -> None:
    """Within one rounding of the result's type, relative to the largest magnitude."""
    assert isinstance(found, np.ndarray)
    assert isinstance(wanted, np.ndarray)
    assert found.shape == wanted.shape
    if not dtype.is_float:
        np.testing.assert_array_equal(found, wanted)
        return
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    top = np.max(np.abs(b[np.isfinite(b)]), initial=1e-3)
    np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype.name] * top)


def check(kernel: Kernel, op: Op, data: list[Data]) -> None:
    """A kernel's results are the reference's."""
    found = run_kernel(kernel, op, data, LAYOUTS)
    wanted = run_reference(op, data)
    for f, w, value in zip(found, wanted, op.results, strict=True):
        dtype = value.tensor.dtype
        assert isinstance(dtype, Scalar)
        assert_close(f, w, dtype)


def plain(name: str) -> Kernel:
    return KERNELS.get(f"torch.{name}_plain")


def test_every_op_has_a_plain_kernel_without_requirements() -> None:
    assert set(OPS) - LOAD_OPS == set(PLAIN)
    for name in PLAIN:
        kernel = plain(name)
        assert kernel.generic
        assert not kernel.requires
        assert kernel.launches >= 1


@pytest.mark.parametrize("float_type", FLOATS)
@pytest.mark.parametrize("case", FLOAT_CASES, ids=lambda c: c[0])
def test_floats(case: Case, float_type: str) -> None:
    check(plain(case[0]), *build(case, float_type))


@pytest.mark.parametrize("case", OTHER_CASES, ids=lambda c: c[0])
def test_other_types(case: Case) -> None:
    check(plain(case[0]), *build(case, "f32"))


def test_all_ops_are_covered() -> None:
    seen = {c[0] for c in (*FLOAT_CASES, *OTHER_CASES)}
    assert set(PLAIN) - seen == {"embedding", "kv_write", "attention"}


@pytest.mark.parametrize("float_type", ("f32", "bf16"))
@pytest.mark.parametrize("format", FORMATS)
def test_linear_and_embedding_of_formats(format: str, float_type: str) -> None:
    if format in ("bf16", "f16") and float_type == "bf16":
        pytest.skip("the verifier wants a cast")
    check(
        plain("linear"),
        *build(("linear", [floats(3, 144), weight(format, 40, 144)], {}), float_type),
    )
    attrs = {"dtype": float_type}
    case = ("embedding", [ints(2, 3, low=0, high=40), weight(format, 40, 144)], attrs)
    check(plain("embedding"), *build(case, float_type))


def paged(dtype: str, lengths: list[int], new: list[int], rows: int, page_size: int = 4) -> Any:
    """A state, its type, and the step's fields for some sequences; rows past them are padding."""
    scalar = parse_dtype(dtype)
    assert isinstance(scalar, Scalar)
    longest = max(-(-n // page_size) for n in lengths)
    num_pages = 1 + longest * len(lengths)
    entry = tensor(scalar, 2, 8)
    type_ = StateType("pages", (("k", entry), ("v", entry)), page_size=page_size)
    state = {f: RNG.uniform(-2, 2, (num_pages, page_size, 2, 8)).astype(scalar.numpy) for f in "kv"}
    # What no sequence may read.
    for field in state.values():
        field[0] = np.nan
    pages = np.zeros((len(lengths), longest), np.int32)
    order = RNG.permutation(np.arange(1, num_pages)).astype(np.int32)
    for b, n in enumerate(lengths):
        used = -(-n // page_size)
        pages[b, :used], order = order[:used], order[used:]
    starts = np.cumsum([0, *new]).astype(np.int32)
    return type_, state, starts, np.array(lengths, np.int32), pages


def attention_op(type_: StateType, dtype: str, rows: int, step: list[Any], **attrs: Any) -> Op:
    scalar = parse_dtype(dtype)
    values = [
        Value("%q", tensor(scalar, rows, 4, 8)),
        Value("$kv", type_),
        *(Value(f"%s{i}", tensor(parse_dtype("i32"), *a.shape)) for i, a in enumerate(step)),
    ]
    types = infer_types("attention", [v.type for v in values], attrs)
    return Op("attention", tuple(values), (Value("%o", types[0]),), attrs_of(attrs))


ATTENTIONS: list[dict[str, Any]] = [
    {}, {"window": 3}, {"scale": 0.2, "softcap": 2.0}, {"window": 5, "scale": 0.4},
]  # fmt: skip
BATCHES = [([9, 1, 5], [3, 1, 5]), ([7, 12], [1, 1]), ([6], [6]), ([4, 3], [0, 3])]


@pytest.mark.parametrize("dtype", ("f32", "bf16"))
@pytest.mark.parametrize("attrs", ATTENTIONS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_attention(batch: tuple[list[int], list[int]], attrs: dict[str, Any], dtype: str) -> None:
    lengths, new = batch
    rows = sum(new) + 2
    type_, state, *step = paged(dtype, lengths, new, rows)
    op = attention_op(type_, dtype, rows, step, **attrs)
    q = RNG.uniform(-2, 2, (rows, 4, 8)).astype(parse_dtype(dtype).numpy)  # type: ignore[union-attr]
    data: list[Data] = [q, state, *step]
    found = run_kernel(plain("attention"), op, data, LAYOUTS)
    wanted = run_reference(op, data)
    scalar = parse_dtype(dtype)
    assert isinstance(scalar, Scalar)
    assert_close(found[0], wanted[0], scalar)


def test_kv_write_changes_its_slots_only() -> None:
    type_, state, *_ = paged("bf16", [9], [3], 3)
    bf16 = parse_dtype("bf16")
    k, v = (RNG.uniform(-2, 2, (3, 2, 8)).astype(bf16.numpy) for _ in "kv")  # type: ignore[union-attr]
    slots = np.array([5, 13, 0], np.int32)
    values = (
        Value("$kv", type_),
        Value("%k", tensor(bf16, 3, 2, 8)),
        Value("%v", tensor(bf16, 3, 2, 8)),
        Value("%s", tensor(parse_dtype("i32"), 3)),
    )
    op = Op("kv_write", values, (Value("$kv2", type_),))
    data: list[Data] = [state, k, v, slots]
    (found,) = run_kernel(plain("kv_write"), op, data, LAYOUTS)
    (wanted,) = run_reference(op, data)
    assert isinstance(found, dict)
    assert isinstance(wanted, dict)
    for name in "kv":
        np.testing.assert_array_equal(found[name], wanted[name])
        changed = np.any(found[name].reshape(-1, 2, 8) != state[name].reshape(-1, 2, 8), (1, 2))
        # The null page holds NaN, which differs from itself.
        assert set(np.flatnonzero(changed)) == {0, 1, 2, 3, 5, 13}


def test_views_share_memory_where_they_can() -> None:
    x = torch.arange(24).reshape(4, 6)
    cases: dict[str, dict[str, Any]] = {
        "reshape": {"shape": (2, 12)},
        "transpose": {"perm": (1, 0)},
        "broadcast": {"shape": (3, 4, 6)},
        "slice": {"dim": 1, "start": 1, "stop": 6, "step": 2},
    }
    assert set(cases) == set(VIEWS)
    for name, attrs in cases.items():
        view = VIEWS[name](x, attrs)
        wanted = OPS[name].reference(x.numpy(), **attrs)
        np.testing.assert_array_equal(view.numpy(), wanted)
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    copied = VIEWS["reshape"](x.t(), {"shape": (24,)})
    np.testing.assert_array_equal(copied.numpy(), x.numpy().T.reshape(24))
