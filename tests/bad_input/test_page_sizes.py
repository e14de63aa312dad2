"""Field faults B02 and B05: page sizes that kernels refuse, and groups that agree on none."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import metainfer
from metainfer.backends.kernel import Constraint, Kernel, Query, Registry, page_size_in
from metainfer.backends.registry import installed
from metainfer.cli.app import app
from metainfer.compiler.attach import attach_checkpoint, header_without_weights
from metainfer.compiler.capture import capture_language_model
from metainfer.compiler.cost import CostModel
from metainfer.hardware import load_machine
from metainfer.ir.dtypes import F32
from metainfer.ir.graph import Module
from metainfer.ir.options import Options
from metainfer.ir.strategy import Strategy
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.passes.layout import layout
from metainfer.passes.target import Decision, Report, Target

WINDOWS = (0, 8, 16)  # one for each kind of layer


@pytest.fixture(scope="module")
def captured() -> Module:
    """Three kinds of layers, each with a paged state of its own."""
    config = DecoderConfig(
        hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=64,
        max_positions=512, windows=WINDOWS,
    )  # fmt: skip
    build = decoder_spec("three", config).build
    module = capture_language_model(
        "three", build, dtype=torch.float32, max_tokens=64, max_sequences=4, max_pages=32,
        kv_dtype="f32",
    ).module  # fmt: skip
    return attach_checkpoint(module, header_without_weights(module, F32), lambda name: 0)


def for_window(window: int) -> Constraint:
    def check(query: Query) -> str | None:
        found = query.op.attr.get("window", 0)
        return None if found == window else str(found)

    return Constraint(f"window is {window}", check)


def target_with(pages: Sequence[Sequence[int]]) -> Target:
    """Only kernels for one window each, each with its own page sizes, and the generic one."""
    kernels = Registry()
    for kernel in installed().kernels.all():
        if kernel.op != "attention" or kernel.generic:
            kernels.add(kernel)
    made = installed().kernels.get("cpu.attention_paged")
    others = tuple(c for c in made.requires if not c.text.startswith("page size"))
    for window, sizes in zip(WINDOWS, pages, strict=True):
        requires = (*others, for_window(window), page_size_in(1, *sizes))
        kernels.add(replace(made, name=f"test.window_{window}", requires=requires))
    assert any(isinstance(k, Kernel) and k.generic for k in kernels.candidates("attention"))
    strategy = Strategy("decode", typical=(("P", 32),))
    return Target(
        load_machine("cpu"), strategy, Options(), kernels, CostModel(installed().layouts), Report()
    )


def pages_of(module: Module) -> set[int]:
    return {s.state.page_size for g in module.graphs for s in g.states}


def page_decision(target: Target) -> Decision:
    return next(d for d in target.report.decisions if d.chosen.startswith("page "))


def test_the_page_is_raised_before_a_fast_kernel_is_given_up(captured: Module) -> None:
    target = target_with([(64, 128), (64,), (32, 64)])
    assert pages_of(layout(captured, target)) == {64}
    decision = page_decision(target)
    assert decision.severity == "repair"
    assert "raised from 16" in decision.reason


@pytest.mark.parametrize("size", [16, 64])
def test_a_page_size_that_kernels_take_is_no_fallback(damaged: Path, size: int) -> None:
    plan = metainfer.compile(damaged, "cpu", page_size=size)
    decisions = plan.meta["phases"]["decode"]["decisions"]
    (decision,) = [d for d in decisions if d["chosen"] == f"page {size}"]
    assert (decision["severity"], decision["reason"]) == ("info", "as asked for")


def test_a_page_size_that_the_fast_kernel_refuses_is_told(damaged: Path) -> None:
    """B02: asked for 24, the generic attention runs; the report says what that costs."""
    plan = metainfer.compile(damaged, "cpu", page_size=24)
    for phase in plan.phases:
        decisions = plan.meta["phases"][phase]["decisions"]
        (decision,) = [d for d in decisions if d["chosen"] == "page 24"]
        assert decision["severity"] == "fallback"
        assert "cpu.attention_paged wants page size in {1, 2, 4, 8, 16, 32" in decision["reason"]
        assert "page 16 costs least" in decision["reason"]
    tokens = plan.meta["capacity"]["page_size"] * (plan.meta["capacity"]["num_pages"] - 1)
    assert tokens >= plan.meta["capacity"]["max_context"]


def test_the_summary_counts_it(damaged: Path, tmp_path: Path) -> None:
    """A page size that gives a kernel up is a fallback, although no group has a generic kernel."""
    arguments = ["compile", str(damaged), "--page-size", "24", "--out", str(tmp_path / "p")]
    result = CliRunner().invoke(app, arguments)
    assert "decode: 1 fallbacks" in result.stdout
    explained = CliRunner().invoke(app, ["explain", str(tmp_path / "p")]).stdout
    assert "fallback of layout (prefill): " in " ".join(explained.split())


def test_strict_refuses_it(refused, damaged: Path, tmp_path: Path) -> None:
    found = refused(
        "compile", damaged, "--page-size", 24, "--strict", "--out", tmp_path / "p", code=3
    )
    assert "cpu.attention_paged wants page size" in found.text
    # Another made kernel runs the attention: no group has only a generic one.
    assert "falls back: 1 state in pages that a faster kernel refuses\n" in found.text
    assert "generic" not in found.text


@pytest.mark.parametrize("option", [("--page-size", -1), ("--page-size", 2**40)])
def test_page_sizes_that_make_no_sense(refused, damaged: Path, tmp_path: Path, option) -> None:
    refused("compile", damaged, *option, "--out", tmp_path / "p", code=2 if option[1] < 0 else 3)
