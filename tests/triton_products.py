"""Products for the tests of Triton's templates. Holds no tests."""

from typing import Any

from triton_groups import as_op, random

from metainfer.backends.torch.check import make_op
from metainfer.ir.dtypes import parse_dtype
from metainfer.ir.graph import Op
from metainfer.ir.parser import parse_graph
from metainfer.ir.types import tensor

STORED = {
    "bf16": "plain",
    "f8e4m3/128x128:f32": "codes",
    "f8e4m3/128x128:f8e8m0": "codes",
    "f8e4m3/128:f32": "codes",
    "f8e4m3/row:f32": "codes",
    "f8e4m3/tensor:f32": "codes",
    "f8e4m3/32:f8e8m0": "codes",
    "f4e2m1/32:f8e8m0": "fp4",
    "f4e2m1/16:f8e4m3": "fp4",
    "f4e2m1/16:f8e4m3*f32": "fp4",
    "f4e2m1/64:f8e8m0": "fp4",
    "f8e4m3/32x32:f32": "blocks",
    "f8e4m3/32x32:f8e8m0": "blocks",
    "u4/32:f16+f16": "int4",
    "u4/128:f16+f16": "int4",
    "i4/32:f16": "int4",
    "i4/128:f16": "int4",
    "i8/32:f16": "int8",
    "u8/128:f16+f16": "int8",
}
EPILOGUES = [
    ("linear_add", False, "add", {}),
    ("linear_add", True, "add", {}),
    ("linear_relu", True, "relu", {}),
    ("linear_silu", False, "silu", {}),
    ("linear_gelu", True, "gelu", {"approximate": "tanh"}),
    ("linear_gelu", False, "gelu", {}),
]


def linear(format_: str, shape: tuple[int, int, int], dtype: str = "bf16") -> tuple[Op, list[Any]]:
    rows, columns, inner = shape
    x = tensor(parse_dtype(dtype), rows, inner)
    w = tensor(parse_dtype(dtype if format_ == "bf16" else format_), columns, inner)
    return make_op("linear", [x, w], {}, [1]), [random(x, {}), random(w, {})]


def gated(rows: int, columns: int, inner: int) -> tuple[Op, list[Any]]:
    """A product of gate and up, multiplied, and its operands."""
    graph = parse_graph(
        f"""graph g(%x: bf16[{rows},{inner}], %w: bf16[{2 * columns},{inner}]) {{
          %0 = linear(%x, %w) : bf16[{rows},{2 * columns}]
          %1 = silu_mul_halves(%0) : bf16[{rows},{columns}]
          return %1
        }}"""
    )
    return as_op(graph, "linear_silu_mul"), [random(v.tensor, {}) for v in graph.inputs]
