"""Products by the template: each storage and tile in the interpreter, and for cards not here."""

from typing import Any

import pytest
from torch_samples import fused
from triton_groups import as_op, random
from triton_products import EPILOGUES, STORED, linear
from triton_worker import CARDS, check_compiles, check_interpreted, refused

from metainfer.backends.registry import installed
from metainfer.backends.torch.check import make_op
from metainfer.ir.dtypes import BF16
from metainfer.ir.graph import Op
from metainfer.ir.parser import parse_graph
from metainfer.ir.types import tensor

TILES = ("m16", "m64", "m128")
# tokens, columns, inner: aligned, odd, one.
SHAPES = ((16, 64, 128), (17, 37, 197), (1, 5, 32))


@pytest.mark.parametrize("format_", STORED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_storages(format_: str, shape: tuple[int, int, int]) -> None:
    op, data = linear(format_, shape)
    name = f"triton.linear_{STORED[format_]}_m16"
    assert refused(name, op) == []
    check_interpreted(name, op, data)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "format_", ["bf16", "f8e4m3/128x128:f32", "f4e2m1/16:f8e4m3*f32", "u4/128:f16+f16"]
)
def test_tiles(format_: str, tile: str) -> None:
    op, data = linear(format_, (130, 70, 190))
    name = f"triton.linear_{STORED[format_]}_{tile}"
    assert refused(name, op) == []
    check_interpreted(name, op, data)


def test_half_precision() -> None:
    op, data = linear("bf16", (9, 33, 70), "f16")
    check_interpreted("triton.linear_plain_m16", op, data)


@pytest.mark.parametrize(("kind", "bias", "follows", "attrs"), EPILOGUES, ids=str)
@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
def test_epilogues(
    kind: str, bias: bool, follows: str, attrs: dict[str, Any], lead: tuple[int, ...]
) -> None:
    op, data = fused(kind, lead, bias, follows, attrs, "bf16", (21, 40))
    name = f"triton.{kind}_plain_m16"
    assert refused(name, op) == []
    check_interpreted(name, op, data)


def test_bias_of_a_single_linear() -> None:
    types = [tensor(BF16, 2, 3, 40), tensor(BF16, 21, 40), tensor(BF16, 21)]
    op = make_op("linear", types, {}, [1, 2])
    check_interpreted("triton.linear_plain_m64", op, [random(t, {}) for t in types])


COMPILED = [("bf16", "m16"), ("f8e4m3/32x32:f32", "m64"), ("f4e2m1/16:f8e4m3*f32", "m128"),
            ("u4/128:f16+f16", "m64"), ("i8/32:f16", "m64")]  # fmt: skip


@pytest.mark.parametrize(("format_", "tile"), COMPILED)
def test_products_compile_for_cards_that_are_not_here(format_: str, tile: str) -> None:
    op, _ = linear(format_, (256, 576, 576))
    check_compiles(f"triton.linear_{STORED[format_]}_{tile}", op)


def test_small_tiles_cost_less_where_rows_are_few() -> None:
    kernels = installed().kernels
    few, _ = linear("bf16", (16, 4096, 4096))
    many, _ = linear("bf16", (4096, 4096, 4096))

    def efforts(op: Op) -> list[float]:
        found = [kernels.get(f"triton.linear_plain_{tile}").effort for tile in TILES]
        return [f(op, CARDS["1xh200"], {}) for f in found if f is not None]

    assert efforts(few) == sorted(efforts(few))
    assert efforts(few)[0] < 1.1 < 8 <= efforts(few)[2]
    assert max(efforts(many)) < 1.5


# --- refusals -------------------------------------------------------------------------------------


def test_refusals() -> None:
    op, _ = linear("f8e4m3/32:f32", (4, 8, 64))
    (found,) = refused("triton.linear_codes_m16", op)
    assert found == "wanted operand 1 is fp8 codes, found f8e4m3/32:f32"
    op, _ = linear("bf16", (4, 8, 64), "f32")
    assert "activations of f32" in refused("triton.linear_plain_m16", op)[0]
    wide, _ = linear("i4/96:f16", (4, 8, 192))
    assert refused("triton.linear_int4_m64", wide) != []


def test_what_follows_must_stay_in_its_place() -> None:

    graph = parse_graph("""graph g(%x: bf16[T,64], %w: bf16[32,64]) {
      %0 = linear(%x, %w) : bf16[T,32]
      %1 = softmax(%0) : bf16[T,32]
      return %1
    }""")
    (found,) = refused("triton.linear_silu_plain_m16", as_op(graph, "linear_silu"))
    assert "does not know softmax" in found
