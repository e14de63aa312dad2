"""Rewriting a graph by rules: highest priority first, then in program order, until none applies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from metainfer.ir.errors import MetainferError, TypeMismatch
from metainfer.ir.graph import Graph, Module, Op, Source, Value, attrs_of
from metainfer.ir.naming import canonical_names
from metainfer.ir.ops.record import infer_types
from metainfer.ir.patterns import PatternOp
from metainfer.ir.rules import Rule, parse_rule
from metainfer.ir.sharding import propagate
from metainfer.ir.step import step_value
from metainfer.passes.fold import MAKERS
from metainfer.passes.gains import Gain, gain_of_change, gain_of_group, sizes_text, typical_sizes
from metainfer.passes.index import OpIndex, overwritten
from metainfer.passes.match import Match, anchor_of, body_of, can_match, find, parameter_name
from metainfer.passes.prune import prune
from metainfer.passes.simplify import with_normal_attrs
from metainfer.passes.target import Decision, Target

RULES_FOLDER = Path(__file__).parent / "rules"
# More rounds than that mean that two rules undo each other.
_MOST_ROUNDS = 100
# Backends that run on any device; the others are named as features of the device.
_EVERYWHERE = frozenset(["torch"])


@cache
def load_rules(folder: Path = RULES_FOLDER) -> tuple[Rule, ...]:
    """All rules of a folder, by priority and then by name.

    Raises: ParseError naming file, line and column.
    """
    rules = [parse_rule(p.read_text(), str(p.name)) for p in sorted(folder.glob("*.rule"))]
    return tuple(sorted(rules, key=lambda rule: (-rule.priority, rule.name)))


def usable(rule: Rule, target: Target) -> bool:
    """Whether device and phase are those of a rule, and no policy forbids it.

    Raises: HardwareError if it needs a feature that nobody knows.
    """
    if rule.phase not in ("", target.strategy.phase):
        return False
    if not all(_has(need, target) for need in rule.needs):
        return False
    stances = target.machine.stances("rule", rule.name, target.strategy.phase)
    forbidden = next((s for s in stances if s.stance == "forbid"), None)
    if forbidden is not None:
        reason = f"the machine's policy forbids it: {forbidden.reason}"
        target.report.add(Decision("rules", rule.name, "not applied", reason))
    return forbidden is None


def _has(need: str, target: Target) -> bool:
    if need in ("cpu", "gpu"):
        return target.device.kind == need
    return need in _EVERYWHERE or target.device.has(need)


def apply_rules(module: Module, target: Target, rules: Sequence[Rule], place: str) -> Module:
    """Rewrite every graph of a module; each rule's gain goes to the report under ``place``."""
    chosen = [rule for rule in rules if usable(rule, target)]
    for graph in module.graphs:
        rewriter = _Rewriter(module, graph, target)
        made = rewriter.run(chosen)
        if rewriter.gains:
            module = prune(module, made)
            module = module.with_graph(canonical_names(module.graph(graph.name)))
            rewriter.report(place)
    return module


def rewritten(module: Module, graph: Graph, rules: Sequence[Rule], target: Target) -> Graph | None:
    """A graph rewritten by rules, names kept and nothing reported; None if none applies."""
    rewriter = _Rewriter(module, graph, target)
    made = rewriter.run(rules)
    return made if rewriter.gains else None


@dataclass
class _Applied:
    """How often a rule was applied, and what that saves."""

    count: int = 0
    gain: Gain = field(default_factory=lambda: Gain(0, 0))


class _Rewriter:
    """Rewrites one graph."""

    def __init__(self, module: Module, graph: Graph, target: Target) -> None:
        self._graph = graph
        self._target = target
        self._index = OpIndex(graph)
        self._limits = module.limits()
        self._env = typical_sizes(module, target)
        self.gains: dict[Rule, _Applied] = {}

    def run(self, rules: Sequence[Rule]) -> Graph:
        """Apply rules until none fits."""
        for _ in range(_MOST_ROUNDS):
            if not any(self._sweep(group) for group in _by_priority(rules)):
                return self._index.graph() if self.gains else self._graph
        names = ", ".join(sorted(rule.name for rule in self.gains))
        raise MetainferError(
            f"rules go round in circles in {self._graph.name}",
            advice=f"some of these undo each other: {names}",
        )

    def _sweep(self, rules: Sequence[Rule]) -> bool:
        """Try rules of one priority at each op, in program order."""
        by_anchor: dict[str, list[Rule]] = {}
        for rule in rules:
            if can_match(rule, self._index):
                by_anchor.setdefault(anchor_of(rule), []).append(rule)
        if not by_anchor:
            return False
        changed, place = False, 0
        while place < len(self._index.slots):
            op = self._index.slots[place]
            candidates = by_anchor.get(op.name, ()) if op is not None else ()
            changed |= any(self._try(rule, place) for rule in candidates)
            place += 1
        return changed

    def _try(self, rule: Rule, place: int) -> bool:
        if self._index.slots[place] is None:
            return False
        match = find(rule, self._index, place, self._target.device, self._limits)
        if match is None:
            return False
        replacement = _replacement(match, self._index)
        if replacement is None:
            return False
        window = _window(match, replacement, self._index)
        if window is None:
            return False
        gain = self._gain(match, replacement)
        start, ops, stop = window
        self._index.fill(start, ops, stop)
        for old, new in replacement.alias:
            self._index.replace_value(old, new)
        applied = self.gains.setdefault(rule, _Applied())
        applied.count += 1
        applied.gain += gain
        return True

    def _gain(self, match: Match, made: "_Replacement") -> Gain:
        matched = [self._index.at(place) for place in sorted(match.places)]
        if match.rule.fused is None:
            return gain_of_change(matched, made.ops, self._env)
        bound, pattern = match.bound, match.rule.before
        leaving = (*pattern.outputs, *pattern.state_outputs)
        returned = frozenset(bound.values[name].name for name in leaving)
        return gain_of_group(matched, returned, self._env)

    def report(self, place: str) -> None:
        """Add a decision for each rule that was applied."""
        sizes = sizes_text(self._env)
        for rule, applied in self.gains.items():
            gain = applied.gain
            data = (
                ("count", applied.count),
                ("bytes", gain.bytes),
                ("launches", gain.launches),
                ("us", round(gain.time_us(self._target), 3)),
            )
            reason = f"{rule.why}; {gain.text(self._target, sizes)}"
            subject = f"{self._graph.name}: {applied.count} times"
            self._target.report.add(Decision(place, subject, rule.name, reason, data=data))


def _by_priority(rules: Sequence[Rule]) -> Iterator[list[Rule]]:
    for priority in sorted({rule.priority for rule in rules}, reverse=True):
        yield [rule for rule in rules if rule.priority == priority]


# --- building what takes the place of a match ----------------------------------------------------


@dataclass(frozen=True)
class _Replacement:
    """Ops that take a match's place, and values that its results are the same as."""

    ops: tuple[Op, ...]
    alias: tuple[tuple[str, Value], ...] = ()


def _replacement(match: Match, index: OpIndex) -> _Replacement | None:
    """What ``after`` means here, None if its results would have other types."""
    rule, bound = match.rule, match.bound
    matched = [index.at(place) for place in match.places]
    source = max(zip(match.places, matched, strict=True), key=lambda pair: pair[0])[1].source
    if rule.fused is not None:
        return _Replacement((_fused(match, rule.fused, index, source),))
    values: dict[str, Value] = {p.name: bound.values[p.name] for p in rule.after.params}
    given = zip(
        (*rule.after.outputs, *rule.after.state_outputs),
        (*rule.before.outputs, *rule.before.state_outputs),
        strict=True,
    )
    wanted: dict[str, Value] = {}
    alias: list[tuple[str, Value]] = []
    pairs = [(after, bound.values[before]) for after, before in given]
    for after, before in pairs:
        if after not in values:
            wanted.setdefault(after, before)
    ops: list[Op] = []
    for pattern in rule.after.ops:
        op = _plain_op(match, pattern, values, wanted, index)
        if op is None:
            return None
        ops.append(replace(op, source=source))
    for after, before in pairs:
        made = values[after]
        if made.type != before.type:
            return None
        if made.name != before.name:
            alias.append((before.name, made))
    return _Replacement(tuple(ops), tuple(alias))


def _plain_op(
    match: Match,
    pattern: PatternOp,
    values: dict[str, Value],
    wanted: dict[str, Value],
    index: OpIndex,
) -> Op | None:
    operands = tuple(_operand(name, values) for name in pattern.operands)
    attrs = {name: match.bound.attr(value) for name, value in pattern.attrs}
    try:
        given = [v.type for v in operands]
        types = propagate(pattern.name, given, attrs, infer_types(pattern.name, given, attrs))
    except TypeMismatch:
        return None
    results: list[Value] = []
    for name, type_ in zip(pattern.results, types, strict=True):
        known = wanted.get(name)
        if known is not None and type_ != known.type:
            return None
        results.append(known or Value(index.fresh_name(), type_))
        values[name] = results[-1]
    return with_normal_attrs(Op(pattern.name, operands, tuple(results), attrs_of(attrs)))


def _operand(name: str, values: dict[str, Value]) -> Value:
    return step_value(name[5:]) if name.startswith("step.") else values[name]


def _fused(match: Match, pattern: PatternOp, index: OpIndex, source: Source | None) -> Op:
    """The group, with what it stands for as its body, parameters in the order of its operands."""
    bound, before = match.bound, match.rule.before
    body = body_of(match, index)
    params = {p.name: p for p in body.inputs}
    order = tuple(params[parameter_name(name)] for name in pattern.operands)
    operands = tuple(_operand(name, bound.values) for name in pattern.operands)
    results = tuple(bound.values[n] for n in (*before.outputs, *before.state_outputs))
    attrs = attrs_of({name: bound.attr(value) for name, value in pattern.attrs})
    body = canonical_names(replace(body, inputs=order))
    return Op("fused", operands, results, attrs, body=body, source=source)


# --- placing -------------------------------------------------------------------------------------


def _window(match: Match, made: _Replacement, index: OpIndex) -> tuple[int, list[Op], int] | None:
    """The ops from the first matched one to the last as they will be, and where they stand.

    What takes the match's place stands where its last op stood. Ops between that read its results
    move behind it. None if that cannot be: an op would need to stand both before and after.
    """
    # Constants may serve others: they stay, and go with the dead code if they do not.
    inside = {p for p in match.places if index.at(p).name not in MAKERS}
    start, stop = min(inside), max(inside) + 1
    before: list[Op] = []
    behind: list[Op] = []
    group = [index.at(place) for place in sorted(inside)]
    tainted: set[str] = set()
    read: set[str] = set()
    moved: set[str] = set()
    moved_reads: set[str] = set()
    for place in range(start, stop):
        op = index.slots[place]
        if op is None:
            continue
        names = {v.name for v in op.operands}
        writes = overwritten(op)
        if place in inside:
            if names & moved or writes & moved_reads:
                return None
            tainted |= {v.name for v in op.results}
            read |= names
            continue
        if names & (tainted | moved) or writes & (read | moved_reads):
            behind.append(op)
            moved |= {v.name for v in op.results}
            moved_reads |= names
            continue
        before.append(op)
    group_writes = {name for op in group for name in overwritten(op)}
    if moved_reads & group_writes:
        return None
    return start, [*before, *made.ops, *behind], stop
