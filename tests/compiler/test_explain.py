"""explain: what it says about plans of a tiny model, with kernels made for it and without."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hf_checkpoints import make_checkpoint
from typer.testing import CliRunner

import metainfer
from metainfer.cli.app import app
from metainfer.compiler.explain import calls_by_graph, explain, group_reports, summarize
from metainfer.ir.errors import MetainferError, PlanError
from metainfer.ir.plan import Plan

SMALL: dict[str, Any] = {"max_tokens": 32, "max_sequences": 2, "max_context": 96}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def plan(tiny: Path) -> Plan:
    return metainfer.compile(tiny, "cpu", **SMALL)


@pytest.fixture(scope="module")
def foreign(tiny: Path) -> Plan:
    """For a card on which rope and the gated activation have generic kernels only."""
    return metainfer.compile(tiny, "8xpcie", **SMALL)


def test_every_group_of_the_text_is_reported_once(plan: Plan) -> None:
    for phase in plan.phases:
        wanted = [
            (graph.name, op.results[0].name)
            for graph in plan.module(phase).graphs
            for op in graph.ops
            if op.choices
        ]
        assert [(g.graph, g.result) for g in group_reports(plan, phase)] == wanted


def test_blocks_are_reported_once_with_their_calls(plan: Plan) -> None:
    assert calls_by_graph(plan, "decode") == {"main": 1, "layer": 3}
    for group in group_reports(plan, "decode"):
        assert group.calls == {"main": 1, "layer": 3}[group.graph]


def test_the_sum_of_groups_is_the_predicted_step(plan: Plan) -> None:
    step = plan.meta["phases"]["decode"]["predicted"][0]
    assert step["sizes"]["T"] == 1
    groups = group_reports(plan, "decode")
    assert sum(g.calls for g in groups) == step["groups"]
    # P is what the phase is typically judged at in both.
    assert sum(g.seconds * g.calls for g in groups) == pytest.approx(step["seconds"], rel=1e-6)


def test_a_group_has_kernel_runner_up_and_refusals(plan: Plan) -> None:
    linear = next(g for g in group_reports(plan, "decode") if g.kind == "linear")
    assert linear.kernel.startswith(("cpu.", "torch."))
    assert linear.next_best
    assert linear.next_best != linear.kernel
    assert 0 < linear.roofline_seconds
    assert linear.op.startswith(f"{linear.result} = linear(")
    assert " loc(" not in linear.op
    assert "decoder.py" in linear.source
    refused = {name: r.reason for r in linear.refused for name in r.kernels}
    assert refused["cpu.linear_w4"].startswith("wanted operand 1 is u4/32:f16+f16, found ")
    # A kernel of another kind of device is refused for that alone.
    assert refused["cuda.linear_bf16"] == "wanted device is a gpu, found a cpu"


def test_fused_groups_name_their_parts(plan: Plan) -> None:
    fused = [g for g in group_reports(plan, "decode") if g.body]
    assert any(g.kind == "linear_add" and g.body == ("linear", "add") for g in fused)


def test_fused_groups_say_what_they_save(plan: Plan, foreign: Plan) -> None:
    for found in (plan, foreign):
        for phase in found.phases:
            groups = group_reports(found, phase)
            fused = [g for g in groups if g.num_operators > 1]
            assert fused
            for group in fused:
                assert group.saved_launches == group.num_operators - 1
                assert group.saved_bytes > 0
            assert not any(g.saved_bytes or g.saved_launches for g in groups if g not in fused)
    # One token, one sequence: the product is neither written nor read again.
    added = next(g for g in group_reports(plan, "decode") if g.kind == "linear_add")
    assert added.saved_bytes == 2 * 48 * 4


def test_experts_are_several_operators() -> None:
    sparse: Any = metainfer.compile("metainfer.models.qwen3_moe:tiny", "1xh200")
    group = next(g for g in group_reports(sparse, "decode") if g.kind == "experts_add_rms_norm")
    routed = ("gather", "gate", "up", "activation", "down", "top-k reduce")
    assert group.body == (*routed, "add", "rms_norm")
    # Sorting, gate and up, down, and the sum with the add and the norm behind it.
    assert group.saved_launches == len(routed) + 3 - 4
    # Four pairs: rows of 64 gathered, two products of 64, each written and read; then the sum, and
    # that with the residual, which is read for the norm.
    assert group.saved_bytes == 2 * (4 * (2 * 64 + 4 * 64) + 2 * 64 + 64)


def test_fallbacks_come_with_their_loss(foreign: Plan) -> None:
    generic = [g for g in group_reports(foreign, "decode") if g.generic]
    assert generic
    assert all(g.loss_seconds > 0 and "_plain" in g.kernel for g in generic)
    summary = summarize(foreign)
    decode = next(p for p in summary.phases if p.name == "decode")
    assert decode.fallbacks == sum(g.calls for g in generic)
    assert decode.fallback_seconds == pytest.approx(sum(g.loss_seconds for g in generic))


def test_a_forbidden_kernel_states_what_that_costs(tiny: Path, plan: Plan) -> None:
    best = next(g for g in group_reports(plan, "decode") if g.kind == "rms_norm")
    forced = metainfer.compile(tiny, "cpu", forbids=(best.kernel,), **SMALL)
    group = next(g for g in group_reports(forced, "decode") if g.kind == "rms_norm")
    assert group.kernel != best.kernel
    assert group.unforced == best.kernel
    assert group.forced_seconds == pytest.approx(group.seconds - best.seconds)
    assert group.forced_seconds > 0
    assert any(r.kernels == (best.kernel,) and r.reason == "--forbid" for r in group.refused)


def test_a_pin_that_is_no_worse_costs_nothing(tiny: Path, plan: Plan) -> None:
    best = next(g for g in group_reports(plan, "decode") if g.kind == "rms_norm")
    pinned = metainfer.compile(tiny, "cpu", pins=(("rms_norm", best.kernel),), **SMALL)
    group = next(g for g in group_reports(pinned, "decode") if g.kind == "rms_norm")
    assert (group.kernel, group.unforced, group.forced_seconds) == (best.kernel, "", 0.0)


def test_forbidding_a_fused_kernel_splits_and_says_what_is_lost(tiny: Path, plan: Plan) -> None:
    kernels = sorted(
        {g.kernel for p in plan.phases for g in group_reports(plan, p) if g.kind == "rope_kv_write"}
    )
    forced = metainfer.compile(tiny, "cpu", forbids=tuple(kernels), **SMALL)
    assert not [g for g in group_reports(forced, "decode") if g.kind == "rope_kv_write"]
    notes = explain(forced, "decode").notes
    split = next(n for n in notes if n.chosen == "split into its ops")
    assert split.severity == "repair"
    assert f"forced: {kernels[0]} would take " in split.reason


def test_filters(plan: Plan) -> None:
    found = explain(plan, "decode", "linear*")
    assert {g.phase for g in found.groups} == {"decode"}
    assert {g.kind for g in found.groups} <= {"linear", "linear_add"}
    assert explain(plan, group="main.*").groups
    with pytest.raises(PlanError, match=r"no group of the plan matches 'lineer'"):
        explain(plan, group="lineer")
    with pytest.raises(PlanError, match="has no phase 'warmup'"):
        explain(plan, "warmup")


def test_notes_hold_formats_with_reasons(plan: Plan) -> None:
    notes = {(n.place, n.chosen): n for n in explain(plan).notes}
    activations = notes["strategy", "f32"]
    assert activations.subjects == ("activations",)
    assert set(activations.phases) == set(plan.phases)
    assert activations.reason
    pages = next(n for n in notes.values() if n.chosen.startswith("page "))
    assert "kv" in pages.subjects[0]


def test_summary_agrees_with_the_plan(plan: Plan) -> None:
    summary = summarize(plan)
    assert (summary.plan_hash, summary.machine, summary.kind) == (plan.hash, "cpu", "causal_lm")
    assert summary.formats["activations"] == "f32"
    # Four linears of a layer (two of them merged), embedding and head.
    counts = sum(int(part.split(" x ")[0]) for part in summary.formats["weights"].split(", "))
    assert counts == 4 * 3 + 2
    assert asdict(summary) == summary.to_dict()


def test_printed_explanation(foreign: Plan, tmp_path: Path) -> None:
    foreign.save(tmp_path / "p")
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "p"), "--phase", "decode"])
    assert result.exit_code == 0
    out = result.stdout
    assert "layer, run 3 times a step" in out
    assert "decode: activations f32, judged at one token of one sequence" in out
    for label in ("takes    ", "next     ", "refused  ", "fallback "):
        assert label in out
    assert "wanted device is a cpu, found a gpu" in out
    assert "bytes saved   launches saved" in out
    assert "      saves    " in out
    assert "groups fell back to a generic kernel:" in out
    assert "kv pages" in out
    assert "because " in out
    assert all(len(line.rstrip()) <= 100 for line in out.splitlines())


def test_pins_are_checked_by_the_python_call_too(tiny: Path) -> None:
    with pytest.raises(MetainferError, match="that kernel implements add"):
        metainfer.compile(tiny, "cpu", pins=(("linear", "cpu.add"),), **SMALL)
