"""Experts with the residual added by their last launch: beside the body, and in a whole plan."""

from typing import Any

import numpy as np
import pytest
from torch_samples import scalar
from triton_experts import Case, experts_op
from triton_worker import check_compiles, check_interpreted, refused

import metainfer
from metainfer.compiler.cost import work_of
from metainfer.ir.graph import Graph, Op, Value, attrs_of
from metainfer.ir.interpret import Data

KIND = "experts_add"
CASES = {
    "one token": Case(1),
    "sorted, some left out": Case(19, routing="some"),
    "many": Case(300, routing="one", experts=3),
    "f16": Case(9, dtype="f16", format="f16"),
    "fp8 blocks": Case(9, format="f8e4m3/128x128:f32", width=256, inner=160, routing="some"),
    "mxfp4": Case(9, format="f4e2m1/32:f8e8m0", inner=96),
}


def added(case: Case) -> tuple[Op, list[Data]]:
    """The group and its data."""
    op, data = experts_op(case)
    residual = Value("%residual", op.result.type)
    result = Value("%sum", op.result.type)
    add = Op("add", (op.result, residual), (result,))
    body = Graph("body", (*op.operands, residual), ops=(op, add), outputs=(result,))
    attrs = {"kind": KIND, "activation": case.activation, "total": case.total}
    group = Op("fused", body.inputs, (Value("%y", result.type),), attrs_of(attrs), body)
    rng = np.random.default_rng(9)
    shape = (case.tokens, case.width)
    return group, [*data, rng.normal(size=shape).astype(scalar(case.dtype).numpy)]


def name_of(case: Case) -> str:
    form = {"f8": "e4m3", "f4": "e2m1"}.get(case.format[:2], case.format)
    return f"triton.{KIND}_{form}"


@pytest.mark.parametrize("name", CASES)
def test_the_residual_is_added(name: str) -> None:
    op, data = added(CASES[name])
    assert refused(name_of(CASES[name]), op) == []
    check_interpreted(name_of(CASES[name]), op, data)


@pytest.mark.parametrize("name", ["one token", "many", "mxfp4"])
def test_the_group_compiles_for_cards_that_are_not_here(name: str) -> None:
    op, _ = added(CASES[name])
    check_compiles(name_of(CASES[name]), op)


def test_the_group_moves_the_experts_that_are_chosen_and_no_more() -> None:
    op, _ = added(Case(1, choices=2, experts=64))
    assert op.body is not None
    flops, moved = work_of(op, {})
    alone = [work_of(o, {}) for o in op.body.ops]
    assert flops == sum(f for f, _ in alone)
    # The sum is neither written nor read.
    assert moved == sum(m for _, m in alone) - 2 * 64 * 2


def test_a_sparse_layer_without_collectives_is_three_groups() -> None:
    plan: Any = metainfer.compile("metainfer.models.qwen3_moe:tiny", "1xh200", strict=True)
    for phase in plan.phases:
        ops = plan.module(phase).graph("layer").ops
        kinds = [str(op.attr.get("kind", op.name)) for op in ops]
        assert kinds[-4:] == ["linear", "route_experts", "experts_add", "rms_norm"]
