"""`metainfer bench --ladder`: every lever of a plan switched on in turn, measured here."""

import json
from pathlib import Path

import pytest
import torch

from metainfer.cli.ladder import Setup, measured_by_ranks
from metainfer.cli.load import Load
from metainfer.compiler.ladder import compile_rung, is_same, rungs_of
from metainfer.compiler.verify import reference_spec
from metainfer.ir.plan import Plan

QUICK = ("--prompt-tokens", "8", "--new-tokens", "4", "--repeat", "1")


def test_the_ladder_climbs_from_plain_pytorch_to_the_plan(cli, plan: Path) -> None:
    made = Plan.read(plan)
    rungs = rungs_of(made)
    assert [r.lever for r in rungs] == [
        "plain", "fusion", "kernels", "formats", "graphs", "overlap"
    ]  # fmt: skip
    spec = reference_spec(made, None, None)
    first = compile_rung(made, spec, rungs[0]).module("decode")
    ops = [op for graph in first.graphs for op in graph.ops]
    assert not [op for op in ops if op.name == "fused"]
    assert {c.kernel.partition(".")[0] for op in ops for c in op.choices} <= {"torch", "cuda"}
    assert is_same(compile_rung(made, spec, rungs[-1]), made)


@pytest.mark.thorough
def test_what_each_lever_brings_is_printed(cli, plan: Path) -> None:
    result = cli("bench", plan, "--ladder", *QUICK)
    assert result.code == 0, result.err
    assert max(map(len, result.out.splitlines())) <= 100
    said = " ".join(result.out.split())
    assert "prefill/s a step brings in all decode/s" in said
    assert "graphs: does not apply: a CPU runs its bound programs as they are" in said
    assert "overlap: does not apply: one rank communicates with nobody" in said
    assert "formats: changes nothing in this plan" in said


def test_multiples_are_those_of_what_was_measured(
    cli, module_file: Path, module_plan: Path
) -> None:
    result = cli(
        "bench", module_plan, "--ladder", "--model", module_file, "--repeat", "1", "--json"
    )
    assert result.code == 0, result.err
    rungs = json.loads(result.out)["rungs"]
    measured = [r for r in rungs if r["measurements"]]
    assert [r["lever"] for r in measured[:1]] == ["plain"]
    base = measured[0]["measurements"][0]["per_second"]
    for rung in measured:
        (call,) = rung["measurements"]
        assert call["of_plain"] == pytest.approx(call["per_second"] / base)
    assert all(r["why_not"] for r in rungs if not r["measurements"])


def test_a_model_that_is_python_must_be_named(cli, module_plan: Path) -> None:
    result = cli("bench", module_plan, "--ladder")
    assert result.code == 2
    assert "--model" in result.err


def test_weights_that_are_not_there_end_it(
    cli, module_file: Path, module_plan: Path, tmp_path: Path
) -> None:
    result = cli(
        "bench", module_plan, "--ladder", "--model", module_file, "--weights", tmp_path / "none"
    )
    assert result.code == 2
    assert "none" in result.err


@pytest.mark.parametrize("arguments", [("tune",), ("bench", "--ladder")])
def test_no_gpu_where_the_plan_wants_one(
    cli, arguments: tuple[str, ...], module_file: Path, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    out = tmp_path / "gpu"
    assert cli("compile", module_file, "--hw", "1xh200", "--out", out).code == 0
    result = cli(arguments[0], out, *arguments[1:])
    assert result.code == 2
    assert "the plan is for 1xh200, here is no GPU" in result.err


@pytest.mark.thorough
def test_ranks_are_measured_in_processes_of_their_own(plan: Path) -> None:
    made = Plan.read(plan)
    setup = Setup(None, None, 1, 60.0, False, False)
    found = measured_by_ranks(made, False, Load(8, 4, 1), 1, setup)
    assert [m.phase for m in found] == ["prefill", "decode"]
    assert all(m.per_second > 0 for m in found)
