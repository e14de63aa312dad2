"""Finding a rule's ``before`` in a graph.

The search starts at the pattern's last op, walks to the ops that make its operands and on to those
that read what is bound already, and goes back where there was a choice: operands of commutative
ops in either order, several readers of one value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from metainfer.hardware.device import Device
from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.patterns import Pattern, PatternOp
from metainfer.ir.rules import Rule, evaluate_where
from metainfer.ir.where import names_of
from metainfer.passes.bind import Bindings
from metainfer.passes.canonicalize import COMMUTATIVE
from metainfer.passes.fold import MAKERS
from metainfer.passes.index import OpIndex

Limits = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Match:
    """A rule's ``before`` found in a graph.

    Attributes:
        rule: the rule.
        places: place of each op of the pattern, in the pattern's order.
        bound: what its variables stand for.
    """

    rule: Rule
    places: tuple[int, ...]
    bound: Bindings


@dataclass(frozen=True)
class _Step:
    """How the next op of a pattern is found: it makes, or reads, a value bound before."""

    op: int
    makes: str = ""
    reads: str = ""


@lru_cache(maxsize=1024)
def _plan(pattern: Pattern) -> tuple[_Step, ...]:
    """An order of the pattern's ops, from the last one on, in which each is found from another.

    Raises: ValueError if the pattern falls apart into unconnected pieces.
    """
    steps = [_Step(len(pattern.ops) - 1)]
    bound = {*pattern.ops[-1].operands, *pattern.ops[-1].results}
    left = list(range(len(pattern.ops) - 2, -1, -1))
    while left:
        step = _next_step(pattern, left, bound)
        steps.append(step)
        left.remove(step.op)
        bound |= {*pattern.ops[step.op].operands, *pattern.ops[step.op].results}
    return tuple(steps)


def _next_step(pattern: Pattern, left: Sequence[int], bound: set[str]) -> _Step:
    for number in left:
        makes = next((r for r in pattern.ops[number].results if r in bound), "")
        if makes:
            return _Step(number, makes=makes)
    for number in left:
        reads = next((o for o in pattern.ops[number].operands if o in bound), "")
        if reads:
            return _Step(number, reads=reads)
    raise ValueError(f"a pattern is in pieces: {pattern.ops[left[0]].name} hangs on nothing")


def anchor_of(rule: Rule) -> str:
    """Name of the op that the search for a rule starts at."""
    return rule.before.ops[-1].name


def can_match(rule: Rule, index: OpIndex) -> bool:
    """Whether the graph has ops of all the names in the pattern."""
    return all(index.has(op.name) for op in rule.before.ops)


def find(rule: Rule, index: OpIndex, place: int, device: Device, limits: Limits) -> Match | None:
    """Match a rule so that its last op is the one at a place, None if it does not fit there."""
    pattern = rule.before
    steps = _plan(pattern)
    for bound, places in _search(pattern, steps, index, place):
        if not _params_fit(pattern, bound) or not bound.settle():
            continue
        ordered = tuple(places[number] for number in range(len(pattern.ops)))
        if not _is_closed(pattern, bound, ordered, index):
            continue
        if evaluate_where(rule.where, _environment(rule, bound, device, limits)):
            return Match(rule, ordered, bound)
    return None


def _search(
    pattern: Pattern, steps: Sequence[_Step], index: OpIndex, place: int
) -> Iterator[tuple[Bindings, dict[int, int]]]:
    """All ways to place the pattern's ops, the last one at ``place``."""
    stack: list[tuple[int, int, Bindings, dict[int, int]]] = [(0, place, Bindings(), {})]
    while stack:
        depth, at, bound, places = stack.pop()
        pattern_op = pattern.ops[steps[depth].op]
        for found in _bind_op(pattern_op, index.at(at), bound):
            taken = {**places, steps[depth].op: at}
            if depth + 1 == len(steps):
                yield found, taken
                continue
            following = _candidates(pattern, steps[depth + 1], found, index)
            # The first candidate is tried first: the stack turns the order round.
            stack += [
                (depth + 1, c, found, taken) for c in reversed(following) if c not in taken.values()
            ]


def _candidates(pattern: Pattern, step: _Step, bound: Bindings, index: OpIndex) -> list[int]:
    name = pattern.ops[step.op].name
    if step.makes:
        place = index.maker(bound.values[step.makes].name)
        places = [] if place is None else [place]
    else:
        places = index.readers(bound.values[step.reads].name)
    return [p for p in places if index.at(p).name == name]


def _bind_op(pattern: PatternOp, op: Op, bound: Bindings) -> Iterator[Bindings]:
    """Ways to bind one op: one, or two where its operands commute."""
    if op.name != pattern.name or len(op.results) != len(pattern.results):
        return
    if len(op.operands) != len(pattern.operands) or op.choices or op.stream:
        return
    orders = [op.operands]
    if op.name in COMMUTATIVE and op.operands[0] != op.operands[1]:
        orders.append((op.operands[1], op.operands[0]))
    for operands in orders:
        trial = bound.copy()
        pairs = [*zip(pattern.operands, operands, strict=True)]
        pairs += zip(pattern.results, op.results, strict=True)
        if not all(_bind_name(trial, name, value) for name, value in pairs):
            continue
        if not trial.bind_attrs(pattern, op):
            continue
        types = zip(pattern.result_types, op.results, strict=False)
        if all(trial.bind_type(type_, value) for type_, value in types):
            yield trial


def _bind_name(bound: Bindings, name: str, value: Value) -> bool:
    if name.startswith("step."):
        return value.name == name
    return bound.bind_value(name, value)


def _params_fit(pattern: Pattern, bound: Bindings) -> bool:
    for param in pattern.params:
        value = bound.values.get(param.name)
        if value is None or not bound.bind_type(param.type, value):
            return False
        if param.name.startswith("@") and not value.is_weight:
            return False
    return True


def _is_closed(pattern: Pattern, bound: Bindings, places: Sequence[int], index: OpIndex) -> bool:
    """Whether nothing outside reads what the pattern does not give back, constants apart."""
    inside = set(places)
    params = {bound.values[param.name].name for param in pattern.params}
    given = {*pattern.outputs, *pattern.state_outputs}
    for pattern_op in pattern.ops:
        for name in pattern_op.results:
            value = bound.values[name].name
            if value in params:
                return False
            if name in given or pattern_op.name in MAKERS:
                continue
            if index.is_returned(value) or not inside.issuperset(index.readers(value)):
                return False
    return True


def _environment(
    rule: Rule, bound: Bindings, device: Device, limits: Limits
) -> dict[str, int | float | bool]:
    """Values for the names in ``where``; a symbolic size counts with its upper bound."""
    env: dict[str, int | float | bool] = {}
    for name in names_of(rule.where):
        found = _lookup(name, bound, device, limits)
        if isinstance(found, int | float):
            env[name] = found
    return env


def _lookup(name: str, bound: Bindings, device: Device, limits: Limits) -> Any:
    if name.startswith("device."):
        return getattr(device, name.removeprefix("device."), None)
    if name.startswith("$"):
        return bound.attrs[name[1:]]
    if name.endswith(".bits"):
        return bound.dtypes[name.removesuffix(".bits")].bits
    return bound.sizes[name].bounds(limits)[1]


def parameter_name(name: str) -> str:
    """A pattern's name as the body of a group has it: ``step.slots`` is its ``%slots``."""
    return f"%{name.removeprefix('step.')}" if name.startswith("step.") else name


def body_of(match: Match, index: OpIndex) -> Graph:
    """The matched ops as a graph over the pattern's parameters, in the pattern's order and names.

    Types and attributes are those of the matched ops. A field of the step record that the pattern
    reads by itself is a parameter too.
    """
    pattern, bound = match.rule.before, match.bound

    def named(name: str, value: Value) -> Value:
        return Value(parameter_name(name), value.type)

    params = [named(p.name, bound.values[p.name]) for p in pattern.params]
    ops: list[Op] = []
    for pattern_op, place in zip(pattern.ops, match.places, strict=True):
        op = index.at(place)
        values = {v.name: v for v in op.operands}
        operands = []
        for name in pattern_op.operands:
            value = values[name] if name.startswith("step.") else bound.values[name]
            operands.append(named(name, value))
            if name.startswith("step.") and operands[-1] not in params:
                params.append(operands[-1])
        results = [named(n, v) for n, v in zip(pattern_op.results, op.results, strict=True)]
        ops.append(Op(op.name, tuple(operands), tuple(results), op.attrs))
    outputs = [named(n, bound.values[n]) for n in (*pattern.outputs, *pattern.state_outputs)]
    return Graph("body", tuple(params), ops=tuple(ops), outputs=tuple(outputs))
