"""Covers of a group's ops by smaller groups: what is weighed where the whole group does not pay.

    %2 = fused[linear_silu_mul_quantize](%x, @w)

may be a linear and fused[silu_mul_halves_quantize], or fused[linear_silu_mul] and a quantize, or
three ops.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from metainfer.ir.graph import Graph, Module, Op
from metainfer.ir.step import is_step_field
from metainfer.ir.types import Symbol
from metainfer.passes.rewrite import load_rules, rewritten, usable
from metainfer.passes.target import Report, Target


def smaller_groups(
    op: Op, inlined: Sequence[Op], target: Target, limits: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[Op, ...]]:
    """The ops with each rule applied that takes some of them, but not all, as one group.

    Args:
        op: the group.
        inlined: the ops of its body, by the names of the graph that it stands in.
        target: the outside; nothing is reported.
        limits: bounds of the size symbols.
    """
    quiet = replace(target, report=Report())
    module = _module(op, inlined, limits)
    for rule in load_rules():
        if rule.fused is None or not 1 < len(rule.before.ops) < len(inlined):
            continue
        if usable(rule, quiet):
            made = rewritten(module, module.main, [rule], quiet)
            if made is not None:
                yield made.ops


def _module(op: Op, inlined: Sequence[Op], limits: Mapping[str, tuple[int, int]]) -> Module:
    values = {v.name: v for v in op.operands}.values()
    graph = Graph(
        "main",
        tuple(v for v in values if not v.is_weight and not v.is_state and not is_step_field(v)),
        tuple(v for v in values if v.is_weight),
        tuple(v for v in values if v.is_state),
        tuple(inlined),
        tuple(v for v in op.results if not v.is_state),
        tuple(v for v in op.results if v.is_state),
    )
    symbols = tuple(Symbol(name, low, high) for name, (low, high) in limits.items())
    return Module("part", symbols, graphs=(graph,), has_step=True)
