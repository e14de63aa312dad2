"""A group that does not pay as a whole is split into smaller groups, where those are cheaper."""

from typing import Any

import pytest
from pass_oracle import as_module, assert_same_numbers

from metainfer.backends.registry import installed
from metainfer.compiler.cost import CostModel
from metainfer.hardware import load_machine
from metainfer.ir.graph import Module, Op
from metainfer.ir.options import Options
from metainfer.ir.parser import parse_graph
from metainfer.ir.strategy import Strategy
from metainfer.passes import select
from metainfer.passes.candidates import kind_of
from metainfer.passes.pipeline import pass_named, run_passes
from metainfer.passes.target import Report, Target

WHOLE = "linear_silu_mul_quantize"
MLP = as_module(
    parse_graph("""graph g(%x: f8e4m3/128:f32[T,1024], @w: f8e4m3/128x128:f32[4096,1024]) {
      %0 = linear(%x, @w) {dtype = "bf16"} : bf16[T,4096]
      %1 = silu_mul_halves(%0) : bf16[T,2048]
      %2 = quantize(%1) {format = "f8e4m3/128:f32"} : f8e4m3/128:f32[T,2048]
      return %2
    }""")
)
KERNELS = [k.name for k in installed().kernels.all() if k.op == WHOLE]
GATED = [k.name for k in installed().kernels.all() if k.op == "linear_silu_mul"]


def compiled(phase: str = "prefill", **options: Any) -> tuple[Module, Report]:
    backends = installed()
    report = Report()
    target = Target(
        load_machine("1xh200"), Strategy(phase), Options(**options), backends.kernels,
        CostModel(backends.layouts), report,
    )  # fmt: skip
    passes = [pass_named(name) for name in ("fuse", "layout", "select")]
    return run_passes(MLP, target, passes)[0], report


def kinds(module: Module) -> list[str]:
    return [str(op.attr.get("kind", op.name)) for op in module.main.ops]


def test_the_whole_group_may_be_pinned() -> None:
    (name,) = [n for n in KERNELS if n.endswith("wide64")]
    module, _ = compiled(pins=((WHOLE, name),))
    assert kinds(module) == [WHOLE]


@pytest.mark.parametrize(
    ("forbidden", "wanted"),
    [
        (KERNELS, ["linear_silu_mul", "quantize"]),
        ([*KERNELS, *GATED], ["linear", "silu_mul_halves_quantize"]),
        ([*KERNELS, *GATED, "triton.silu_mul_halves_quantize"],
         ["linear", "silu_mul_halves", "quantize"]),
    ],
)  # fmt: skip
def test_smaller_groups_take_its_place(forbidden: list[str], wanted: list[str]) -> None:
    module, report = compiled(forbids=tuple(forbidden))
    assert kinds(module) == wanted
    assert all(op.choices for op in module.main.ops)
    (line,) = [d for d in report.decisions if d.subject == WHOLE]
    said = "split into its ops" if len(wanted) == 3 else f"split into {', '.join(wanted)}"
    assert (line.chosen, line.severity) == (said, "repair")
    assert_same_numbers(MLP, module, exact=True)


def test_parts_that_are_cheaper_are_a_choice_and_no_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = select._total

    def total(op: Op, *rest: Any) -> float | None:
        return 1.0 if kind_of(op) == WHOLE else priced(op, *rest)

    monkeypatch.setattr(select, "_total", total)
    module, report = compiled()
    assert WHOLE not in kinds(module)
    (line,) = [d for d in report.decisions if d.subject == WHOLE]
    assert line.severity == "info"
    assert "its parts save 9" in line.reason
