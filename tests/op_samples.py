"""Sample operands of every op: one line each, from which the tests of records make data.

A newcomer's op needs one line in ``SAMPLES``: its name, operand types in the text form, attributes.
Sizes may be symbolic: T, B, P. A suffix bounds random data: ``i32[T] < 7`` draws from 0 to 6,
``f32[T] > 0`` draws positive numbers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import Block, Scalar, quantize
from metainfer.ir.graph import Attr
from metainfer.ir.interpret import concrete_attr
from metainfer.ir.ops import OPS
from metainfer.ir.parser import parse_graph
from metainfer.ir.types import StateType, TensorType, Type

SETTINGS: tuple[dict[str, int], ...] = (
    {"T": 1, "B": 1, "P": 1},
    {"T": 5, "B": 2, "P": 3},
    {"T": 8, "B": 4, "P": 2},
)
SYMBOLS = tuple(SETTINGS[0])
_BOUND = re.compile(r"(?P<type>.*?)(?: (?P<sign>[<>]) (?P<bound>\d+))?")


@dataclass(frozen=True)
class Operand:
    """One operand of a sample: its type, and bounds of its data."""

    type: Type
    sign: str = ""
    bound: int = 0


@dataclass(frozen=True)
class Sample:
    """Operands and attributes of one op."""

    name: str
    operands: tuple[Operand, ...]
    attrs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Print as an op."""
        inner = ", ".join(str(o.type) for o in self.operands)
        return f"{self.name}({inner}) {self.attrs or ''}".strip()

    @property
    def types(self) -> list[Type]:
        """Operand types, symbolic."""
        return [o.type for o in self.operands]

    def at(self, env: Mapping[str, int]) -> "Sample":
        """The sample with its sizes as numbers."""
        operands = tuple(replace(o, type=static_type(o.type, env)) for o in self.operands)
        return replace(self, operands=operands, attrs=static_attrs(self.attrs, env))

    def data(self, rng: np.random.Generator) -> list[Any]:
        """Random operands of a sample whose sizes are numbers."""
        if any(isinstance(t, StateType) for t in self.types):
            return _paged_data(self, rng)
        return [_data(o, rng) for o in self.operands]


def static_type(type_: Type, env: Mapping[str, int]) -> Type:
    """A type with its sizes as numbers."""
    if isinstance(type_, StateType):
        return type_
    return type_.with_shape(tuple(dim(n) for n in type_.concrete(env)))


def static_attrs(attrs: Mapping[str, Attr], env: Mapping[str, int]) -> dict[str, Any]:
    """Attributes with their sizes as numbers."""
    return {name: concrete_attr(value, env) for name, value in attrs.items()}


@cache
def read_type(text: str) -> Type:
    """A type from its text form."""
    return parse_graph(f"graph f(%x: {text}) {{ return }}").inputs[0].type


def sample(name: str, *operands: str, **attrs: Any) -> Sample:
    """A sample from text."""
    made = []
    for text in operands:
        match = _BOUND.fullmatch(text)
        assert match is not None, text
        made.append(
            Operand(read_type(match["type"]), match["sign"] or "", int(match["bound"] or 0))
        )
    return Sample(name, tuple(made), attrs)


def _data(operand: Operand, rng: np.random.Generator) -> Any:
    type_ = operand.type
    assert isinstance(type_, TensorType)
    shape = type_.concrete({})
    if isinstance(type_.dtype, Block):
        return quantize(rng.standard_normal(shape).astype(np.float32), type_.dtype)
    return scalar_data(type_.dtype, shape, rng, operand.sign, operand.bound)


def scalar_data(
    dtype: Scalar,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    sign: str = "",
    bound: int = 0,
) -> Any:
    """Random numbers of an element type; multiples of 1/8, so that ties occur."""
    if dtype.kind == "bool":
        return rng.random(shape) < 0.5
    if dtype.kind in ("int", "uint") and sign == ">":
        return rng.integers(bound + 1, bound + 4, shape).astype(dtype.numpy)
    if dtype.kind in ("int", "uint"):
        low = 0 if sign == "<" or dtype.kind == "uint" else -5
        return rng.integers(low, bound if sign == "<" else 6, shape).astype(dtype.numpy)
    if dtype.name == "f8e8m0":
        return np.ldexp(1.0, rng.integers(-9, -5, shape)).astype(dtype.numpy)
    values = np.round(rng.standard_normal(shape) * 8) / 8
    if sign == ">":
        values = np.abs(values) + bound + 0.125
    return values.astype(dtype.numpy)


PAGE_SIZE = 4


def _paged_data(sample_: Sample, rng: np.random.Generator) -> list[Any]:
    """Operands of ops on paged states: page tables and lengths that fit each other."""
    state = next(o.type for o in sample_.operands if isinstance(o.type, StateType))
    if sample_.name.endswith("_write"):
        k, v, slots = (_data(o, rng) for o in sample_.operands[1:])
        pages = -(-len(slots) // PAGE_SIZE) + 1
        slots = rng.permutation(pages * PAGE_SIZE)[: len(slots)].astype(np.int32)
        return [_state_data(state, pages, rng), k, v, slots]
    queries = [_data(o, rng) for o in sample_.operands[:-4]]
    q, shape = queries[0], sample_.operands[-1].type
    assert isinstance(shape, TensorType)
    batch, most = shape.concrete({})
    # Each sequence has some of the new tokens, the last rows may be padding.
    cuts = np.sort(rng.integers(0, len(q) + 1, batch))
    starts = np.concatenate([[0], cuts]).astype(np.int32)
    new = np.diff(starts)
    room = most * PAGE_SIZE
    starts = np.concatenate([[0], np.cumsum(np.minimum(new, room))]).astype(np.int32)
    new = np.diff(starts)
    lengths = np.array([rng.integers(n, room + 1) for n in new], np.int32)
    pages = rng.permutation(np.arange(1, batch * most + 1)).reshape(batch, most).astype(np.int32)
    return [*queries, _state_data(state, batch * most + 1, rng), starts, lengths, pages]


def _state_data(state: StateType, pages: int, rng: np.random.Generator) -> dict[str, Any]:
    made = {}
    for name, type_ in state.fields:
        assert isinstance(type_.dtype, Scalar)
        made[name] = scalar_data(type_.dtype, (pages, PAGE_SIZE, *type_.concrete({})), rng)
    return made


_STATE = "pages(k: f32[4,8], v: f32[4,8]) per token"
_ROUNDED = (
    "pages(k: f8e4m3[4,8], k_scale: f8e8m0[4,1], v: f8e4m3[4,8], v_scale: f8e8m0[4,1]) per token"
)
_LATENT = "pages(c: f32[8], r: f32[4]) per token"
_LATENT_ROUNDED = "pages(c: f8e4m3[8], c_scale: f8e8m0[1], r: f32[4]) per token"
_STEP = ("i32[B+1]", "i32[B]", "i32[B,P]")
_EXPERTS = ("f32[4,12,8]", "f32[4,12,8]", "f32[4,8,12]")
_YARN = {"scaling": "yarn", "factor": 4.0, "original_max": 64}
_T = dim("T")

SAMPLES: tuple[Sample, ...] = (
    # elementwise
    *(sample(n, "f32[T,8]") for n in (
        "neg", "abs", "exp", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "silu", "floor", "gelu"
    )),
    *(sample(n, "f32[T,8] > 0") for n in ("log", "sqrt", "rsqrt", "reciprocal")),
    sample("gelu", "f32[T,8]", approximate="tanh"),
    sample("neg", "i32[T,8]"),
    sample("abs", "i64[T]"),
    sample("tanh", "bf16[T,8]"),
    sample("logical_not", "bool[T,8]"),
    *(sample(n, "f32[T,8]", "f32[8] > 0") for n in (
        "add", "sub", "mul", "div", "floor_div", "remainder", "maximum", "minimum"
    )),
    *(sample(n, "i32[T,1]", "i32[1,4]") for n in (
        "add", "sub", "mul", "div", "floor_div", "remainder", "maximum", "minimum"
    )),
    sample("add", "bf16[T,8]", "bf16[T,8]"),
    sample("mul", "bool[T]", "bool[T]"),
    sample("pow", "f32[T,8] > 0", "f32[T,8]"),
    sample("pow", "i32[T]", "i32[T] < 4"),
    *(sample(n, "f32[T,8]", "f32[T,8]") for n in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(sample(n, "i64[T,8]", "i64[8]") for n in ("eq", "lt", "ge")),
    *(sample(n, "bool[T,8]", "bool[T,1]") for n in ("logical_and", "logical_or")),
    sample("where", "bool[T,8]", "f32[T,8]", "f32[T,8]"),
    sample("where", "bool[T,1]", "i32[8]", "i32[]"),
    sample("cast", "f32[T,8]", dtype="i32"),
    sample("cast", "f32[T,8]", dtype="bf16"),
    sample("cast", "i64[T]", dtype="f32"),
    sample("cast", "f32[T]", dtype="bool"),
    # reductions, scans
    *(sample(n, "f32[T,4,8]", dims=(1,)) for n in ("sum", "mean", "max", "min")),
    *(sample(n, "f32[T,4,8]", dims=(0, -1), keep=True) for n in ("sum", "mean", "max", "min")),
    *(sample(n, "f32[T,4]", dims=()) for n in ("sum", "mean", "max")),
    sample("sum", "i32[T,4]", dims=(1,)),
    sample("sum", "bool[T,4]", dims=(1,)),
    sample("max", "bool[T,4]", dims=(0, 1)),
    sample("argmax", "f32[T,8]", dim=-1),
    sample("argmax", "i32[T,8]", dim=0),
    sample("softmax", "f32[T,8]"),
    sample("softmax", "f32[T,4,8]", dim=1),
    sample("cumsum", "f32[T,8]", dim=1),
    sample("cumsum", "i32[T,8]", dim=0),
    sample("topk", "f32[T,8]", k=3),
    sample("topk", "i32[T,8]", k=8),
    # norms and gates
    sample("rms_norm", "f32[T,8]", "f32[8]", eps=1e-5),
    sample("rms_norm", "bf16[T,4,8]", "f32[8]", eps=1e-5),
    sample("layer_norm", "f32[T,8]", "f32[8]", "f32[8]", eps=1e-5),
    sample("layer_norm", "f32[T,8]", "f32[8]", eps=1e-5),
    sample("layer_norm", "f32[4,T,8]", eps=1e-5),
    sample("silu_mul", "f32[T,8]", "f32[T,8]"),
    sample("gelu_mul", "f32[T,8]", "f32[T,8]"),
    sample("gelu_mul", "f32[T,8]", "f32[T,8]", approximate="tanh"),
    sample("silu_mul_halves", "f32[T,16]"),
    # products
    sample("linear", "f32[T,8]", "f32[12,8]"),
    sample("linear", "f32[2,T,8]", "f32[12,8]", "f32[12]"),
    sample("linear", "f32[T,64]", "i8/32:f16[4,64]"),
    sample("linear", "f32[T,8]", "bf16[12,8]"),
    sample("linear", "f8e4m3/32:f32[T,64]", "f8e4m3/16x16:f32[4,64]", dtype="bf16"),
    sample("linear", "f8e4m3/row:f32[2,T,24]", "f8e4m3/row:f32[4,24]", "f32[4]", dtype="f32"),
    sample("matmul", "f32[4,T,8]", "f32[4,8,12]"),
    sample("matmul", "f32[T,8]", "f32[12,8]", transpose_b=True),
    sample("matmul", "f32[2,1,T,8]", "f32[4,8,T]"),
    sample("conv2d", "f32[B,4,6,7]", "f32[8,4,3,2]", "f32[8]", stride=(2, 1), padding=(1, 0)),
    sample("conv2d", "f32[B,4,6,T+2]", "f32[8,2,3,3]", groups=2),
    sample("conv2d", "f32[B,4,5,5]", "f32[4,4,1,1]"),
    # experts
    sample("route", "i32[T,2]", "i32[5,3] < 9", "i32[5] > 0"),
    sample("route", "i64[T,2] < 4", "i32[4,4] < 9", "u8[4] > 0"),
    sample("experts", "f32[T,8]", "i32[T,2] < 4", "f32[T,2]", *_EXPERTS),
    sample("experts", "bf16[T,32]", "i64[T,3]", "f32[T,3]", "i8/32:f16[3,64,32]",
           "i8/32:f16[3,64,32]", "f4e2m1/32:f8e8m0[3,32,64]", activation="gelu_tanh", total=6),
    sample("experts", "f8e4m3/32:f32[T,64]", "i32[T,2] < 3", "f32[T,2]",
           *["f8e4m3/row:f32[3,32,64]"] * 2, "f8e4m3/row:f32[3,64,32]", dtype="bf16"),
    sample("choose_experts", "f32[T,12]", "f32[12]", k=3),
    sample("choose_experts", "f32[T,12]", "f32[12]", k=3, groups=4, chosen_groups=2, scaling=2.5),
    sample("choose_experts", "bf16[T,6]", "f32[6]", k=2, groups=3, renormalise=False),
    # attention
    sample("rope", "f32[T,4,8]", "i32[T] < 99"),
    sample("rope", "f32[B,T,4,8]", "i32[B,T] < 99", width=4, interleaved=True, theta=500.0),
    sample("rope", "f32[T,4,8]", "i64[T] < 99", **_YARN),
    sample("rope", "f32[T,4,8]", "i32[T] < 99", scaling="llama3", factor=8.0, original_max=32),
    sample("rope", "f32[T,4,8]", "i32[T] < 99", scaling="linear", factor=2.0),
    sample("sdpa", "f32[B,4,T,8]", "f32[B,4,6,8]", "f32[B,4,6,12]"),
    sample("sdpa", "f32[8,T,8]", "f32[4,T,8]", "f32[4,T,8]", causal=True, scale=0.5),
    sample("sdpa", "f32[B,4,T,8]", "f32[B,1,6,8]", "f32[B,1,6,8]", "bool[T,6]"),
    sample("sdpa", "f32[B,4,T,8]", "f32[B,2,6,8]", "f32[B,2,6,8]", "f32[B,1,1,6]"),
    sample("kv_write", _STATE, "f32[T,4,8]", "f32[T,4,8]", "i32[T]"),
    sample("kv_write", _ROUNDED, "f32[T,4,8]", "f32[T,4,8]", "i32[T]"),
    sample("attention", "f32[T,8,8]", _STATE, *_STEP),
    sample("attention", "f32[T,8,8]", _ROUNDED, *_STEP),
    sample("attention", "f32[T,8,8]", "pages(k: f32[1,8], v: f32[1,4]) per token", *_STEP),
    sample("attention", "f32[T,4,8]", _STATE, *_STEP, scale=0.3, window=3, softcap=2.0),
    *(sample("latent_write", s, "f32[T,8]", "f32[T,4]", "i32[T]")
      for s in (_LATENT, _LATENT_ROUNDED)),
    sample("latent_attention", "f32[T,4,8]", "f32[T,4,4]", _LATENT, *_STEP, scale=0.3),
    sample("latent_attention", "f32[T,3,8]", "f32[T,3,4]", _LATENT_ROUNDED, *_STEP, scale=0.5),
    # shapes
    sample("reshape", "f32[T,32]", shape=(_T, 4, 8)),
    sample("reshape", "f32[T,4,8]", shape=(_T, 32)),
    sample("reshape", "f32[B,T,8]", shape=(dim("B"), 1, _T, 2, 4)),
    sample("reshape", "f32[T,1,8]", shape=(8, 1, _T)),
    sample("reshape", "i32[]", shape=(1, 1)),
    sample("transpose", "f32[T,4,8]", perm=(2, 0, 1)),
    sample("broadcast", "f32[4,1]", shape=(_T, 4, 8)),
    sample("broadcast", "f32[T,8]", shape=(2, _T, 8)),
    sample("slice", "f32[T,8]", dim=1, start=1, stop=8, step=3),
    sample("slice", "f32[T+2,8]", dim=0, start=1, stop=_T + 1),
    sample("concat", "f32[T,8]", "f32[T,4]", "f32[T,1]", dim=-1),
    sample("concat", "f32[T,8]", "f32[2,8]", dim=0),
    sample("pad", "f32[T,8]", dim=-2, before=1, after=2, value=0.5),
    sample("pad", "f32[T,8]", dim=1, after=3),
    sample("gather", "f32[8,4]", "i32[T] < 8"),
    sample("gather", "i64[8]", "i64[B,T] < 8"),
    sample("embedding", "i32[T] < 8", "f32[8,16]"),
    sample("embedding", "i64[B,T] < 8", "i8/32:f16[8,32]", dtype="bf16"),
    sample("full", shape=(_T, 2), value=1.5, dtype="bf16"),
    sample("full", shape=(), value=True, dtype="bool"),
    sample("iota", size=_T, start=3, step=-2),
    sample("iota", size=5, dtype="f32"),
    sample("constant", shape=(2, 2), values=(1, 2, 3, 4), dtype="f32"),
    # collectives
    sample("all_reduce", "f32[T,8]", axis="tp"),
    sample("reduce_scatter", "f32[T,8]", axis="tp", dim=1),
    sample("all_gather", "f32[T,8]", axis="tp", dim=1),
    sample("all_to_all", "f32[T,8]", axis="tp", source=0, target=1),
    sample("take_shard", "f32[T,8]", axis="tp", dim=1),
    sample("local_index", "i32[T,3]", axis="tp", ranks=1, count=7),
    # load graphs
    sample("quantize", "f32[8,64]", format="i8/32:f16"),
    sample("quantize", "f32[8,64]", format="f8e4m3/row:f32"),
    sample("quantize", "bf16[T,64]", format="f8e4m3/32:f32"),
    sample("dequantize", "u4/32:f16+f16[8,64]"),
    sample("dequantize", "f4e2m1/32:f8e8m0[8,64]", dtype="bf16"),
    sample("quantize", "f32[3,8,64]", format="f8e4m3/tensor:f32"),
    sample("refine_scales", "f8e4m3/8x32:f32[12,64]", format="f8e4m3/4x8:f32"),
    sample("refine_scales", "u4/row:f16+f16[8,64]", format="u4/32:f16+f16"),
    sample("concat_rows", "f32[8,4]", "f32[2,4]"),
    sample("concat_rows", "i8/32:f16[8,64]", "i8/32:f16[4,64]"),
    sample("concat_rows", "i8/4x4:f32[8,8]", "i8/4x4:f32[4,8]"),
    sample("repeat_rows", "f32[6,4]", groups=3, times=2),
    sample("repeat_rows", "u4/32:f16+f16[8,64]", groups=2, times=3),
    sample("unpermute_rope", "f32[16,4]", heads=2),
    sample("unpermute_rope", "u4/32:f16+f16[16,32]", heads=4),
    sample("take_rows", "f32[4,2,3]", "i32[6] < 4"),
    sample("take_rows", "f8e4m3/8x8:f32[4,16,8]", "i32[6] < 4"),
    sample("take_rows", "u4/32:f16+f16[4,2,32]", "i32[3] < 4"),
    sample("pack", "f32[8,4]", layout="some.layout"),
)  # fmt: skip

BY_NAME: dict[str, list[Sample]] = {
    name: [s for s in SAMPLES if s.name == name] for name in {*OPS, *(s.name for s in SAMPLES)}
}
