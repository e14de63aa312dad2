"""fp8 activations by Triton: interpreted beside the references, compiled with fp8 instructions."""

from dataclasses import replace

import numpy as np
import pytest
from fp8_groups import (
    GROUP,
    ROUNDED_GROUPS,
    ROW,
    TILES,
    WEIGHTS,
    awkward_rows,
    experts,
    gated,
    operands,
    product,
    rounded_group,
    rounding,
    same_codes,
)
from triton_worker import (
    CARDS,
    applies,
    check_compiles,
    check_interpreted,
    interpreted,
    refused,
    run_named,
)

from metainfer.backends.kernel import Query
from metainfer.backends.registry import installed
from metainfer.backends.torch.check import run_reference
from metainfer.backends.triton.cross import Resources, faults_of, resources_of
from metainfer.compiler.kernels import launches_of
from metainfer.ir.dtypes import BlockArray, parse_dtype
from metainfer.ir.graph import Op
from metainfer.ir.parser import parse_graph

BLOCKS = WEIGHTS[0]


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("x", [GROUP, ROW])
def test_products_of_codes(x: str, weight: str) -> None:
    # Of few16: one part; several, in two tiles of rows.
    for tile, shape in (
        ("m16", (17, 40, 256)),
        ("few16", (1, 128, 384)),
        ("few16", (19, 70, 2048)),
    ):
        op = product(x, weight, *shape[1:])
        assert refused("triton.linear_fp8_thin", op) == []
        check_interpreted(f"triton.linear_fp8_{tile}", op, operands(op, shape[0]), {"T": shape[0]})


def test_a_bias_is_added_before_the_product_is_rounded() -> None:
    op = parse_graph(f"""graph g(%x: {GROUP}[T,128], @w: {BLOCKS}[40,128], @b: bf16[40]) {{
      %0 = linear(%x, @w, @b) {{dtype = "bf16"}} : bf16[T,40]
      return %0
    }}""").ops[0]
    assert refused("triton.linear_fp8_m64", op) == []
    check_interpreted("triton.linear_fp8_m64", op, operands(op, 9), {"T": 9})


def test_rows_that_are_no_whole_steps() -> None:
    for tile, inner in (("m16", 200), ("few32", 1048)):
        op = product(ROW, "f8e4m3/row:f32", 40, inner)
        check_interpreted(f"triton.linear_fp8_{tile}", op, operands(op, 5), {"T": 5})


@pytest.mark.parametrize("tile", TILES)
def test_tiles(tile: str) -> None:
    op = product(GROUP, BLOCKS, 136, 256, "add")
    check_interpreted(f"triton.linear_add_fp8_{tile}", op, operands(op, 130), {"T": 130})


def test_scales_of_half_a_block_want_short_steps() -> None:
    """Blocks of 128 x 128 that ranks cut are 128 x 64."""
    op = product(GROUP, "f8e4m3/128x64:f32", 64, 192)
    check_interpreted("triton.linear_fp8_half", op, operands(op, 9), {"T": 9})
    (found,) = refused("triton.linear_fp8_m64", op)
    assert "f8e4m3/128x64:f32" in found


@pytest.mark.parametrize("tile", ["m16", "m128"])
def test_gated_products(tile: str) -> None:
    op = gated(GROUP, BLOCKS, 70, 256)
    check_interpreted(f"triton.linear_silu_mul_fp8_{tile}", op, operands(op, 19), {"T": 19})


@pytest.mark.parametrize("tile", ["wide16", "wide64"])
def test_gated_products_that_are_rounded_in_registers(tile: str) -> None:
    op, name = gated(GROUP, BLOCKS, 256, 256, GROUP), f"triton.linear_silu_mul_quantize_fp8_{tile}"
    data = operands(op, 19)
    (found,) = interpreted(run_named, name, op, data, {"T": 19})
    (wanted,) = run_reference(op, data, {"T": 19})
    assert same_codes(found, wanted) > 0.95


def test_groups_that_a_tile_cuts_are_refused() -> None:
    name = "triton.linear_silu_mul_quantize_fp8_wide64"
    assert "found f8e4m3/row:f32" in refused(name, gated(GROUP, BLOCKS, 256, 128, ROW))[0]
    assert "found 192 numbers a row" in refused(name, gated(GROUP, BLOCKS, 192, 128, GROUP))[0]
    assert "activations of bf16" in refused("triton.linear_fp8_m64", _plain_product())[0]


def _plain_product() -> Op:
    op = product(GROUP, BLOCKS, 128, 128)
    x = replace(op.operands[0], type=op.operands[0].tensor.with_dtype(parse_dtype("bf16")))
    return replace(op, operands=(x, *op.operands[1:]), attrs=())


@pytest.mark.parametrize(
    ("format_", "width"),
    [(GROUP, 37), (GROUP, 128), (GROUP, 1536), (GROUP, 4096), (ROW, 37), (ROW, 1536),
     ("f8e4m3/32:f32", 256)],
)  # fmt: skip
def test_rounding_is_that_of_the_reference_bit_for_bit(format_: str, width: int) -> None:
    op = rounding(format_, width, "f32")
    assert refused("triton.quantize", op) == []
    x = awkward_rows(7, width)
    (found,) = interpreted(run_named, "triton.quantize", op, [x], {"T": 7})
    (wanted,) = run_reference(op, [x], {"T": 7})
    assert isinstance(found, BlockArray)
    assert isinstance(wanted, BlockArray)
    np.testing.assert_array_equal(found.scales, wanted.scales)
    np.testing.assert_array_equal(found.codes.view(np.uint8), wanted.codes.view(np.uint8))


@pytest.mark.parametrize("format_", ["f8e4m3/32:f32", "i8/row:f32", "f8e4m3/row:f8e8m0"])
def test_other_roundings_are_refused(format_: str) -> None:
    (found,) = refused("triton.quantize", rounding(format_, 72))
    assert f"rounding of rows of 72 to {format_}" in found


@pytest.mark.parametrize("width", [64, 384, 2048])
@pytest.mark.parametrize("format_", [GROUP, ROW])
@pytest.mark.parametrize("kind", ROUNDED_GROUPS)
def test_groups_that_end_rounded(kind: str, format_: str, width: int) -> None:
    op = rounded_group(kind, format_, width)
    data = operands(op, 5)
    found = interpreted(run_named, f"triton.{kind}", op, data, {"T": 5})
    wanted = run_reference(op, data, {"T": 5})
    assert same_codes(found[-1], wanted[-1]) > 0.98
    for plain, exact in zip(found[:-1], wanted[:-1], strict=True):
        np.testing.assert_array_equal(np.asarray(plain), np.asarray(exact))


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("triton.linear_fp8_thin", product(GROUP, BLOCKS, 512, 1024)),
        ("triton.linear_add_fp8_m64", product(GROUP, BLOCKS, 512, 1024, "add")),
        ("triton.linear_fp8_m128", product(ROW, "f8e4m3/row:f32", 512, 1024)),
        ("triton.linear_silu_mul_fp8_m128", gated(GROUP, BLOCKS, 512, 1024)),
        ("triton.linear_silu_mul_quantize_fp8_wide64", gated(GROUP, BLOCKS, 512, 1024, GROUP)),
        ("triton.quantize", rounding(GROUP, 1536)),
        ("triton.add_rms_norm_quantize", rounded_group("add_rms_norm_quantize", GROUP, 4096)),
        ("triton.silu_mul_halves_quantize", rounded_group("silu_mul_halves_quantize", ROW, 2048)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_code_for_cards_that_are_not_here(name: str, op: Op) -> None:
    """Registers, shared memory, and for products the fp8 instruction itself."""
    check_compiles(name, op, {"T": 256})


@pytest.mark.parametrize("card", ["1xh200", "8xpcie"])
def test_few_rows_are_columns_of_the_fp8_product(card: str) -> None:
    op, limits = product(GROUP, BLOCKS, 512, 1024), {"T": (1, 16)}
    assert applies("triton.linear_fp8_m16", op, CARDS[card], limits) == []


def test_few_rows_are_no_rows_of_an_fp8_product_on_hopper() -> None:
    """Its matrix units take 64 rows of fp8: Triton would widen codes to f16."""
    op, limits = gated(GROUP, BLOCKS, 512, 1024, GROUP), {"T": (1, 16)}
    name = "triton.linear_silu_mul_quantize_fp8_wide16"
    assert applies(name, op, CARDS["8xpcie"], limits) == []
    (found,) = applies(name, op, CARDS["1xh200"], limits)
    assert found == "wanted matrix units that take 16 rows of fp8 codes, found 64 at least"
    (launch,) = launches_of(
        installed().kernels.get(name), op, CARDS["1xh200"], {"T": 16}, installed()
    )
    (fault,) = faults_of(resources_of(launch, CARDS["1xh200"]), launch, CARDS["1xh200"])
    assert fault.startswith("wanted a matrix instruction for f8e4m3, got f16 (mma.sync")


def test_cards_without_units_are_refused() -> None:
    card = CARDS["1xh200"]
    old = replace(card, features=card.features - {"fp8_mma"})
    for name, op in (
        ("triton.linear_fp8_m64", product(GROUP, BLOCKS, 128, 128)),
        ("triton.quantize", rounding(GROUP, 128)),
        ("triton.rms_norm_quantize", rounded_group("rms_norm_quantize", GROUP, 128)),
    ):
        refusals = installed().kernels.get(name).refusals(Query(op, old, {}))
        assert "feature fp8_mma" in [r.constraint for r in refusals]


def test_instructions_that_name_their_operands_by_width_count() -> None:
    """sm_100's fp8 instruction is kind::f8f6f4, that of f16 and bf16 is kind::f16."""
    card = CARDS["1xh200"]
    kernel, op = installed().kernels.get("triton.linear_fp8_m64"), product(GROUP, BLOCKS, 128, 128)
    (launch,) = launches_of(kernel, op, card, {"T": 64}, installed())
    name = "tcgen05.mma.cta_group::1.kind::"
    assert faults_of(Resources(0, 0, 0, (f"{name}f8f6f4",)), launch, card) == []
    (fault,) = faults_of(Resources(0, 0, 0, (f"{name}f16",)), launch, card)
    assert fault == f"wanted a matrix instruction for f8e4m3, got bf16 ({name}f16)"


@pytest.mark.parametrize(
    ("x", "width", "inner", "tokens"),
    [(GROUP, 256, 128, 3), (GROUP, 128, 128, 90), (ROW, 48, 80, 3), (ROW, 48, 80, 40)],
)
def test_experts_of_codes(x: str, width: int, inner: int, tokens: int) -> None:
    """Directly, sorted by expert in small tiles and in large ones."""
    op, data = experts(x, tokens, width, inner)
    assert refused("triton.experts_fp8", op) == []
    assert "found f8e4m3" in refused("triton.experts_e4m3", op)[0]
    check_interpreted("triton.experts_fp8", op, data)


@pytest.mark.parametrize(
    ("x", "tokens", "width", "inner"),
    [(GROUP, 2048, 512, 256), (ROW, 300, 208, 80)],
)
def test_code_of_experts_for_cards_that_are_not_here(
    x: str, tokens: int, width: int, inner: int
) -> None:
    """Rows of 208 go 16 at a time: fewer codes than an fp8 product takes."""
    op, _ = experts(x, tokens, width, inner, 8)
    check_compiles("triton.experts_fp8", op)
