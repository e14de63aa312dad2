"""Graphs that a rule fits: what its ``before`` is for sizes and types that satisfy ``where``.

Imported by tests of rules; holds no tests.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from metainfer.hardware.device import Device
from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import BF16, F32, FP8_BLOCK, FP8_GROUP, DType
from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Attr, Graph, Op, Value, attrs_of
from metainfer.ir.ops.record import infer_types, op_def
from metainfer.ir.patterns import AttrVar, DTypeVar, PatternOp, StatePattern, TypePattern
from metainfer.ir.rules import Rule, evaluate_where
from metainfer.ir.step import step_value
from metainfer.ir.types import StateType, TensorType, Type
from metainfer.ir.where import names_of

SIZES = (4, 6, 2, 8, 3, 12, 1, 16)
LEADS: tuple[tuple[int | str, ...], ...] = (("T", 3), ("T",))
# Values worth trying for an attribute variable, by the name of the attribute it stands at.
TRIALS: dict[str, tuple[Attr, ...]] = {
    "eps": (1e-5,),
    "value": (0.5, 1.4142135623730951, 0.7071067811865476, 0.7978845608028654),
    "approximate": ("tanh",),
    "scale": (0.5,),
    "theta": (500.0,),
    "dim": (-1,),
    "k": (2, 3),
    # A collective of one rank is what one rank can run.
    "ranks": (1,),
    "axis": ("tp",),
    "format": ("f8e4m3/128:f32", "f8e4m3/row:f32"),
}
# What t[*] may be: like the scores of an attention (a mask), like other leading dims, or a number.
STARS = ("scores", "lead", "scalar")
MOST_TRIALS, FEW_TRIALS = 6000, 600


@dataclass
class _State:
    """A partly built instance."""

    rule: Rule
    device: Device
    dtypes: Mapping[str, DType]
    lead: tuple[int | str, ...]
    star: str
    sizes: dict[str, Dim] = field(default_factory=dict[str, Dim])
    attrs: dict[str, Attr] = field(default_factory=dict[str, Attr])
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    ops: list[Op] = field(default_factory=list[Op])

    def copy(self) -> "_State":
        return replace(
            self,
            sizes=dict(self.sizes),
            attrs=dict(self.attrs),
            values=dict(self.values),
            ops=list(self.ops),
        )


def instances(rule: Rule, device: Device, accept: Callable[[Graph], bool]) -> Iterator[Graph]:
    """One graph for each choice of element types that the rule allows.

    Args:
        rule: the rule.
        device: where its conditions hold.
        accept: whether a graph is one that runs and that the rule changes.
    """
    names = sorted(rule.before.dtype_variables())
    choices = [{n: F32 for n in names}, {n: BF16 for n in names}]
    if len(names) > 1:
        choices.append({n: BF16 if n == "t" else F32 for n in names})
        choices.append({n: F32 if n == "t" else BF16 for n in names})
    if "q" in names:
        # Codes by codes.
        choices = [{**c, "q": FP8_GROUP, "u": FP8_BLOCK} for c in choices]
    most = MOST_TRIALS
    for dtypes in choices:
        stars = STARS if {"S", "L"} <= rule.before.size_variables() else STARS[1:]
        for lead, star in product(LEADS, stars):
            # Sizes that suit one choice of types are near for the next one, too.
            found = _solve(_State(rule, device, dtypes, lead, star), most)
            if found is not None and accept(found):
                most = FEW_TRIALS
                yield found
                break


def _solve(start: _State, most: int) -> Graph | None:
    stack = [start]
    for _ in range(most):
        if not stack:
            return None
        state = stack.pop()
        try:
            following = _advance(state)
        except MetainferError:
            continue
        if isinstance(following, Graph):
            return following
        stack += reversed(following)
    return None


def _advance(state: _State) -> Graph | list[_State]:
    """The states that follow one decision, or the finished graph."""
    pattern = state.rule.before
    for param in pattern.params:
        if param.name in state.values or isinstance(param.type, StatePattern):
            continue
        free = _unbound(state, param.type.shape)
        if state.star == "scores":
            free += _unbound(state, (dim("S"), dim("L")))
        if free:
            return _branches(state, free)
        state.values[param.name] = Value(param.name, _tensor(state, param.type))
    if len(state.ops) == len(pattern.ops):
        return _finished(state)
    op = pattern.ops[len(state.ops)]
    sizes = [leaf for _, value in op.attrs for leaf in _leaves(value) if isinstance(leaf, Dim)]
    free = _unbound(state, sizes)
    if free:
        return _branches(state, free)
    for name, value in op.attrs:
        for leaf in _leaves(value):
            if isinstance(leaf, AttrVar) and leaf.name not in state.attrs:
                return _attr_branches(state, op, name, leaf.name)
    _emit(state, op)
    return [state]


def _unbound(state: _State, sizes: Any) -> list[str]:
    return sorted({s for size in sizes for s in size.symbols()} - state.sizes.keys())


def _branches(state: _State, free: list[str]) -> list[_State]:
    """All values of one size, unlike ones first."""
    name = free[0]
    if name == "T":
        state.sizes["T"] = dim("T")
        return [state]
    used = {size.constant for size in state.sizes.values() if size.is_static}
    order = [n for n in SIZES if n not in used] + [n for n in SIZES if n in used]
    made = []
    for number in order:
        branch = state.copy()
        branch.sizes[name] = dim(number)
        made.append(branch)
    return made


def _attr_branches(state: _State, op: PatternOp, attr: str, name: str) -> list[_State]:
    if attr == "dtype":
        wanted = [t for t in op.result_types if isinstance(t, TypePattern)]
        dtype = _dtype(state, wanted[0]) if wanted else state.dtypes.get("t", F32)
        trials: tuple[Attr, ...] = (dtype.name,)
        if op.name in ("linear", "experts"):
            # Plain activations name no type.
            trials = (dtype.name, "")
    elif attr in TRIALS:
        trials = TRIALS[attr]
    else:
        trials = tuple(s.default for s in op_def(op.name).attrs if s.name == attr)
    made = []
    for value in trials:
        branch = state.copy()
        branch.attrs[name] = value
        made.append(branch)
    return made


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _dtype(state: _State, pattern: TypePattern) -> DType:
    if isinstance(pattern.dtype, DTypeVar):
        return state.dtypes[pattern.dtype.name]
    return pattern.dtype


def _tensor(state: _State, pattern: TypePattern) -> TensorType:
    lead: tuple[int | str, ...] = state.lead if pattern.free_lead else ()
    tail = pattern.shape
    if pattern.free_lead and not tail and state.star == "scores":
        tail = (dim("S"), dim("L"))
    if pattern.free_lead and not tail and state.star == "scalar":
        lead = ()
    shape = (*map(dim, lead), *(size.substitute(state.sizes) for size in tail))
    return TensorType(shape, _dtype(state, pattern))


def _attr(state: _State, value: Any) -> Attr:
    if isinstance(value, AttrVar):
        return state.attrs[value.name]
    if isinstance(value, Dim):
        size = value.substitute(state.sizes)
        return size.constant if size.is_static else size
    return tuple(_attr(state, v) for v in value) if isinstance(value, tuple) else value


def _emit(state: _State, op: PatternOp) -> None:
    attrs = {name: _attr(state, value) for name, value in op.attrs}
    if op.name in ("slice", "softmax", "mean", "sum", "max"):
        # As capture writes them: dims counted from the start.
        rank = state.values[op.operands[0]].tensor.rank
        attrs = {k: _from_start(k, v, rank) for k, v in attrs.items()}
    for name, operand in zip(op.operands, op.operands, strict=True):
        if name.startswith("$"):
            state.values[name] = Value(name, _paged(state, op))
        if operand.startswith("step."):
            state.values[name] = step_value(name[5:])
    operands = tuple(state.values[name] for name in op.operands)
    types = infer_types(op.name, [v.type for v in operands], attrs)
    for name, type_, wanted in zip(
        op.results, types, op.result_types or (None,) * len(types), strict=True
    ):
        if isinstance(wanted, TypePattern) and not _fits(state, wanted, type_):
            raise MetainferError("not the type of the pattern")
        state.values[name] = Value(name, type_)
    results = tuple(state.values[name] for name in op.results)
    state.ops.append(Op(op.name, operands, results, attrs_of(attrs)))


def _from_start(name: str, value: Attr, rank: int) -> Attr:
    if name == "dim" and isinstance(value, int) and rank:
        return value % rank
    if name == "dims" and isinstance(value, tuple):
        return tuple(int(v) % rank for v in value if isinstance(v, int))
    return value


def _fits(state: _State, pattern: TypePattern, type_: Type) -> bool:
    if not isinstance(type_, TensorType) or type_.dtype != _dtype(state, pattern):
        return False
    tail = tuple(size.substitute(state.sizes) for size in pattern.shape)
    return type_.shape[type_.rank - len(tail) :] == tail


def _paged(state: _State, op: PatternOp) -> StateType:
    """The state that a write of these keys and values, or latents, fits."""
    made = (state.values[name].tensor for name in op.operands[1:3])
    fields = ("c", "r") if op.name == "latent_write" else ("k", "v")
    entries = (TensorType(t.shape[1:], t.dtype) for t in made)
    return StateType("pages", tuple(zip(fields, entries, strict=True)))


def _finished(state: _State) -> Graph:
    rule, pattern = state.rule, state.rule.before
    env: dict[str, Any] = {}
    for name in names_of(rule.where):
        if name.startswith("device."):
            env[name] = getattr(state.device, name[7:])
        elif name.startswith("$"):
            env[name] = state.attrs[name[1:]]
        elif name.endswith(".bits"):
            env[name] = state.dtypes[name[:-5]].bits
        else:
            env[name] = state.sizes[name].bounds({"T": (1, 512)})[1]
    if not evaluate_where(rule.where, env):
        raise MetainferError("not where the rule holds")
    declared = [state.values[param.name] for param in pattern.params]
    return Graph(
        rule.name,
        tuple(v for v in declared if v.name[0] == "%"),
        tuple(v for v in declared if v.name[0] == "@"),
        tuple(v for v in declared if v.name[0] == "$"),
        tuple(state.ops),
        tuple(state.values[n] for n in pattern.outputs),
        tuple(state.values[n] for n in pattern.state_outputs),
    )
