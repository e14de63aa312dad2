"""overlap: where it pays it hides communication, says so, and changes no number."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pass_oracle import assert_same_numbers, parse_any
from ranks import ManyRanks, OneRank, as_ranks, rank_target

from metainfer.backends.registry import installed
from metainfer.compiler.cost import CostModel
from metainfer.compiler.predict import predict_step
from metainfer.hardware import load_machine
from metainfer.ir.graph import Module
from metainfer.ir.options import Options
from metainfer.ir.parser import parse_module
from metainfer.ir.printer import print_module
from metainfer.ir.strategy import Strategy
from metainfer.ir.streams import num_streams
from metainfer.ir.types import Mesh, Symbol
from metainfer.ir.verify import verify_module
from metainfer.passes.collectives import collectives
from metainfer.passes.fuse import fuse
from metainfer.passes.layout import layout
from metainfer.passes.overlap import overlap
from metainfer.passes.select import select
from metainfer.passes.target import Report, Target

MLP = """
graph f(%x: bf16[T,WIDTH], @norm: bf16[WIDTH], @up: bf16[INNER,WIDTH], @down: bf16[WIDTH,INNER]) {
  %0 = rms_norm(%x, @norm) {eps = 1e-6} : bf16[T,WIDTH]
  %1 = linear(%0, @up) : bf16[T,INNER]
  %2 = silu(%1) : bf16[T,INNER]
  %3 = linear(%2, @down) : bf16[T,WIDTH]
  %4 = add(%3, %x) : bf16[T,WIDTH]
  return %4
}
"""
SHARED = """
graph f(%x: bf16[T,256], %ids: i64[T,4], %w: f32[T,4], @gate: bf16[64,96,256],
        @up: bf16[64,96,256], @down: bf16[64,256,96], @s: bf16[512,256], @t: bf16[256,512]) {
  %0 = experts(%x, %ids, %w, @gate, @up, @down) : bf16[T,256]
  %1 = linear(%x, @s) : bf16[T,512]
  %2 = silu(%1) : bf16[T,512]
  %3 = linear(%2, @t) : bf16[T,256]
  %4 = add(%0, %3) : bf16[T,256]
  return %4
}
"""


def sized(text: str, width: int = 4096, inner: int = 16384) -> str:
    return text.replace("WIDTH", str(width)).replace("INNER", str(inner))


def target_of(hw: str = "8xpcie", phase: str = "prefill", tp: int = 8, **options: Any) -> Target:
    machine, backends = load_machine(hw), installed()
    mesh = Mesh((("tp", tp),)) if tp > 1 else Mesh()
    strategy = Strategy(phase, mesh, activations="bf16", typical=(("B", 1), ("P", 4)))
    costs = CostModel(backends.layouts, machine, mesh)
    return Target(machine, strategy, Options(**options), backends.kernels, costs, Report())


def compiled(
    text: str, target: Target, most: int = 8192, *, fused: bool = False
) -> tuple[Module, Module]:
    """(serial, overlapped) programs of one rank."""
    module = replace(parse_any(text), symbols=(Symbol("T", 1, most),))
    module = fuse(module, target) if fused else module
    if target.strategy.mesh.axes:
        module = as_ranks(module, rank_target(target.strategy.mesh.axes))
    serial = collectives(select(layout(module, target), target), target)
    made = overlap(serial, target)
    verify_module(made)
    assert parse_module(print_module(made)) == made
    return serial, made


def predicted(module: Module, target: Target, tokens: int) -> dict[str, Any]:
    return predict_step(module, target.machine, installed(), {"T": tokens})


def test_prefill_over_pcie_hides_communication() -> None:
    target = target_of()
    serial, made = compiled(sized(MLP), target)
    before, after = predicted(serial, target, 8192), predicted(made, target, 8192)
    assert after["seconds"] < 0.85 * before["seconds"]
    # Nothing beats the busier of the two; all computation but that of the first part is hidden.
    # Parts meet more often, which costs a little in all.
    first_part = (before["seconds"] - before["meeting_seconds"]) / 4
    busy = before["meeting_seconds"], after["meeting_seconds"]
    assert busy[0] < after["seconds"] < busy[1] + 1.5 * first_part
    assert busy[1] < 1.1 * busy[0]
    assert before["hidden_seconds"] == 0
    (line,) = [d for d in target.report.decisions if d.place == "overlap main"]
    data = dict(line.data)
    assert data["seconds"] == pytest.approx(after["seconds"])
    assert data["serial_seconds"] == pytest.approx(before["seconds"])
    assert data["hidden_seconds"] == pytest.approx(after["hidden_seconds"])
    assert "in 4 parts" in line.chosen
    assert f"from {data['least_rows']} tokens on" in line.chosen
    assert "communication hidden" in line.reason
    path = [step["result"] for step in data["critical_path"]]
    assert path
    assert {s["name"] for s in data["streams"]} == {"main", "communication"}


def test_a_small_step_runs_whole() -> None:
    target = target_of()
    serial, made = compiled(sized(MLP), target)
    least = dict(target.report.decisions[-1].data)["least_rows"]
    assert 64 <= least <= 4096
    small, large = predicted(made, target, least - 1), predicted(made, target, least)
    whole = predicted(serial, target, least)
    # All rows are in the first part: groups of the others are not run.
    assert small["groups"] <= predicted(serial, target, least - 1)["groups"] + 1
    assert small["hidden_seconds"] < 0.1 * large["hidden_seconds"]
    assert large["groups"] > small["groups"]
    assert large["seconds"] < whole["seconds"]


@pytest.mark.parametrize(
    ("hw", "phase", "most"), [("8xpcie", "decode", 16), ("2xcpu", "prefill", 64)]
)
def test_where_it_does_not_pay_a_block_stays_as_it_is(hw: str, phase: str, most: int) -> None:
    text = sized(MLP, 256, 512) if hw == "8xpcie" else sized(MLP, 64, 128).replace("bf16", "f32")
    target = target_of(hw, phase, tp=2)
    serial, made = compiled(text, target, most)
    assert made == serial
    (line,) = [d for d in target.report.decisions if d.place == "overlap main"]
    assert line.chosen == "one stream"
    assert "less than 2% gained" in line.reason


def test_it_can_be_switched_off() -> None:
    target = target_of(overlap=False)
    serial, made = compiled(sized(MLP), target)
    assert made == serial
    assert not [d for d in target.report.decisions if d.place.startswith("overlap")]


@pytest.mark.parametrize("parts", [2, 3])
def test_forced_parts_compute_the_same(parts: int) -> None:
    text = sized(MLP, 32, 64).replace("bf16", "f32")
    target = target_of("2xcpu", tp=2, micro_batches=parts)
    _, made = compiled(text, target, 16)
    cut = [op for op in made.main.ops if op.name == "all_reduce"]
    assert [op.results[0].name.partition("/")[2] for op in cut] == [str(p) for p in range(parts)]
    # CPU kernels are given addresses once for all sizes: rows from elsewhere are copied for them.
    copies = [op for op in made.main.ops if op.name == "concat" and len(op.operands) == 1]
    assert len(copies) >= parts - 1
    module = parse_any(text)
    rng = np.random.default_rng(1)
    shapes = {w.name[1:]: w.tensor.concrete({}) for w in module.main.weights}
    weights = {n: rng.standard_normal(s).astype(np.float32) * 0.3 for n, s in shapes.items()}
    one = OneRank(module, weights.__getitem__, 1, 4)
    many = ManyRanks(made, weights.__getitem__, 1, 4)
    for rows in (1, 2, 5):
        x = rng.standard_normal((rows, 32)).astype(np.float32)
        (got,) = many.run([(x, {})])
        np.testing.assert_allclose(got, one.run(x, {}), atol=1e-4, rtol=1e-4)


def test_shared_experts_run_beside_routed_ones() -> None:
    target = target_of(phase="decode", tp=1)
    serial, made = compiled(SHARED, target, 16)
    assert num_streams(made.main.ops) == 3
    # A side stream is forked from the main one and joined by it.
    side = [op for op in made.main.ops if op.stream == 2]
    assert [op.name for op in side] == ["linear", "silu", "linear"]
    assert side[0].after == ("%x",)
    before, after = predicted(serial, target, 16), predicted(made, target, 16)
    assert after["seconds"] < before["seconds"]
    # Together they cannot be faster than the device moves and computes for both.
    assert after["seconds"] >= before["roofline_seconds"]


GATED = """
graph f(%x: bf16[T,256], %ids: i64[T,4], %w: f32[T,4], %g: bf16[T,1], %r: bf16[T,256],
        @gate: bf16[EXPERTS,96,256], @up: bf16[EXPERTS,96,256], @down: bf16[EXPERTS,256,96],
        @s: bf16[INNER,256], @t: bf16[256,INNER]) {
  %0 = experts(%x, %ids, %w, @gate, @up, @down) : bf16[T,256]
  %1 = linear(%x, @s) : bf16[T,INNER]
  %2 = silu(%1) : bf16[T,INNER]
  %3 = linear(%2, @t) : bf16[T,256]
  %4 = sigmoid(%g) : bf16[T,1]
  %5 = mul(%4, %3) : bf16[T,256]
  %6 = add(%0, %5) : bf16[T,256]
  %7 = add(%6, %r) : bf16[T,256]
  return %7
}
"""


def kinds(module: Module) -> list[str]:
    return [str(op.attr.get("kind", op.name)) for op in module.main.ops]


def test_an_expert_of_all_tokens_leaves_the_group_of_the_routed_ones() -> None:
    """Their last launch adds it, so it would run before them: apart it may run beside them."""
    target = target_of(phase="decode", tp=1)
    text = sized(GATED, inner=512).replace("EXPERTS", "64")
    serial, made = compiled(text, target, 16, fused=True)
    assert kinds(serial)[-1] == "experts_add"
    assert set(kinds(made)) == {"experts", "linear_silu", "linear", "pointwise"}
    assert {op.stream for op in made.main.ops if op.name == "experts"} == {0}
    assert 2 in {op.stream for op in made.main.ops}
    assert predicted(made, target, 16)["seconds"] < predicted(serial, target, 16)["seconds"]
    assert_same_numbers(serial, made, exact=True)
    # What is said of groups is said of those that are there.
    (line,) = [d for d in target.report.decisions if d.place == "overlap main"]
    assert "apart from the routed ones' sum" in line.chosen
    said = [d.subject.split()[0] for d in target.report.decisions if d.place == "select main"]
    assert sorted(said) == sorted(kinds(made))


def test_an_expert_of_all_tokens_stays_where_nothing_is_gained() -> None:
    target = target_of(tp=1)
    # A shared expert of almost no work: the pass that the group saves is worth more.
    text = sized(GATED, inner=16).replace("EXPERTS", "64")
    serial, made = compiled(text, target, fused=True)
    assert kinds(made)[-1] == "experts_add"
    assert predicted(made, target, 16)["seconds"] <= predicted(serial, target, 16)["seconds"]
