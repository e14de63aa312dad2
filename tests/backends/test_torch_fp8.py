"""The library's product of codes by codes, which torch also has for CPUs."""

import pytest
from fp8_groups import GROUP, ROW, operands, product
from triton_worker import CARDS, compare

from metainfer.backends.kernel import Query
from metainfer.backends.registry import installed
from metainfer.backends.torch.check import run_kernel, run_reference
from metainfer.ir.graph import Op
from metainfer.ir.parser import parse_graph

NAME = "cuda.linear_fp8_rounded"


def refusals(op: Op) -> list[str]:
    return [str(r) for r in installed().kernels.get(NAME).refusals(Query(op, CARDS["1xh200"], {}))]


def run(op: Op, tokens: int) -> None:
    found = installed()
    kernel, data = found.kernels.get(NAME), operands(op, tokens)
    made = run_kernel(kernel, op, data, found.layouts, env={"T": tokens})
    compare(kernel, op, made, run_reference(op, data, {"T": tokens}))


@pytest.mark.parametrize("weight", ["f8e4m3/row:f32", "f8e4m3/tensor:f32"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_codes_by_codes(weight: str, tokens: int) -> None:
    op = product(ROW, weight, 48, 64)
    assert refusals(op) == []
    run(op, tokens)


def test_outputs_are_filled_up_and_a_bias_is_added() -> None:
    op = parse_graph(f"""graph g(%x: {ROW}[2,T,32], @w: {ROW}[40,32], @b: bf16[40]) {{
      %0 = linear(%x, @w, @b) {{dtype = "bf16"}} : bf16[2,T,40]
      return %0
    }}""").ops[0]
    (found,) = refusals(op)
    assert found == "wanted N % 16 == 0, found 40"
    run(op, 5)


def test_other_scales_and_widths_are_refused() -> None:
    assert "found f8e4m3/128:f32" in refusals(product(GROUP, ROW, 48, 128))[0]
    assert "found f8e4m3/128x128:f32" in refusals(product(ROW, "f8e4m3/128x128:f32", 48, 128))[0]
    assert refusals(product(ROW, ROW, 48, 40)) == ["wanted K % 16 == 0, found 40"]
