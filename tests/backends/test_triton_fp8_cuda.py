"""fp8 activations on a CUDA device: the numbers of the references."""

import numpy as np
import pytest
import torch
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
from triton_worker import CARDS, applies, check_on_gpu

from metainfer.backends.registry import installed
from metainfer.backends.torch.check import run_kernel, run_reference
from metainfer.ir.dtypes import BlockArray
from metainfer.ir.graph import Op
from metainfer.ir.interpret import Data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
BLOCKS = WEIGHTS[0]


def fits(name: str, op: Op) -> bool:
    return not applies(name, op, CARDS["1xh200"], {"T": (1, 512)})


def run(name: str, op: Op, data: list[Data], tokens: int) -> tuple[Data, ...]:
    found = installed()
    kernel = found.kernels.get(name)
    return run_kernel(kernel, op, data, found.layouts, env={"T": tokens}, device="cuda")


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("x", [GROUP, ROW])
@pytest.mark.parametrize("tile", TILES)
def test_products(tile: str, x: str, weight: str) -> None:
    name, op = f"triton.linear_fp8_{tile}", product(x, weight, 384, 1024)
    if not fits(name, op):
        pytest.skip("the tile is for other cards")
    for tokens in (1, 300):
        check_on_gpu(name, op, operands(op, tokens), {"T": tokens})


@pytest.mark.parametrize("columns", [48, 4096])
@pytest.mark.parametrize("weight", ["f8e4m3/row:f32", "f8e4m3/tensor:f32"])
def test_library_products(weight: str, columns: int) -> None:
    op = product(ROW, weight, columns, 1024)
    for tokens in (1, 300):
        check_on_gpu("cuda.linear_fp8_rounded", op, operands(op, tokens), {"T": tokens})


@pytest.mark.parametrize("columns", [48, 4096])
def test_library_products_of_blocks(columns: int) -> None:
    op = product(GROUP, BLOCKS, columns, 1024)
    for tokens in (1, 4, 300, 301):
        check_on_gpu("cuda.linear_fp8_blocks", op, operands(op, tokens), {"T": tokens})


@pytest.mark.parametrize(("tile", "rows"), [("few16", (1, 16)), ("few32", (17, 64))])
def test_products_of_few_rows_share_sums(tile: str, rows: tuple[int, ...]) -> None:
    for x, weight in ((GROUP, BLOCKS), (ROW, "f8e4m3/row:f32")):
        name, op = f"triton.linear_fp8_{tile}", product(x, weight, 2112, 4096)
        if not fits(name, op):
            pytest.skip("the tile is for other cards")
        for tokens in rows:
            check_on_gpu(name, op, operands(op, tokens), {"T": tokens})


@pytest.mark.parametrize("tile", TILES)
def test_products_with_the_residual(tile: str) -> None:
    name, op = f"triton.linear_add_fp8_{tile}", product(GROUP, BLOCKS, 4096, 2048, "add")
    if not fits(name, op):
        pytest.skip("the tile is for other cards")
    check_on_gpu(name, op, operands(op, 260), {"T": 260})


@pytest.mark.parametrize("tile", TILES)
def test_gated_products(tile: str) -> None:
    name, op = f"triton.linear_silu_mul_fp8_{tile}", gated(GROUP, BLOCKS, 640, 1024)
    if not fits(name, op):
        pytest.skip("the tile is for other cards")
    check_on_gpu(name, op, operands(op, 300), {"T": 300})


@pytest.mark.parametrize("tile", ["wide16", "wide64"])
def test_gated_products_that_are_rounded_in_registers(tile: str) -> None:
    name = f"triton.linear_silu_mul_quantize_fp8_{tile}"
    op = gated(GROUP, BLOCKS, 640, 1024, GROUP)
    if not fits(name, op):
        pytest.skip("the tile is for other cards")
    data = operands(op, 300)
    (found,) = run(name, op, data, 300)
    (wanted,) = run_reference(op, data, {"T": 300})
    assert same_codes(found, wanted) > 0.95


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("width", [37, 128, 576, 1536, 4096, 14336])
@pytest.mark.parametrize("format_", [GROUP, ROW])
def test_rounding_is_that_of_the_reference_bit_for_bit(
    format_: str, width: int, dtype: str
) -> None:
    if format_ == GROUP and width in (576,):
        pytest.skip("no whole groups")
    op = rounding(format_, width, dtype)
    x = awkward_rows(257, width).astype(op.operands[0].tensor.dtype.numpy)  # type: ignore[union-attr]
    (found,) = run("triton.quantize", op, [x], 257)
    (wanted,) = run_reference(op, [x], {"T": 257})
    assert isinstance(found, BlockArray)
    assert isinstance(wanted, BlockArray)
    np.testing.assert_array_equal(found.scales, wanted.scales)
    np.testing.assert_array_equal(found.codes.view(np.uint8), wanted.codes.view(np.uint8))


@pytest.mark.parametrize("width", [64, 384, 4096])
@pytest.mark.parametrize("format_", [GROUP, ROW])
@pytest.mark.parametrize("kind", ROUNDED_GROUPS)
def test_groups_that_end_rounded(kind: str, format_: str, width: int) -> None:
    op = rounded_group(kind, format_, width)
    for tokens in (1, 300):
        data = operands(op, tokens)
        found = run(f"triton.{kind}", op, data, tokens)
        wanted = run_reference(op, data, {"T": tokens})
        assert same_codes(found[-1], wanted[-1]) > 0.98


@pytest.mark.parametrize("tokens", [1, 16, 300, 2048])
@pytest.mark.parametrize(("x", "width", "inner"), [(GROUP, 1024, 384), (ROW, 208, 80)])
def test_experts(x: str, width: int, inner: int, tokens: int) -> None:
    op, data = experts(x, tokens, width, inner, 8)
    check_on_gpu("triton.experts_fp8", op, data)
