"""Gated products: each storage and tile beside the body, code for cards that are not here."""

import pytest
from triton_groups import as_op, random
from triton_worker import check_compiles, check_interpreted, refused

from metainfer.ir.graph import Op
from metainfer.ir.parser import parse_graph

KIND = "linear_silu_mul"
STORED = {
    "bf16": "plain", "f8e4m3/128x128:f32": "codes", "f8e4m3/row:f32": "codes",
    "f4e2m1/32:f8e8m0": "fp4", "u4/32:f16+f16": "int4", "i8/32:f16": "int8",
}  # fmt: skip
TILES = ("m16", "m64", "m128")


def gated(format_: str, columns: int, inner: int, bias: str = "") -> Op:
    op = as_op(
        parse_graph(f"""graph g(%x: bf16[T,{inner}], %w: {format_}[{2 * columns},{inner}]{bias}) {{
          %0 = linear(%x, %w{", %b" if bias else ""}) : bf16[T,{2 * columns}]
          %1 = silu_mul_halves(%0) : bf16[T,{columns}]
          return %1
        }}"""),
        KIND,
    )
    renamed = tuple(type(v)("@w", v.type) if v.name == "%w" else v for v in op.operands)
    return Op(op.name, renamed, op.results, op.attrs, op.body)


def name_of(format_: str, tile: str) -> str:
    return f"triton.{KIND}_{STORED[format_]}_{tile}"


@pytest.mark.parametrize("shape", [(16, 32, 128), (17, 37, 197), (1, 1, 32)], ids=str)
@pytest.mark.parametrize("format_", STORED)
def test_storages(format_: str, shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    op = gated(format_, columns, inner)
    name = name_of(format_, "m16")
    assert refused(name, op) == []
    check_interpreted(name, op, [random(v.type, {"T": rows}) for v in op.operands], {"T": rows})


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("format_", ["bf16", "f8e4m3/128x128:f32"])
def test_tiles(format_: str, tile: str) -> None:
    op = gated(format_, 70, 190)
    name = name_of(format_, tile)
    check_interpreted(name, op, [random(v.type, {"T": 130}) for v in op.operands], {"T": 130})


@pytest.mark.parametrize(
    ("format_", "tile"),
    [("bf16", "m16"), ("bf16", "m128"), ("f8e4m3/128x128:f32", "m64"), ("u4/32:f16+f16", "m16")],
)
def test_gated_products_compile_for_cards_that_are_not_here(format_: str, tile: str) -> None:
    check_compiles(name_of(format_, tile), gated(format_, 256, 576), {"T": 256})


def test_a_bias_is_refused() -> None:
    (found,) = refused(name_of("bf16", "m16"), gated("bf16", 8, 32, ", %b: bf16[16]"))
    assert "found a bias" in found
