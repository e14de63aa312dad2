"""The instruction gate: what Triton replaces in silence is told, and fails the check."""

from dataclasses import replace

import pytest
from scaled_products import launch

import metainfer
from metainfer.backends.registry import installed
from metainfer.backends.triton.cross import Resources, faults_of, matrix_type, resources_of
from metainfer.compiler.kernels import (
    Planned,
    check_launch,
    check_plan,
    planned_launches,
    tuned_launches,
)
from metainfer.compiler.tuning.keys import device_key, key_of
from metainfer.compiler.tuning.tuned_file import Section
from metainfer.hardware.load import load_machine
from metainfer.ir.plan import Plan
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig

CARD = load_machine("8xpcie").device(0)


@pytest.mark.parametrize(
    ("right", "fault"),
    [("e4m3", ""), ("e2m1", "wanted a matrix instruction for block-scaled mxf8, got bf16 (mma.")],
)
def test_fp8_by_fp4_is_replaced_by_bf16_in_silence_and_the_gate_says_so(
    right: str, fault: str
) -> None:
    """Units of the card multiply both; Triton does for equal codes alone."""
    made = launch("e4m3", right, "mxf8")
    found = faults_of(resources_of(made, CARD), made, CARD)
    assert [text[: len(fault)] for text in found] == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("instruction", "type_"),
    [
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "bf16"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "f8e4m3"),
        ("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3"
         ".e4m3.f32.ue8m0", "mxf8"),
        ("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1"
         ".e2m1.f32.ue8m0", "mxf4"),
        ("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1"
         ".e2m1.f32.ue4m3", "nvf4"),
        ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X", "mxf4"),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4", "f8e4m3"),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", "i8"),
    ],
)  # fmt: skip
def test_instructions_are_read(instruction: str, type_: str) -> None:
    assert matrix_type(instruction) == type_


def test_one_other_instruction_among_right_ones_is_a_fault() -> None:
    made = launch("e4m3", "e4m3", "f8e4m3")
    plain, wide = "mma.sync.m16n8k32.f32.e4m3.e4m3.f32", "mma.sync.m16n8k16.f32.f16.f16.f32"
    assert faults_of(Resources(0, 0, 0, (plain,)), made, CARD) == []
    (fault,) = faults_of(Resources(0, 0, 0, (plain, wide)), made, CARD)
    assert fault == f"wanted a matrix instruction for f8e4m3, got f16 ({wide})"
    (fault,) = faults_of(Resources(0, 0, 0, ()), made, CARD)
    assert fault == "wanted a matrix instruction for f8e4m3, got none"


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = DecoderConfig(
        hidden=576, layers=1, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=1024,
        max_positions=1024,
    )  # fmt: skip
    return metainfer.compile(decoder_spec("gate", config, dtype="bf16"), "8xpcie")


def test_a_planted_wrong_expectation_fails(plan: Plan) -> None:
    product = next(p for p in planned_launches(plan) if p.launch.matrix == "bf16")
    assert check_launch(product, CARD).faults == ""
    planted: Planned = replace(product, launch=replace(product.launch, matrix="mxf8"))
    faults = check_launch(planted, CARD).faults
    assert faults.startswith("wanted a matrix instruction for block-scaled mxf8, got bf16 (mma.")


def test_tuned_entries_are_held_against_the_card_too(plan: Plan) -> None:
    """Another tile may be chosen by a tuned file than the one that the plan names."""
    ops = [op for graph in plan.module("decode").graphs for op in graph.ops if op.choices]
    group = next(op for op in ops if op.name == "linear")
    chosen = {p.kernel for p in planned_launches(plan)}
    other = next(
        k.name for k in installed().kernels.candidates("linear")
        if k.name.startswith("triton.linear_plain") and k.name not in chosen
    )  # fmt: skip
    figures: dict[str, float | str] = {"T=1": 3.0, "T=8": "failed: it was slow"}
    section = Section(
        device_key(CARD), {}, groups={key_of(group).text: {other: figures, "cuda.linear_bf16": {}}}
    )
    added = list(tuned_launches(plan, [section]))
    assert {(p.kernel, p.size) for p in added} == {(other, "T=1")}
    checked = check_plan(plan, [section])
    assert other in {c.planned.kernel for c in checked}
    assert not [c.faults for c in checked if c.faults]
    elsewhere = replace(section, device={**section.device, "processors": 1})
    assert not list(tuned_launches(plan, [elsewhere]))
