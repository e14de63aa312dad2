"""METAINFER_VERIFY=2: every pass is interpreted before and after, on the model's tiny form."""

from dataclasses import replace
from pathlib import Path

import pytest
from hf_checkpoints import CASES, make_case

import metainfer
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Graph, Module
from metainfer.passes.pipeline import PIPELINE, run_passes
from metainfer.passes.target import Target


@pytest.fixture(autouse=True)
def verify_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAINFER_VERIFY", "2")


@pytest.mark.parametrize("name", ["llama_biases", "mistral_window", "qwen3_yarn_factor"])
def test_all_passes_keep_the_numbers(tmp_path: Path, name: str) -> None:
    assert name in CASES
    plan = metainfer.compile(make_case(name, tmp_path), "cpu")
    assert plan.phases == ("prefill", "decode")


def test_the_plan_is_that_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_case("qwen2", tmp_path)
    checked = metainfer.compile(path, "cpu")
    monkeypatch.delenv("METAINFER_VERIFY")
    assert metainfer.compile(path, "cpu").hash == checked.hash


def test_a_wrong_pass_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that takes residuals off instead of adding them verifies: only numbers show it."""

    def wrong(module: Module, target: Target) -> Module:
        return replace(module, graphs=tuple(_subtracting(g) for g in module.graphs))

    passes = tuple(replace(p, run=wrong) if p.name == "canonicalize" else p for p in PIPELINE)
    monkeypatch.setattr(run_passes, "__defaults__", (passes,))
    with pytest.raises(TypeMismatch, match="canonicalize changed output 0") as caught:
        metainfer.compile(make_case("llama", tmp_path), "cpu")
    assert "METAINFER_DUMP" in caught.value.advice
    # Without the check the same plan is written: the types are right.
    monkeypatch.setenv("METAINFER_VERIFY", "1")
    assert metainfer.compile(make_case("llama", tmp_path), "cpu").phases


def _subtracting(graph: Graph) -> Graph:
    ops = tuple(replace(op, name="sub") if op.name == "add" else op for op in graph.ops)
    return replace(graph, ops=ops)
