"""The tuner: what it measures, that it survives what it measures, and what follows from it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from tuning_watches import crashing, planted, steady

import metainfer
from metainfer.backends.registry import installed
from metainfer.compiler.explain import group_reports
from metainfer.compiler.tuning import tune as tune_module
from metainfer.compiler.tuning.choose import file_for
from metainfer.compiler.tuning.measure import Stopwatch
from metainfer.compiler.tuning.sample import step_of
from metainfer.compiler.tuning.tasks import met_in, targets_of, tasks_of
from metainfer.compiler.tuning.tune import Wanted, tune
from metainfer.compiler.tuning.tuned_file import read_sections, write_sections
from metainfer.compiler.tuning.worker import TaskFailed, Worker
from metainfer.hardware.load import load_machine
from metainfer.ir.errors import PlanError, TuningError
from metainfer.ir.plan import Plan
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.experts_config import ExpertsConfig
from metainfer.passes.candidates import kind_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A language model with experts, so that all kinds of operands are there."""
    config = DecoderConfig(
        hidden=32, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=64, vocab=64,
        max_positions=64, experts=ExpertsConfig(num=4, chosen=2, intermediate=32),
    )  # fmt: skip
    return metainfer.compile(
        decoder_spec("tiny", config, dtype="f32"), weights="int8", max_sequences=2, max_tokens=16
    )


class Rectified(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).exp()


@pytest.fixture(scope="module")
def small() -> Plan:
    return compiled()


def compiled(tuned: str = "") -> Plan:
    return metainfer.compile(
        Rectified(), example_inputs=(torch.randn(3, 16),), dynamic=(("B",),),
        bounds={"B": (1, 4)}, tuned=tuned,
    )  # fmt: skip


def test_every_candidate_of_a_plan_can_be_timed(plan: Plan) -> None:
    tasks = tasks_of(plan, installed())
    assert {"linear", "experts", "attention", "embedding", "rms_norm"} <= {t.kind for t in tasks}
    taken = {
        c.kernel for p in plan.phases for g in plan.module(p).graphs for o in g.ops
        for c in o.choices
    }  # fmt: skip
    assert taken <= {t.kernel for t in tasks}
    # What decides the step comes first: a tuner that is stopped has measured that.
    most = max(tasks, key=lambda t: t.share_us)
    assert tasks[0].group == most.group
    watch = Stopwatch(1)
    seen: set[tuple[str, str]] = set()
    for task in tasks:
        if (task.group, task.kernel) not in seen:
            seen.add((task.group, task.kernel))
            assert 0 < watch(task) < 1e6, task.kernel


def test_groups_that_were_split_and_parts_of_groups_are_met_too(plan: Plan) -> None:
    """What is not in the plan may be the cheaper one: guesses must not win over measurements."""
    split = metainfer.compile(
        nn.Sequential(nn.Linear(8, 8), nn.GELU()), example_inputs=(torch.randn(3, 8),)
    )
    ((target, module),) = targets_of(split, installed())
    assert [op.name for op in module.main.ops] == ["linear", "gelu"]
    assert [(kind_of(m.op), m.calls) for m in met_in(module, target)] == [
        ("linear", 1), ("gelu", 1), ("linear_gelu", 0),
    ]  # fmt: skip
    target, module = next(targets_of(plan, installed()))
    kinds = [(kind_of(m.op), bool(m.calls)) for m in met_in(module, target)]
    assert ("rope_kv_write", True) in kinds
    assert {("rope", False), ("kv_write", False)} <= set(kinds)


def test_a_sampled_step_is_one_that_an_engine_could_make() -> None:
    step = step_of({"T": 6, "B": 2, "P": 2, "R": 2}, 4)
    assert step["starts"].tolist() == [0, 3, 6]
    assert step["positions"].tolist() == [5, 6, 7, 5, 6, 7]
    assert step["pages"].tolist() == [[1, 2], [3, 4]]
    assert step["slots"].tolist() == [9, 10, 11, 17, 18, 19]
    assert step["lengths"].tolist() == [8, 8]
    assert len(np.unique(step["slots"])) == 6


def test_a_worker_outlives_what_it_measures() -> None:
    worker = Worker(crashing, limit_s=30.0)
    try:
        for task, said in (
            ("refuse", "the compiler refuses: at line 3"), ("raise", "ValueError: no such"),
            ("crash", "it ended the process by signal 6"),
        ):  # fmt: skip
            with pytest.raises(TaskFailed) as caught:
                worker.measure(task)
            assert str(caught.value) == said
            assert worker.measure("well") == 2.5
    finally:
        worker.close()


@pytest.mark.thorough
def test_a_worker_that_hangs_is_ended() -> None:
    worker = Worker(crashing, limit_s=5.0)
    try:
        with pytest.raises(TaskFailed, match="not done after 5 s"):
            worker.measure("hang")
        assert worker.measure("well") == 2.5
    finally:
        worker.close()


@pytest.fixture(scope="module")
def tuned(small: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in which torch's kernels ended the process and ours take 10 us."""
    path = tmp_path_factory.mktemp("tuned") / "cpu.tuned.json"
    found = tune(small, path, Wanted(group="exp"), make=planted)
    assert {(t.kernel, why) for t, why in found.failed} == {
        ("torch.exp", "it ended the process by signal 6")
    }
    assert (found.measured, found.known, found.left) == (4, 0, 0)
    return path


def test_a_crash_is_recorded_and_not_tried_again(small: Plan, tuned: Path) -> None:
    (section,) = read_sections(tuned)
    assert section.groups["exp(f32[T,16]) : f32[T,16]"] == {
        "cpu.exp": {"T=1": 10.0, "T=2": 10.0, "T=4": 10.0},
        "torch.exp": {"T=1": "failed: it ended the process by signal 6"},
    }
    again = tune(small, tuned, Wanted(group="exp"), make=planted)
    assert (again.measured, again.known, again.failed) == (0, 6, ())


def test_a_plan_follows_what_was_measured_and_says_so(tuned: Path) -> None:
    made = compiled(tuned=str(tuned))
    (exp,) = [g for g in group_reports(made, "call") if g.kind == "exp"]
    assert (exp.kernel, exp.basis) == ("cpu.exp", "measured here")
    assert exp.seconds == pytest.approx(10e-6)
    reasons = [r.reason for r in exp.refused if r.kernels == ("torch.exp",)]
    assert reasons == ["it failed when it was measured: it ended the process by signal 6"]
    assert made.meta["tuned"]["uncovered"] == [
        ["call", "torch.relu", "relu(f32[T,16]) : f32[T,16]"]
    ]
    assert made.meta["tuned"]["unhit"] == []
    predicted = made.meta["phases"]["call"]["predicted"]
    assert all(step["seconds"] > 10e-6 for step in predicted)


def test_measured_times_turn_a_choice_and_unhit_groups_are_told(
    small: Plan, tuned: Path, tmp_path: Path
) -> None:
    (section,) = read_sections(tuned)
    group = "exp(f32[T,16]) : f32[T,16]"
    section.groups[group] = {
        "cpu.exp": {"T=1": 1.0, "T=4": 900.0}, "torch.exp": {"T=1": 5.0, "T=4": 5.0},
    }  # fmt: skip
    section.groups["exp(f32[T,99]) : f32[T,99]"] = {"cpu.exp": {"T=1": 1.0}}
    path = tmp_path / "t.json"
    write_sections(path, [section])
    made = compiled(tuned=str(path))
    (exp,) = [op for op in made.module("call").main.ops if op.name == "exp"]
    assert [(c.kernel, c.limit) for c in exp.choices] == [("cpu.exp", 1), ("torch.exp", 0)]
    assert made.meta["tuned"]["unhit"] == ["exp(f32[T,99]) : f32[T,99]"]
    assert compiled().module("call") != made.module("call")


def test_figures_of_older_kernels_are_dropped_when_one_tunes_and_named_when_one_compiles(
    small: Plan, tuned: Path, tmp_path: Path
) -> None:
    (section,) = read_sections(tuned)
    section.sources["cpu"] = "another"
    path = tmp_path / "t.json"
    write_sections(path, [section])
    decisions = compiled(tuned=str(path)).meta["phases"]["call"]["decisions"]
    (line,) = [d for d in decisions if d["place"] == "tuned"]
    assert line["reason"].endswith("; kernels of cpu changed since: tune again")
    found = tune(small, path, Wanted(group="exp"), make=planted)
    assert (found.dropped, found.measured, found.known) == (3, 3, 3)


def test_no_group_of_that_name(small: Plan, tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="no group of the plan is to be measured") as caught:
        tune(small, tmp_path / "t.json", Wanted(group="attention"))
    assert "groups: exp, relu" in caught.value.advice
    assert not (tmp_path / "t.json").exists()


def test_a_group_that_is_begun_is_measured_whole(small: Plan, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    found = tune(small, path, Wanted(limit_s=1e-9), make=steady)
    (section,) = read_sections(path)
    ((_, kernels),) = section.groups.items()
    assert {len(sizes) for sizes in kernels.values()} == {3}
    assert found.left == len(found.tasks) - found.measured > 0


def test_another_gpu_than_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is called: its number of processors and its shared memory decide."""
    plan = metainfer.compile(
        Rectified(), load_machine("1xh200"), example_inputs=(torch.randn(3, 16),)
    )
    monkeypatch.setattr(tune_module, "check_machine", lambda machine: None)
    other = load_machine("8xpcie")
    monkeypatch.setattr(tune_module, "detect_machine", lambda kind, count: other)
    with pytest.raises(TuningError, match="the plan is for another GPU") as caught:
        tune(plan, tmp_path / "t.json")
    assert "processors: 156, the plan's device has 132" in caught.value.text
    assert caught.value.exit_code == 2


def test_the_file_beside_a_machine_is_taken_unasked(tmp_path: Path) -> None:
    machine = replace(load_machine("cpu"), path=str(tmp_path / "box.toml"))
    assert file_for("", machine) is None
    beside = tmp_path / "box.tuned.json"
    beside.write_text("{}")
    assert file_for("", machine) == beside
    assert file_for("none", machine) is None
    with pytest.raises(TuningError, match="the tuned file is damaged at schema"):
        metainfer.compile(Rectified(), machine, example_inputs=(torch.randn(3, 16),))


def test_a_machine_that_is_not_here(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    plan = metainfer.compile(
        Rectified(), load_machine("1xh200"), example_inputs=(torch.randn(3, 16),)
    )
    with pytest.raises(PlanError, match="here is no GPU"):
        tune(plan, tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()
