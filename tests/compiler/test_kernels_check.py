"""Kernels of plans, compiled for cards that are not here and held against them."""

from dataclasses import replace
from pathlib import Path

import pytest
import triton

import metainfer
from metainfer.backends.kernel import Query
from metainfer.backends.registry import installed
from metainfer.backends.triton import cross
from metainfer.compiler.explain import group_reports
from metainfer.compiler.kernels import (
    check_launch,
    check_plan,
    planned_launches,
    sources_of,
    tuned_launches,
)
from metainfer.compiler.tuning.keys import device_key, key_of
from metainfer.compiler.tuning.tuned_file import Section
from metainfer.hardware.load import load_machine
from metainfer.ir.plan import Plan
from metainfer.ir.printer import print_module
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.experts_config import ExpertsConfig

XPCIE = load_machine("8xpcie").device(0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return metainfer.compile("smollm2", "8xpcie")


def test_every_kernel_of_a_plan_fits_its_card(plan: Plan) -> None:
    checked = check_plan(plan)
    names = {c.planned.kernel for c in checked}
    assert {"triton.rope_kv_write", "triton.rms_norm", "triton.linear_silu_mul_int4_few16"} <= names
    assert not [c.faults for c in checked if c.faults]
    for c in checked:
        assert c.resources is not None
        assert c.resources.shared_bytes <= c.limit_bytes == XPCIE.smem_per_block_bytes
        if c.planned.launch.matrix:
            assert "mma" in c.resources.matrix[0]


@pytest.fixture(scope="module")
def cut() -> Plan:
    """A plan whose prefill computes rows in two parts."""
    config = DecoderConfig(
        hidden=2048, layers=1, heads=16, kv_heads=4, head_dim=128, intermediate=4096, vocab=1000,
        max_positions=8192, experts=ExpertsConfig(num=16, chosen=2, intermediate=1024),
    )  # fmt: skip
    spec = decoder_spec("wide", config, dtype="bf16")
    return metainfer.compile(spec, "8xpcie", tp=4, micro_batches=2, max_tokens=4096)


def test_parts_of_the_rows_are_launched_as_the_parts_that_they_are(cut: Plan) -> None:
    # No operand of such a group tells the step's number of tokens.
    assert "//" in print_module(cut.module("prefill"))
    norms = [p for p in planned_launches(cut) if "rms_norm" in p.kernel and p.phase == "prefill"]
    rows = {p.launch.arguments["rows0"] for p in norms}
    # The last norm is of the 8 sequences' last tokens alone.
    assert rows == {2048, 8}


def test_groups_cut_into_parts_are_explained_with_what_they_hold(cut: Plan) -> None:
    assert "/0, " in print_module(cut.module("prefill"))
    (group,) = [g for g in group_reports(cut, "prefill") if g.kind == "route_experts"]
    assert {"softmax", "topk"} <= set(group.body)
    assert group.saved_launches > 0


def test_a_card_with_less_shared_memory_is_told_apart(plan: Plan) -> None:
    product = next(p for p in planned_launches(plan) if p.launch.matrix)
    assert check_launch(product, XPCIE).faults == ""
    small = replace(XPCIE, smem_per_block_bytes=4096)
    assert "of shared memory, 4,096 are there" in check_launch(product, small).faults
    unknown = replace(XPCIE, capability="sm_1")
    refused = check_launch(product, unknown)
    assert refused.resources is None
    assert "Triton does not compile for rtx_6000d (sm_1)" in refused.faults


def test_a_planted_wrong_expectation_fails(plan: Plan) -> None:
    product = next(p for p in planned_launches(plan) if p.launch.matrix == "bf16")
    planted = replace(product, launch=replace(product.launch, matrix="mxf8"))
    faults = check_launch(planted, XPCIE).faults
    assert faults.startswith("wanted a matrix instruction for block-scaled mxf8, got bf16 (mma.")


def test_tuned_entries_are_held_against_the_card_too(plan: Plan) -> None:
    """Another tile may be chosen by a tuned file than the one that the plan names."""
    ops = [op for graph in plan.module("decode").graphs for op in graph.ops if op.choices]
    group = next(op for op in ops if op.name == "linear")
    others = {"triton.linear_int4_m128", "triton.linear_int8_m128"}
    assert not others & {p.kernel for p in planned_launches(plan) if p.phase == "decode"}
    (other,) = [
        name for name in others
        if not replace(installed().kernels.get(name), fits=None).refusals(Query(group, XPCIE, {}))
    ]  # fmt: skip
    figures: dict[str, float | str] = {"T=1": 3.0, "T=8": "failed: it was slow"}
    section = Section(
        device_key(XPCIE), {}, groups={key_of(group).text: {other: figures, "cuda.linear_bf16": {}}}
    )
    added = list(tuned_launches(plan, [section]))
    assert {(p.kernel, p.size) for p in added} == {(other, "T=1")}
    assert not [c.faults for c in check_plan(plan, [section]) if c.faults]
    small = replace(XPCIE, smem_per_block_bytes=4096)
    assert "of shared memory, 4,096 are there" in check_launch(added[0], small).faults
    elsewhere = replace(section, device={**section.device, "processors": 1})
    assert not list(tuned_launches(plan, [elsewhere]))


def test_sources_are_those_that_run(plan: Plan) -> None:
    found = sources_of(plan)
    emitted = [text for name, text in found.items() if name.startswith("rms_norm_")]
    assert emitted
    assert "# %0 = rms_norm(%x0, %x1)" in emitted[0]
    assert "gemm_skinny.py" in found


@pytest.mark.skipif(not cross.figures_path().exists(), reason="none of this version of Triton")
def test_figures_of_the_package_are_those_of_its_templates(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make kernels-figures` writes them anew after the template of products changed."""
    product = next(p for p in planned_launches(plan) if "gemm" in p.launch.function.__name__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cross, "_FOUND", {})
    monkeypatch.setattr(cross, "_compiled", None)
    packaged = cross.resources_of(product.launch, XPCIE)  # nothing is left to compile with
    cross.write_figures(tmp_path)
    path = tmp_path / f"{triton.__version__}.json"
    (line,) = [text for text in path.read_text().splitlines() if ":" in text]
    assert f": [{packaged.shared_bytes}, {packaged.registers}, 0" in line
    assert line.rstrip(",") in cross.figures_path().read_text()
