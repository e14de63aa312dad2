"""Kernels that may write a result where an operand lies give the numbers that they give apart."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fp8_groups import GROUP, WEIGHTS, operands, product
from torch_samples import fused
from triton_worker import CARDS, interpreted

from metainfer.backends.kernel import Query
from metainfer.backends.registry import installed
from metainfer.backends.torch.check import make_call
from metainfer.backends.torch.tensors import to_numpy
from metainfer.ir.dtypes import F32
from metainfer.ir.graph import Op
from metainfer.ir.interpret import Data

BY_TORCH = ("torch.linear_add_f32", "cuda.linear_add_f32", "cuda.linear_add_bf16")
BY_TRITON = (
    "triton.linear_add_plain_m16", "triton.linear_add_plain_few16", "triton.linear_add_fp8_m64",
)  # fmt: skip


ON_GPU = (
    "cuda.linear_add_bf16", "cuda.linear_add_f32",
    *(f"triton.linear_add_plain_{t}" for t in ("m16", "m64", "m128", "few16", "head16", "deep64")),
    *(f"triton.linear_add_fp8_{t}" for t in ("m16", "m64", "m128")),
)  # fmt: skip


def results(
    name: str, op: Op, data: Sequence[Data], env: dict[str, int], device: str = "cpu"
) -> list[Any]:
    """A kernel's result in memory of its own, and in that of the operand."""
    found = installed()
    kernel = found.kernels.get(name)
    scratch = 0
    if kernel.workspace is not None:
        limits = {k: (n, n) for k, n in env.items()}
        scratch = kernel.workspace(Query(op, CARDS["8xpcie"], limits))
    made = []
    for is_over in (False, True):
        call = make_call(op, data, found.layouts, kernel.layouts, env, device, scratch)
        if call.workspace is not None:
            call.workspace.zero_()  # counts of arrivals begin there
        # Another view of the same memory, as the executor makes it.
        over = call.inputs[kernel.in_place[0]].view(call.outputs[0].shape)
        call = replace(call, outputs=(over,)) if is_over else call
        kernel.binder.run(call)
        made.append(to_numpy(call.outputs[0].float(), F32))
    return made


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
@pytest.mark.parametrize("name", BY_TORCH)
def test_library_products(name: str, lead: tuple[int, ...]) -> None:
    op, data = fused("linear_add", lead, False, "add", {}, name.rpartition("_")[2])
    apart, over = results(name, op, data, {})
    np.testing.assert_array_equal(over, apart)


@pytest.mark.parametrize("name", BY_TRITON)
def test_templates(name: str) -> None:
    op, data = fused("linear_add", (37,), False, "add", {}, "bf16", (100, 256))
    if "fp8" in name:
        op = product(GROUP, WEIGHTS[0], 100, 256, "add")
        data = operands(op, 37)
    apart, over = interpreted(results, name, op, data, {"T": 37})
    np.testing.assert_array_equal(over, apart)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_device(name: str) -> None:
    for tokens, columns, inner in ((37, 104, 256), (300, 1000, 512)):
        dtype = "f32" if name.endswith("f32") else "bf16"
        op, data = fused("linear_add", (tokens,), False, "add", {}, dtype, (columns, inner))
        if "fp8" in name:
            op = product(GROUP, WEIGHTS[0], columns, inner, "add")
            data = operands(op, tokens)
        apart, over = results(name, op, data, {"T": tokens}, "cuda")
        np.testing.assert_array_equal(over, apart)


def test_what_may_be_overwritten_is_of_the_results_type() -> None:
    named = [k for k in installed().kernels.all() if k.in_place]
    assert {k.op for k in named} == {"linear_add"}
    assert all(dict(k.in_place) == {0: 2} for k in named)
