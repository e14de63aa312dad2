"""Every rule file: a graph is made that it fits, rewritten, and run before and after.

A new rule needs no new test.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from pass_oracle import as_module, assert_same_numbers, example_for, sizes_of, target_for
from rule_instances import instances

from metainfer.ir.graph import Graph
from metainfer.ir.rules import Rule, parse_rule, print_rule
from metainfer.ir.verify import verify_module
from metainfer.passes.index import OpIndex
from metainfer.passes.match import find
from metainfer.passes.rewrite import RULES_FOLDER, apply_rules, load_rules
from metainfer.passes.target import Target

RULES = load_rules()


def target_of(rule: Rule) -> Target:
    """A target of the kind of device and the phase that a rule is for."""
    return target_for("8xpcie" if "gpu" in rule.needs else "cpu", rule.phase or "decode")


@cache
def fitting(rule: Rule) -> tuple[Graph, ...]:
    """Graphs that run and that the rule changes."""

    def accept(graph: Graph) -> bool:
        before = as_module(graph)
        if apply_rules(before, target_of(rule), [rule], "test") == before:
            return False
        try:
            # A mask that does not broadcast shows only when it is run.
            for env in sizes_of(before):
                example_for(before, env).run(before)
        except ValueError:
            return False
        return True

    return tuple(instances(rule, target_of(rule).device, accept))


def test_a_rule_file_is_named_after_its_rule() -> None:
    names = {path.stem for path in RULES_FOLDER.glob("*.rule")}
    assert names == {rule.name for rule in RULES}
    assert sum(rule.fused is not None for rule in RULES) >= 10


def test_every_rule_reads_back_from_its_print() -> None:
    for rule in RULES:
        assert parse_rule(print_rule(rule)) == rule


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_rule_keeps_numbers(rule: Rule) -> None:
    found = fitting(rule)
    assert found, "no sizes and types satisfy the rule"
    for graph in found:
        before = as_module(graph)
        verify_module(before)
        target = target_of(rule)
        after = apply_rules(before, target, [rule], "test")
        verify_module(after)
        # A group runs what it stands for: not a bit may change.
        assert_same_numbers(before, after, exact=rule.fused is not None)
        made = {str(op.attr["kind"]) for op in after.main.ops if op.name == "fused"}
        assert made == ({dict(rule.fused.attrs)["kind"]} if rule.fused else set())
        if rule.fused:
            assert len(after.main.ops) == 1
        (decision,) = [d for d in target.report.decisions if d.chosen == rule.name]
        numbers = dict(decision.data)
        assert numbers["count"] == 1
        assert numbers["bytes"] >= 0 or not rule.fused


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_rules_of_one_priority_do_not_compete(rule: Rule) -> None:
    for graph in fitting(rule):
        index = OpIndex(graph)
        own = find(rule, index, len(graph.ops) - 1, target_of(rule).device, {"T": (1, 512)})
        assert own is not None
        for other in RULES:
            if other.priority == rule.priority and other != rule:
                assert not _fits_anywhere(other, index, graph), f"{other.name} fits too"


def _fits_anywhere(rule: Rule, index: OpIndex, graph: Graph) -> bool:
    places = range(len(graph.ops))
    limits = {"T": (1, 512)}
    return any(
        find(rule, index, place, target_of(rule).device, limits) is not None
        for place in places
        if graph.ops[place].name == rule.before.ops[-1].name
    )


def test_a_rule_of_another_phase_or_device_rests() -> None:
    rule = next(r for r in RULES if r.name == "add_rms_norm")
    before = as_module(fitting(rule)[0])
    for resting in (replace(rule, phase="prefill"), replace(rule, needs=("gpu",))):
        assert apply_rules(before, target_for(), [resting], "test") == before
    for working in (replace(rule, phase="decode"), replace(rule, needs=("cpu", "torch"))):
        assert apply_rules(before, target_for(), [working], "test") != before


def test_rules_are_read_from_a_folder(tmp_path: Path) -> None:
    rule = RULES[0]
    (tmp_path / "one.rule").write_text(print_rule(rule))
    assert load_rules(tmp_path) == (rule,)
