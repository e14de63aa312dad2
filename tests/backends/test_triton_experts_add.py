"""Experts to whose sum their last launch adds: beside the body, and in whole plans."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_samples import scalar
from triton_experts import Case, experts_op
from triton_worker import check_compiles, check_interpreted, check_on_gpu, refused

import metainfer
from metainfer.compiler.cost import work_of
from metainfer.ir.dims import dim
from metainfer.ir.graph import Graph, Op, Value, attrs_of
from metainfer.ir.interpret import Data
from metainfer.ir.ops.record import infer_types

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

CASES = {
    "one token": Case(1),
    "sorted, some left out": Case(19, routing="some"),
    "many": Case(300, routing="one", experts=3),
    "f16": Case(9, dtype="f16", format="f16"),
    "fp8 blocks": Case(9, format="f8e4m3/128x128:f32", width=256, inner=160, routing="some"),
    "mxfp4": Case(9, format="f4e2m1/32:f8e8m0", inner=96),
}


# What is done to the sum: shared (s), its gate (g), residual (r), a norm's weight (w).
AFTER = {
    "residual": (("add", "sum r"),),
    "shared": (("add", "sum s"), ("add", "0 r")),
    "gated": (("sigmoid", "g"), ("mul", "0 s"), ("add", "sum 1")),
    "gated and residual": (
        ("sigmoid", "g"), ("mul", "0 s"), ("add", "sum 1"), ("add", "2 r"),
    ),
    "residual and norm": (("add", "sum r"), ("rms_norm", "0 w")),
    "all and norm": (
        ("sigmoid", "g"), ("mul", "0 s"), ("add", "sum 1"), ("add", "2 r"), ("rms_norm", "3 w"),
    ),
    "norm as codes": (("add", "sum r"), ("rms_norm", "0 w"), ("quantize", "1")),
}  # fmt: skip


ATTRS: dict[str, dict[str, Any]] = {
    "rms_norm": {"eps": 1e-6}, "quantize": {"format": "f8e4m3/16:f32"},
}  # fmt: skip


def added(case: Case, after: str = "residual") -> tuple[Op, list[Data]]:
    """The group and its data; the gate is a column of something wider."""
    op, data = experts_op(case)
    whole, kind = op.result.tensor, scalar(case.dtype)
    values = {"sum": op.result, "g": Value("%g", whole.with_shape((whole.shape[0], dim(1))))}
    values.update((n, Value(f"%{n}", whole)) for n in "sr")
    values["w"] = Value("@w", whole.with_shape(whole.shape[1:]))
    ops, inputs = [op], dict[str, Value]()
    for number, (name, read) in enumerate(AFTER[after]):
        operands = tuple(values[n] for n in read.split())
        inputs.update((n, values[n]) for n in read.split() if n in "srgw")
        more = ATTRS.get(name, {})
        (type_,) = infer_types(name, [v.type for v in operands], more)
        values[str(number)] = Value(f"%then{number}", type_)
        ops.append(Op(name, operands, (values[str(number)],), attrs_of(more)))
    made = (ops[-1].result,)
    if "norm" in after:
        # The sum that is normed leaves too.
        made = (next(o.result for o in reversed(ops) if o.name == "add"), *made)
    body = Graph("body", (*op.operands, *inputs.values()), ops=tuple(ops), outputs=made)
    attrs = {"kind": kind_of(after), "activation": case.activation, "total": case.total}
    results = tuple(Value(f"%y{i}", v.type) for i, v in enumerate(made))
    group = Op("fused", body.inputs, results, attrs_of(attrs), body)
    rng = np.random.default_rng(9)
    wide = {n: rng.normal(size=(case.tokens, case.width)).astype(kind.numpy) for n in "srgw"}
    wide["g"], wide["w"] = wide["g"][:, 5:6], wide["w"][0]
    return group, [*data, *(wide[n] for n in inputs)]


def kind_of(after: str) -> str:
    last = "_quantize" if "codes" in after else ""
    return f"experts_add_rms_norm{last}" if "norm" in after else "experts_add"


def name_of(case: Case, after: str = "") -> str:
    form = {"f8": "e4m3", "f4": "e2m1"}.get(case.format[:2], case.format)
    return f"triton.{kind_of(after)}_{form}"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thorough) if n == "many" else n for n in CASES]
)
def test_the_residual_is_added(name: str) -> None:
    op, data = added(CASES[name])
    assert refused(name_of(CASES[name]), op) == []
    check_interpreted(name_of(CASES[name]), op, data)


@pytest.mark.parametrize("after", [a for a in AFTER if a != "residual"])
@pytest.mark.parametrize("name", ["one token", "sorted, some left out", "f16"])
def test_an_expert_of_all_tokens_is_added(name: str, after: str) -> None:
    op, data = added(CASES[name], after)
    gates = frozenset(i for i, v in enumerate(op.operands) if v.name == "%g")
    assert refused(name_of(CASES[name], after), op, gates) == []
    check_interpreted(name_of(CASES[name], after), op, data)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("name", CASES)
def test_sums_on_a_gpu(name: str, after: str) -> None:
    op, data = added(CASES[name], after)
    check_on_gpu(name_of(CASES[name], after), op, data)


@pytest.mark.parametrize("after", ["gated and residual", "all and norm", "norm as codes"])
def test_the_gated_group_compiles_for_cards_that_are_not_here(after: str) -> None:
    op, _ = added(CASES["many"], after)
    check_compiles(name_of(CASES["many"], after), op)


def test_rows_that_are_no_power_of_two_are_normed() -> None:
    case = Case(5, width=80, inner=32)
    op, data = added(case, "all and norm")
    check_interpreted(name_of(case, "all and norm"), op, data)


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


def kinds_of(model: str, hw: str, **options: Any) -> tuple[list[str], list[str]]:
    """Groups of a layer's MLP in prefill and in decode, views left out."""
    plan: Any = metainfer.compile(f"metainfer.models.{model}:tiny", hw, strict=True, **options)
    found = []
    for phase in plan.phases:
        ops = [o for o in plan.module(phase).graph("layer").ops if o.choices]
        kinds = [str(op.attr.get("kind", op.name)) for op in ops]
        found.append(kinds[kinds.index("attention") + 1 :])
    prefill, decode = found
    return prefill, decode


def test_a_sparse_layer_without_collectives_is_three_groups() -> None:
    prefill, decode = kinds_of("qwen3_moe", "1xh200")
    assert prefill[-3:] == ["linear", "route_experts", "experts_add_rms_norm"]
    # Few tokens are scored and sent in one launch.
    assert decode == [*prefill[:-3], "linear_route", "experts_add_rms_norm"]


def test_an_expert_of_all_tokens_leaves_no_launch_behind() -> None:
    shared = ["linear_silu_mul", "linear"]
    one = kinds_of("qwen2_moe", "1xh200", overlap=False)
    routed = ["linear_add", "rms_norm", "linear", "route_experts"]
    assert one == ([*routed, *shared, "experts_add_rms_norm"],) * 2
    two = kinds_of("qwen2_moe", "8xpcie", overlap=False, tp=2, ep=2)
    for kinds in two:
        assert kinds[-3:] == [shared[-1], "experts_add", "all_reduce_add_rms_norm"]
