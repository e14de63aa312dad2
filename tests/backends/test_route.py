"""Slots of the experts that tokens chose: interpreted, for cards that are not here, on a GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from route_cases import CASES, Case, routed
from triton_groups import as_op, check_group
from triton_worker import check_compiles, check_interpreted, check_on_gpu

import metainfer
from metainfer.ir.dtypes import BF16
from metainfer.ir.graph import Op
from metainfer.ir.parser import parse_graph

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize("name", CASES)
def test_slots_interpreted(name: str) -> None:
    op, data = routed(CASES[name])
    check_interpreted("triton.route", op, data)


def test_slots_compile_for_cards_that_are_not_here() -> None:
    op, _ = routed(CASES["large"])
    check_compiles("triton.route", op)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_slots_on_a_gpu(name: str) -> None:
    op, data = routed(replace(CASES[name], tokens=CASES[name].tokens * 9))
    check_on_gpu("triton.route", op, data)


# --- in one launch with the router's scores -----------------------------------------------------

PLACED = """graph g(%x: bf16[T,128], %table: i32[128,5], %replicas: i32[128]) {
  %0 = cast(%x) {dtype = "f32"} : f32[T,128]
  %1 = softmax(%0) : f32[T,128]
  %2, %3 = topk(%1) {k = 8} : f32[T,8], i64[T,8]
  %4 = sum(%2) {dims = (1,), keep = true} : f32[T,1]
  %5 = div(%2, %4) : f32[T,8]
  %6 = route(%3, %table, %replicas) : i64[T,8]
  return %5, %6
}"""


def placed(tokens: int) -> tuple[Op, list[Any]]:
    """The group of 128 experts, eight chosen, and its data."""
    _, (_, table, replicas) = routed(Case(tokens, 8, 128, 5))
    x = np.random.default_rng(1).normal(size=(tokens, 128)).astype(BF16.numpy)
    x[0] = 0.0  # ties go to the lower expert
    return as_op(parse_graph(PLACED), "route_experts"), [x, table, replicas]


def check_placed(device: str, *sizes: int) -> None:
    for tokens in sizes:
        op, data = placed(tokens)
        check_group(op, data, {"T": tokens}, device)


def test_scores_and_slots_interpreted() -> None:
    check_placed("cpu", 1, 19)
    check_compiles("triton.route_experts", placed(1)[0], {"T": 19})


@pytest.mark.gpu
@needs_cuda
def test_scores_and_slots_on_a_gpu() -> None:
    check_placed("cuda", 1, 19, 1000)


# --- whole plans ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hw", [pytest.param("8xpcie", marks=pytest.mark.thorough), "2xcpu"])
def test_a_placed_plan_falls_back_nowhere(hw: str) -> None:
    options = {"strict": True, "tp": 2, "ep": 2, "replicas": 4}
    plan: Any = metainfer.compile("metainfer.models.qwen3_moe:tiny", hw, **options)
    for phase in plan.phases:
        ops = plan.module(phase).graph("layer").ops
        inner = [o.name for op in ops if op.body is not None for o in op.body.ops]
        own = [op.choices[0].kernel for op in ops if op.name == "route"]
        assert (inner.count("route"), own) == ((1, []) if hw == "8xpcie" else (0, ["cpu.route"]))
