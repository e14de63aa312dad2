"""Every group that a rule forms and the emitter takes: its numbers are those of its body.

A new rule needs no new test: its name in ``GROUPS`` of the records is enough.
"""

import numpy as np
import pytest
from pass_oracle import as_module, target_for
from rule_instances import instances
from triton_groups import as_op, check_group, group_data
from triton_worker import CARDS, check_compiles

from metainfer.backends.triton.emit.tiles import WRITES
from metainfer.backends.triton.records_pointwise import GROUPS
from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Graph, Op
from metainfer.ir.parser import parse_graph
from metainfer.ir.rules import Rule
from metainfer.passes.rewrite import apply_rules, load_rules

RULES = [
    r for r in load_rules()
    if r.fused is not None and dict(r.fused.attrs)["kind"] in GROUPS
    and not any(op.name in WRITES for op in r.before.ops)
]  # fmt: skip


def groups_of(rule: Rule) -> list[Op]:
    """One group for each choice of element types that the rule allows."""
    return [group for graph in instances(rule, CARDS["8xpcie"], lambda _: True)
            if (group := _group(graph, rule)) is not None]  # fmt: skip


def _group(graph: Graph, rule: Rule) -> Op | None:
    try:
        after = apply_rules(as_module(graph), target_for("8xpcie", "prefill"), [rule], "test")
    except MetainferError:
        return None
    ops = after.main.ops
    return ops[0] if len(ops) == 1 and ops[0].name == "fused" else None


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_a_group_computes_its_body(rule: Rule) -> None:
    groups = groups_of(rule)
    assert groups, "no sizes and types make the group"
    for op in groups:
        for tokens in (1, 5):
            # Row numbers below 2: every size of an instance allows them.
            check_group(op, group_data(op, tokens, 2), {"T": tokens})


ROUTE = """graph g(%x: bf16[T,128]) {
  %0 = cast(%x) {dtype = "f32"} : f32[T,128]
  %1 = softmax(%0) : f32[T,128]
  %2, %3 = topk(%1) {k = 8} : f32[T,8], i64[T,8]
  %4 = sum(%2) {dims = (1,), keep = true} : f32[T,1]
  %5 = div(%2, %4) : f32[T,8]
  return %5, %3
}"""


def test_routing_of_128_experts() -> None:
    op = as_op(parse_graph(ROUTE), "route_experts")
    data = group_data(op, 19)
    data[0][3] = 0.0  # ties go to the lower expert
    data[0][4, 5:] = -np.inf
    check_group(op, data, {"T": 19})
    check_compiles("triton.route_experts", op, {"T": 19})
