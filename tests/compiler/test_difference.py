from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st

import metainfer
from metainfer.compiler.difference import Row, compare_plans, text_difference
from metainfer.ir.plan import Plan

SMALL: dict[str, Any] = {"max_tokens": 32, "max_sequences": 2, "max_context": 96}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def plan(tiny: Path) -> Plan:
    return metainfer.compile(tiny, "cpu", **SMALL)


@pytest.fixture(scope="module")
def other(tiny: Path) -> Plan:
    return metainfer.compile(tiny, "cpu", weights="int8", forbids=("cpu.rms_norm",), **SMALL)


def test_a_plan_does_not_differ_from_itself(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "p")
    read = Plan.read(tmp_path / "p")
    assert read.hash == plan.hash
    assert compare_plans(plan, read) == ()
    assert text_difference(plan, read) == ""


def test_what_was_asked_and_what_came_of_it(plan: Plan, other: Plan) -> None:
    rows = compare_plans(plan, other)
    named = {(r.section, r.name): r for r in rows}
    assert named["options", "weights"] == Row("options", "weights", "auto", "int8")
    assert "cpu.rms_norm" in named["options", "forbids"].second
    norm = named["kernels decode", "layer rms_norm"]
    assert norm.first == "cpu.rms_norm"
    assert "cpu.rms_norm" not in norm.second
    weights = named["capacity", "terms.weights.bytes"]
    assert int(weights.second) < int(weights.first)
    assert any(section == "predicted decode" for section, _ in named)
    assert ("machine", "name") not in named


def test_both_directions_name_the_same_things(plan: Plan, other: Plan) -> None:
    forth = {(r.section, r.name, r.first, r.second) for r in compare_plans(plan, other)}
    back = {(r.section, r.name, r.second, r.first) for r in compare_plans(other, plan)}
    assert forth == back


def test_another_machine(tiny: Path, plan: Plan) -> None:
    rows = compare_plans(plan, metainfer.compile(tiny, "8xpcie", **SMALL))
    named = {(r.section, r.name): r for r in rows}
    assert named["machine", "name"] == Row("machine", "name", "cpu", "8xpcie")
    assert named["kernels decode", "main embedding"].second == "triton.embedding"


def test_texts_are_compared_by_line(plan: Plan, other: Plan) -> None:
    text = text_difference(plan, other)
    assert text.startswith("--- a/stage0.prefill.mir\n+++ b/stage0.prefill.mir\n")
    removed = [line for line in text.splitlines() if line.startswith("-") and line[:3] != "---"]
    assert any("cpu.rms_norm" in line for line in removed)


def test_constants(plan: Plan) -> None:
    one = Plan(plan.meta, plan.texts, {"a": np.zeros(2), "b": np.zeros(2)})
    two = Plan(plan.meta, plan.texts, {"a": np.zeros(3), "c": np.zeros(2)})
    rows = compare_plans(one, two)
    assert [(r.name, r.first, r.second) for r in rows] == [
        ("a", "float64[2]", "float64[3]"),
        ("b", "float64[2]", "-"),
        ("c", "-", "float64[2]"),
    ]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in _leaves(v, (*path, k))]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in _leaves(v, (*path, i))]
    return [path]


def _changed(value: Any, path: tuple[Any, ...]) -> Any:
    if not path:
        return "changed"
    if isinstance(value, dict):
        return {k: _changed(v, path[1:]) if k == path[0] else v for k, v in value.items()}
    return [_changed(v, path[1:]) if i == path[0] else v for i, v in enumerate(value)]


@given(data=st.data())
def test_equal_exactly_if_the_hashes_are(plan: Plan, data: st.DataObject) -> None:
    """One leaf of what a plan states is changed: diff sees it if the hash does."""
    meta = {k: v for k, v in plan.meta.items() if k != "phases"}
    path = data.draw(st.sampled_from(_leaves(meta)))
    changed = Plan({**_changed(meta, path), "phases": plan.meta["phases"]}, plan.texts)
    assert (compare_plans(plan, changed) == ()) == (changed.hash == plan.hash)


def test_reasons_alone_show_as_other_figures(plan: Plan) -> None:
    phases = plan.meta["phases"]
    decision = dict(phases["decode"]["decisions"][-1])
    decision["reason"] = "tossed a coin"
    decode = {**phases["decode"], "decisions": [*phases["decode"]["decisions"][:-1], decision]}
    changed = Plan({**plan.meta, "phases": {**phases, "decode": decode}}, plan.texts)
    assert changed.hash != plan.hash
    assert [r.section for r in compare_plans(plan, changed)] == ["decisions decode"]
