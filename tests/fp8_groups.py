"""Products and roundings of fp8 activations, as ops and groups with data. Holds no tests."""

from dataclasses import replace
from typing import Any

import numpy as np
from triton_groups import as_op, random

from metainfer.ir.dtypes import BlockArray
from metainfer.ir.graph import Op, Value
from metainfer.ir.parser import parse_graph

GROUP, ROW = "f8e4m3/128:f32", "f8e4m3/row:f32"
WEIGHTS = ("f8e4m3/128x128:f32", "f8e4m3/row:f32", "f8e4m3/tensor:f32", "f8e4m3/128x128:f8e8m0")
TILES = ("m16", "thin", "m64", "m128", "half")


def _with_weight(op: Op) -> Op:
    operands = tuple(Value("@w", v.type) if v.name == "%w" else v for v in op.operands)
    return replace(op, operands=operands)


def product(x: str, weight: str, columns: int, inner: int, follows: str = "") -> Op:
    """A linear of codes; ``follows`` is "add" for the residual behind it."""
    head = f"%x: {x}[T,{inner}], %w: {weight}[{columns},{inner}]"
    made = f'%0 = linear(%x, %w) {{dtype = "bf16"}} : bf16[T,{columns}]'
    if not follows:
        return _with_weight(parse_graph(f"graph g({head}) {{ {made} return %0 }}").ops[0])
    graph = parse_graph(f"""graph g({head}, %r: bf16[T,{columns}]) {{
      {made}
      %1 = {follows}(%0, %r) : bf16[T,{columns}]
      return %1
    }}""")
    return _with_weight(as_op(graph, f"linear_{follows}"))


def gated(x: str, weight: str, columns: int, inner: int, rounded: str = "") -> Op:
    """Gate and up of codes, multiplied; rounded to a format if one is named."""
    tail, last = "", "%1"
    if rounded:
        tail = f'%2 = quantize(%1) {{format = "{rounded}"}} : {rounded}[T,{columns}]'
        last = "%2"
    graph = parse_graph(f"""graph g(%x: {x}[T,{inner}], %w: {weight}[{2 * columns},{inner}]) {{
      %0 = linear(%x, %w) {{dtype = "bf16"}} : bf16[T,{2 * columns}]
      %1 = silu_mul_halves(%0) : bf16[T,{columns}]
      {tail}
      return {last}
    }}""")
    return _with_weight(as_op(graph, "linear_silu_mul" + ("_quantize" if rounded else "")))


def rounding(format_: str, width: int, dtype: str = "bf16") -> Op:
    """A quantize alone."""
    return parse_graph(f"""graph g(%x: {dtype}[T,{width}]) {{
      %0 = quantize(%x) {{format = "{format_}"}} : {format_}[T,{width}]
      return %0
    }}""").ops[0]


ROUNDED_GROUPS = {
    "rms_norm_quantize": """graph g(%x: bf16[T,D], %w: bf16[D]) {
      %0 = rms_norm(%x, %w) {eps = 1e-5} : bf16[T,D]
      %1 = quantize(%0) {format = "F"} : F[T,D]
      return %1
    }""",
    "add_rms_norm_quantize": """graph g(%x: bf16[T,D], %r: bf16[T,D], %w: f32[D]) {
      %0 = add(%x, %r) : bf16[T,D]
      %1 = rms_norm(%0, %w) {eps = 1e-5} : bf16[T,D]
      %2 = quantize(%1) {format = "F"} : F[T,D]
      return %0, %2
    }""",
    "silu_mul_quantize": """graph g(%x: bf16[T,D], %y: bf16[T,D]) {
      %0 = silu_mul(%x, %y) : bf16[T,D]
      %1 = quantize(%0) {format = "F"} : F[T,D]
      return %1
    }""",
    "silu_mul_halves_quantize": """graph g(%x: bf16[T,WIDE]) {
      %0 = silu_mul_halves(%x) : bf16[T,D]
      %1 = quantize(%0) {format = "F"} : F[T,D]
      return %1
    }""",
}


def rounded_group(kind: str, format_: str, width: int) -> Op:
    """A group that ends in a quantize."""
    text = ROUNDED_GROUPS[kind].replace("WIDE", str(2 * width)).replace("F", format_)
    text = text.replace("T,D]", f"T,{width}]").replace("[D]", f"[{width}]")
    return as_op(parse_graph(text), kind)


def awkward_rows(tokens: int, width: int, seed: int = 3) -> np.ndarray:
    """Numbers of many sizes, a row of zeros, signed zeros, rows near the limits of the format."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    x *= np.exp2(rng.integers(-30, 30, (tokens, 1))).astype(np.float32)
    x[0] = 0.0
    x[-1, ::2] = -0.0
    x[1 % tokens, 0] = 448.0
    return x


def same_codes(found: Any, wanted: Any) -> float:
    """Fraction of equal codes; scales may differ in their last bits.

    Sums in another order move a norm by a rounding now and then, and with it a code; of a gated
    product they move both factors, and the largest magnitude by two steps of bf16.
    """
    assert isinstance(found, BlockArray)
    assert isinstance(wanted, BlockArray)
    np.testing.assert_allclose(found.scales, wanted.scales, rtol=2.0**-6, atol=1e-30)
    return float(np.mean(found.codes.view(np.uint8) == wanted.codes.view(np.uint8)))


def operands(op: Op, tokens: int) -> list[Any]:
    """Random operands."""
    return [random(v.type, {"T": tokens}) for v in op.operands]


def experts(x: str, tokens: int, width: int, inner: int, total: int = 4) -> tuple[Op, list[Any]]:
    """Experts of codes, with data; one token's second choice is no expert."""
    weight = WEIGHTS[0] if x == GROUP else ROW
    shapes = ((inner, width), (inner, width), (width, inner))
    stacks = [f"{weight}[{total},{a},{b}]" for a, b in shapes]
    graph = parse_graph(f"""graph g(%x: {x}[{tokens},{width}], %ids: i32[{tokens},2],
        %shares: f32[{tokens},2], @gate: {stacks[0]}, @up: {stacks[1]}, @down: {stacks[2]}) {{
      %0 = experts(%x, %ids, %shares, @gate, @up, @down) {{dtype = "bf16"}} : bf16[{tokens},{width}]
      return %0
    }}""")
    (op,) = graph.ops
    data = [random(v.type, {}, total) for v in op.operands]
    data[1][0, 1] = -1
    return op, data
