"""Groups of ops that the Triton emitter takes whole, with data. Holds no tests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch_samples import FLOAT_CASES, OTHER_CASES
from triton_worker import compare, interpreted

from metainfer.backends.kernel import Kernel
from metainfer.backends.registry import installed
from metainfer.backends.torch.check import run_kernel, run_reference
from metainfer.backends.triton.launch import TritonBinder
from metainfer.backends.triton.pointwise import launches
from metainfer.ir.dtypes import BF16, Block, parse_dtype, quantize
from metainfer.ir.entries import KV_FP8, entry_fields
from metainfer.ir.graph import Graph, Op, attrs_of
from metainfer.ir.interpret import Data
from metainfer.ir.parser import parse_graph
from metainfer.ir.types import StateType, TensorType, Type, tensor

RNG = np.random.default_rng(5)
KERNEL = Kernel("triton.test", "test", "triton", binder=TritonBinder(launches))
KNOWN = {k.op for k in installed().kernels.all() if k.name == f"triton.{k.op}"}
# Single ops, and the type of their floats.
SINGLE = [
    *((c, t) for c in FLOAT_CASES for t in ("f32", "bf16") if c[0] in KNOWN),
    *((c, "f32") for c in OTHER_CASES if c[0] in KNOWN),
]

GROUPS: dict[str, str] = {
    "add_rms_norm": """graph g(%x: t[T,D], %r: t[T,D], %w: t[D]) {
      %0 = add(%x, %r) : t[T,D]
      %1 = rms_norm(%0, %w) {eps = 1e-5} : t[T,D]
      return %0, %1
    }""",
    "add_layer_norm": """graph g(%x: t[2,T,D], %r: t[2,T,D], %w: t[D], %b: t[D]) {
      %0 = add(%x, %r) : t[2,T,D]
      %1 = layer_norm(%0, %w, %b) {eps = 1e-5} : t[2,T,D]
      return %0, %1
    }""",
    "gather_rms_norm": """graph g(%x: t[7,D], %rows: i32[T], %w: t[D]) {
      %0 = gather(%x, %rows) : t[T,D]
      %1 = rms_norm(%0, %w) {eps = 1e-5} : t[T,D]
      return %1
    }""",
    "gelu_mul_halves": """graph g(%x: t[T,2*D]) {
      %0 = slice(%x) {dim = -1, start = 0, stop = D} : t[T,D]
      %1 = slice(%x) {dim = -1, start = D, stop = 2*D} : t[T,D]
      %2 = gelu_mul(%0, %1) {approximate = "tanh"} : t[T,D]
      return %2
    }""",
    "route": """graph g(%x: t[T,D]) {
      %0 = softmax(%x) : t[T,D]
      %1, %2 = topk(%0) {k = 3} : t[T,3], i64[T,3]
      %3 = sum(%1) {dims = (1,), keep = true} : t[T,1]
      %4 = div(%1, %3) : t[T,3]
      %5 = cast(%2) {dtype = "i32"} : i32[T,3]
      return %4, %5
    }""",
    "reduce_experts": """graph g(%x: t[T,5,D], %w: t[T,5], %s: t[T,D]) {
      %0 = reshape(%w) {shape = (dim(T), 5, 1)} : t[T,5,1]
      %1 = mul(%x, %0) : t[T,5,D]
      %2 = sum(%1) {dims = (1,)} : t[T,D]
      %3 = add(%2, %s) : t[T,D]
      return %3
    }""",
    "chain": """graph g(%x: t[T,D], %m: bool[D], %s: f32[T,1]) {
      %0 = cast(%x) {dtype = "f32"} : f32[T,D]
      %1 = mul(%0, %s) : f32[T,D]
      %2 = sigmoid(%1) : f32[T,D]
      %3 = full() {shape = (), value = 0.5, dtype = "f32"} : f32[]
      %4 = where(%m, %2, %3) : f32[T,D]
      %5 = gt(%4, %s) : bool[T,D]
      %6 = cast(%4) {dtype = "bf16"} : bf16[T,D]
      return %6, %5
    }""",
    "heads": """graph g(%x: t[T,4*D], %w: t[D]) {
      %0 = reshape(%x) {shape = (dim(T), 4, D)} : t[T,4,D]
      %1 = rms_norm(%0, %w) {eps = 1e-6} : t[T,4,D]
      %2 = transpose(%1) {perm = (1, 0, 2)} : t[4,T,D]
      %3 = reshape(%1) {shape = (dim(T), 4*D)} : t[T,4*D]
      return %2, %3
    }""",
    "joined": """graph g(%x: t[T,D], %y: t[T,5]) {
      %0 = concat(%x, %y) {dim = -1} : t[T,D+5]
      %1 = silu(%0) : t[T,D+5]
      return %1
    }""",
}
WIDTHS = {"aligned": 64, "odd": 37, "one": 1}


def group(kind: str, dtype: str, width: int, rows: str = "T") -> Op:
    """A group of `GROUPS` with concrete widths, over the rows of a step or a part of them."""
    width = max(width, 4) if kind == "route" else width
    text = GROUPS[kind].replace("4*D", str(4 * width)).replace("2*D", str(2 * width))
    text = text.replace("D+5", str(width + 5)).replace("t[", f"{dtype}[")
    text = text.replace("= D", f"= {width}").replace(", D)", f", {width})")
    for end in ("]", ","):
        text = text.replace(f"[D{end}", f"[{width}{end}").replace(f",D{end}", f",{width}{end}")
    for place in ("[{},", "[2,{},", "[4,{},", "i32[{}]", "dim({})"):
        text = text.replace(place.format("T"), place.format(rows))
    graph = parse_graph(text)
    return as_op(graph, kind)


def as_op(graph: Graph, kind: str) -> Op:
    inputs = (*graph.inputs, *graph.weights, *graph.states)
    outputs = (*graph.outputs, *graph.state_outputs)
    body = replace(graph, inputs=inputs, weights=(), states=(), outputs=outputs, state_outputs=())
    results = tuple(replace(v, name=f"%r{i}") for i, v in enumerate(outputs))
    return Op("fused", inputs, results, attrs_of({"kind": kind}), body)


def _entries(type_: TensorType, pages: tuple[int, int]) -> Any:
    shape, dtype = (*pages, *type_.concrete({})), type_.dtype
    if dtype.name == "f8e8m0":
        return np.ldexp(1.0, RNG.integers(-9, -5, shape)).astype(dtype.numpy)  # type: ignore[union-attr]
    return RNG.uniform(-2, 2, shape).astype(dtype.numpy)  # type: ignore[union-attr]


def random(type_: Type, env: dict[str, int], below: int = 7) -> Any:
    """Data of a type; integers from 0 to below."""
    if isinstance(type_, StateType):
        shape = (6, type_.page_size)
        return {name: _entries(t, shape) for name, t in type_.fields}
    shape, dtype = type_.concrete(env), type_.dtype
    if isinstance(dtype, Block):
        return quantize(RNG.uniform(-2, 2, shape).astype(np.float32), dtype)
    if dtype.name == "bool":
        return RNG.random(shape) > 0.5
    if not dtype.is_float:
        return RNG.integers(0, below, shape).astype(dtype.numpy)
    return RNG.uniform(-2, 2, shape).astype(dtype.numpy)


def run_group(
    op: Op, data: Sequence[Data], env: dict[str, int], device: str = "cpu"
) -> tuple[Data, ...]:
    """Results of a group by the emitter."""
    return run_kernel(KERNEL, op, data, installed().layouts, env=env, device=device)


def check_group(op: Op, data: Sequence[Data], env: dict[str, int], device: str = "cpu") -> None:
    """The emitter's results are those of the group's body: interpreted, or on a GPU."""
    if device == "cpu":
        found = interpreted(run_group, op, list(data), env)
    else:
        found = run_group(op, data, env, device)
    compare(KERNEL, op, found, run_reference(op, data, env))


def group_data(op: Op, tokens: int, below: int = 7) -> list[Any]:
    """Random operands of a group; integers from 0 to below, numbers of replicas from 1."""
    made = [random(v.type, {"T": tokens}, below) for v in op.operands]
    assert op.body is not None
    for inner in op.body.ops:
        if inner.name == "route":
            place = [v.name for v in op.body.inputs].index(inner.operands[2].name)
            most = inner.operands[1].tensor.shape[1].static
            made[place] = 1 + made[place] % most
    return made


def writing_group(
    kind: str, tokens: int, width: int, interleaved: bool, *, is_rounded: bool = False,
    inner: int = 0, weight: str = "bf16",
) -> tuple[Op, list[Any]]:  # fmt: skip
    """A group that turns queries and keys and writes keys and values; H = 5, G = 2.

    With ``inner`` it begins with the product that they are of, by a weight of a format.
    """
    norms = "qk_norm_rope_kv_write" in kind
    d, q, k, w = width, 5 * width, 7 * width, 9 * width
    held = parse_dtype("bf16") if not is_rounded else KV_FP8
    fields = [f for name in "kv" for f in entry_fields(name, tensor(BF16, 2, d), held)]
    state = str(StateType("pages", tuple(fields), page_size=16))
    turned = f"{{theta = 500.0, interleaved = {str(interleaved).lower()}}}"
    weights = f", %q: bf16[{d}], %k: bf16[{d}]" if norms else ""
    normed = f"""
      %6 = rms_norm(%3, %q) {{eps = 1e-5}} : bf16[T,5,{d}]
      %7 = rms_norm(%4, %k) {{eps = 1e-5}} : bf16[T,2,{d}]"""
    given = f"%a: bf16[T,{inner}], %w: {weight}[{w},{inner}]" if inner else f"%x: bf16[T,{w}]"
    product = f"%x = linear(%a, %w) : bf16[T,{w}]" if inner else ""
    graph = parse_graph(f"""graph g({given}{weights}, %p: i32[T], %slots: i32[T]) {{
      states {{ $kv: {state} }}
      {product}
      %0 = slice(%x) {{dim = -1, start = 0, stop = {q}}} : bf16[T,{q}]
      %1 = slice(%x) {{dim = -1, start = {q}, stop = {k}}} : bf16[T,{k - q}]
      %2 = slice(%x) {{dim = -1, start = {k}, stop = {w}}} : bf16[T,{w - k}]
      %3 = reshape(%0) {{shape = (dim(T), 5, {d})}} : bf16[T,5,{d}]
      %4 = reshape(%1) {{shape = (dim(T), 2, {d})}} : bf16[T,2,{d}]
      %5 = reshape(%2) {{shape = (dim(T), 2, {d})}} : bf16[T,2,{d}]{normed if norms else ""}
      %8 = rope({"%6" if norms else "%3"}, %p) {turned} : bf16[T,5,{d}]
      %9 = rope({"%7" if norms else "%4"}, %p) {turned} : bf16[T,2,{d}]
      %10 = kv_write($kv, %9, %5, %slots) : {state}
      return %8 states %10
    }}""")
    op = as_op(graph, kind)
    op = as_rules_pass_it(op)
    return op, writing_data(op, tokens)


def latent_group(
    tokens: int,
    *,
    interleaved: bool = True,
    is_rounded: bool = False,
    widths: tuple[int, int] = (32, 6),
) -> tuple[Op, list[Any]]:
    """A group that norms latents, turns keys and queries, and writes latents and keys; H = 3."""
    c, r = widths
    held = KV_FP8 if is_rounded else parse_dtype("bf16")
    fields = (*entry_fields("c", tensor(BF16, c), held), ("r", tensor(BF16, r)))
    state = str(StateType("pages", fields, page_size=16))
    turned = f"{{theta = 500.0, interleaved = {str(interleaved).lower()}}}"
    graph = parse_graph(f"""graph g(%c: bf16[T,{c}], %n: bf16[{c}], %r: bf16[T,1,{r}],
        %q: bf16[T,3,{r}], %p: i32[T], %slots: i32[T]) {{
      states {{ $kv: {state} }}
      %0 = rms_norm(%c, %n) {{eps = 1e-5}} : bf16[T,{c}]
      %1 = rope(%q, %p) {turned} : bf16[T,3,{r}]
      %2 = rope(%r, %p) {turned} : bf16[T,1,{r}]
      %3 = reshape(%2) {{shape = (dim(T), {r})}} : bf16[T,{r}]
      %4 = latent_write($kv, %0, %3, %slots) : {state}
      return %1 states %4
    }}""")
    op = as_rules_pass_it(as_op(graph, "norm_rope_latent_write"))
    return op, writing_data(op, tokens)


def as_rules_pass_it(op: Op) -> Op:
    """A group whose state comes before the slots."""
    last = len(op.operands) - 1
    order = [*range(last - 1), last, last - 1]
    inputs = tuple(op.operands[i] for i in order)
    assert op.body is not None
    return replace(op, operands=inputs, body=replace(op.body, inputs=inputs))


def writing_data(op: Op, tokens: int) -> list[Any]:
    """Random operands of a group whose last one holds slots, each once."""
    data = [random(v.type, {"T": tokens}, 300) for v in op.operands]
    data[-1] = RNG.permutation(96)[:tokens].astype(np.int32)
    return data
