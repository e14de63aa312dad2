"""The instruction gate: what Triton replaces in silence is told, and fails the check."""

import pytest
from scaled_products import launch

from metainfer.backends.triton.cross import Resources, faults_of, matrix_type, resources_of
from metainfer.hardware.load import load_machine

CARD = load_machine("8xpcie").device(0)


@pytest.mark.parametrize(
    ("right", "fault"),
    [
        pytest.param("e4m3", "", marks=pytest.mark.thorough),
        ("e2m1", "wanted a matrix instruction for block-scaled mxf8, got bf16 (mma."),
    ],
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
