"""The library's products of codes by codes; of scales of rows torch also has one for CPUs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fp8_groups import GROUP, ROW, WEIGHTS, operands, product
from triton_worker import CARDS, compare

from metainfer.backends.kernel import Query
from metainfer.backends.registry import installed
from metainfer.backends.torch import library_linear
from metainfer.backends.torch.check import make_call, run_kernel, run_reference
from metainfer.backends.torch.tensors import BlockTensors, to_numpy
from metainfer.ir.dtypes import BF16
from metainfer.ir.graph import Op
from metainfer.ir.parser import parse_graph

NAME = "cuda.linear_fp8_rounded"
BY_BLOCKS = "cuda.linear_fp8_blocks"


def refusals(op: Op, name: str = NAME) -> list[str]:
    return [str(r) for r in installed().kernels.get(name).refusals(Query(op, CARDS["1xh200"], {}))]


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


# --- scales of groups and of blocks ---------------------------------------------------------------


def by_blocks(
    x: torch.Tensor, w: torch.Tensor, left: torch.Tensor, right: torch.Tensor,
    *, out_dtype: torch.dtype, out: torch.Tensor,
) -> None:  # fmt: skip
    """What the library's product of scaled blocks takes, and does: here it is on GPUs only."""
    rows, groups = left.shape
    assert rows == x.shape[0] == out.shape[0]
    assert rows % 4 == 0
    assert groups * 128 == x.shape[1]
    assert left.stride() == (1, rows)
    assert right.t().is_contiguous()
    assert out.is_contiguous()
    wide = left.repeat_interleave(128, 1), right.repeat_interleave(128, 0)
    columns = wide[1].repeat_interleave(128, 1)[:, : w.shape[1]]
    out.copy_((x.float() * wide[0]) @ (w.float() * columns))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    product = SimpleNamespace(out=by_blocks)
    monkeypatch.setattr(library_linear, "aten", SimpleNamespace(_scaled_mm=product))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("tokens", [1, 3, 4, 9, 16])
def test_rows_are_filled_up_by_the_four(tokens: int) -> None:
    found = installed()
    kernel, op = found.kernels.get(BY_BLOCKS), product(GROUP, WEIGHTS[0], 272, 512)
    assert refusals(op, BY_BLOCKS) == []
    assert kernel.workspace is not None
    data, env = operands(op, tokens), {"T": tokens}
    wanted = run_reference(op, data, env)
    scratch = kernel.workspace(Query(op, CARDS["1xh200"], {"T": (1, tokens)}))
    call = make_call(op, data, found.layouts, kernel.layouts, env, workspace=scratch)
    kernel.binder.run(call)
    compare(kernel, op, [to_numpy(call.outputs[0], BF16)], wanted)
    # In a step what is behind a result may be written, and what is behind an operand is there.
    behind = torch.full((tokens + 3, 272), 7.0, dtype=torch.bfloat16)
    call = replace(
        call, inputs=(longer(call.inputs[0]), call.inputs[1]), outputs=(behind[:tokens],),
        rooms=(behind.numel() * behind.itemsize,),
    )  # fmt: skip
    kernel.binder.run(call)
    compare(kernel, op, [to_numpy(behind[:tokens], BF16)], wanted)
    whole = -(-tokens // 4) * 4
    assert (behind[whole:] == 7.0).all()


def longer(x: Any) -> BlockTensors:
    """Activations with three rows of codes behind them."""
    codes = torch.cat([x.codes.view(torch.uint8), torch.zeros(3, 512, dtype=torch.uint8)])
    return replace(x, codes=codes.view(x.codes.dtype)[: x.codes.shape[0]])


def test_blocks_that_the_library_does_not_take_are_refused() -> None:
    assert refusals(product(GROUP, WEIGHTS[0], 272, 640), BY_BLOCKS) == [
        "wanted K % 512 == 0, found 640"
    ]
    assert refusals(product(GROUP, WEIGHTS[0], 40, 512), BY_BLOCKS) == [
        "wanted N % 16 == 0, found 40"
    ]
    assert "found f8e4m3/row:f32" in refusals(product(GROUP, ROW, 48, 512), BY_BLOCKS)[0]


def test_blocks_want_hopper_and_a_library_that_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    op, kernel = product(GROUP, WEIGHTS[0], 272, 512), installed().kernels.get(BY_BLOCKS)
    (found,) = kernel.refusals(Query(op, CARDS["8xpcie"], {}))
    assert found.constraint == "feature wgmma"
    for version, refused in ((None, False), ("13.0", False), ("12.9", False), ("12.8", True)):
        monkeypatch.setattr(torch.version, "cuda", version)
        wanted = [f"wanted CUDA 12.9 or newer, if there is one here, found CUDA {version}"]
        assert refusals(op, BY_BLOCKS) == (wanted if refused else [])
