"""Passes by hand: from a text and some names of passes to a module, without a model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from metainfer.backends.registry import installed
from metainfer.compiler.cost import CostModel
from metainfer.compiler.overrides import check_overrides
from metainfer.hardware.load import load_machine
from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Graph, Module, Value
from metainfer.ir.options import Options
from metainfer.ir.parser import parse_graph, parse_module
from metainfer.ir.strategy import PHASES, Strategy
from metainfer.ir.types import Symbol, TensorType
from metainfer.passes.pipeline import PIPELINE, pass_named, run_passes
from metainfer.passes.target import Decision, Report, Target

CASE_LINE = "# -----\n"
_HEADER = re.compile(r"(\w+): ([\w,]+)")
_BOUND = 512  # of sizes that a bare graph's text leaves open
_TYPICAL = (("B", 1), ("P", 32), ("R", 1))


@dataclass(frozen=True)
class Case:
    """A test case of passes: a header (``# pass: fuse   hw: cpu``), a text, what it becomes.

    Attributes:
        header: what the first line says: pass, hw, phase.
        before: the text with its header.
        after: what the passes make of it; "" if the file ends before that.
    """

    header: Mapping[str, str]
    before: str
    after: str


def read_case(text: str) -> Case:
    """Take a text apart; one that is no case has no header and no second half."""
    before, _, after = text.partition(CASE_LINE)
    first = before.split("\n", 1)[0]
    pairs = _HEADER.findall(first) if first.startswith("# pass:") else []
    return Case(dict(pairs), before, after)


def parse_text(text: str, origin: str) -> Module:
    """A module from its text, or a bare graph as the main of one.

    Raises: ParseError with line and column.
    """
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    if plain.lstrip().startswith("graph"):
        return _as_module(parse_graph(text, origin=origin))
    return parse_module(text, origin=origin)


def _as_module(graph: Graph) -> Module:
    values = {v for op in graph.ops for v in op.operands} | set(graph.definitions().values())
    has_step = any(v.name.startswith("step.") for v in values)
    names = {name for value in values for name in _symbols(value)}
    if has_step:
        names |= {"T", "B", "P", "R"}
    symbols = tuple(Symbol(name, 1, _BOUND) for name in sorted(names))
    return Module(graph.name, symbols, graphs=(replace(graph, name="main"),), has_step=has_step)


def _symbols(value: Value) -> set[str]:
    if not isinstance(value.type, TensorType):
        return set()
    return {s for size in value.type.shape for s in size.symbols()}


def run_by_hand(
    module: Module, names: Sequence[str], hw: str, phase: str, options: Options
) -> tuple[Module, list[Decision]]:
    """Run passes in the order given; the whole pipeline if none are.

    Args:
        module: where to begin.
        names: of passes.
        hw: a hardware file, or a known machine's name.
        phase: "prefill", "decode" or "call".
        options: formats, pins and forbids.

    Raises: MetainferError for an unknown pass or phase; what a pass or the verifier raises.
    """
    phases = (*PHASES, "call")
    if phase not in phases:
        raise MetainferError(f"unknown phase {phase!r}", advice=f"known: {', '.join(phases)}")
    chosen = [pass_named(name) for name in names] or list(PIPELINE)
    check_overrides(options, installed().kernels)
    asked = options.activations
    activations = {"auto": "f32", "fp8": "bf16"}.get(asked, asked)
    kv = options.kv_format(activations)
    typical = tuple(p for p in _TYPICAL if phase == "prefill" or p[0] == "P")
    strategy = Strategy(
        phase, activations=activations, fp8_activations=asked == "fp8", weights=options.weights,
        exact=options.exact, kv=kv,
        typical=() if phase == "call" else typical,
    )  # fmt: skip
    backends = installed()
    costs = CostModel(backends.layouts)
    report = Report()
    target = Target(load_machine(hw), strategy, options, backends.kernels, costs, report)
    result, _ = run_passes(module, target, chosen)
    return result, report.decisions
