"""The search of `shard`: how the values of one graph lie over one axis of the mesh.

Ops are taken in order. For each, its sharding rule names the dims that may be sharded; a choice
fixes the form of every operand, and a value that has another form is converted by a collective. A
beam keeps the best states among those whose live values lie alike: least room for weights and
states first, since that is what the axis was chosen for, then least time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Attr, Graph, Op, Value, attrs_of
from metainfer.ir.ops.record import op_def
from metainfer.ir.shard_rule import Rule, parse_rule
from metainfer.ir.sharding import propagate
from metainfer.ir.types import PARTIAL, Mesh, Sharding, StateType, TensorType, Type

# How a value lies over the axis: whole, a pending sum, sharded in a dim; a state has one per field.
Form = None | int | str | tuple["int | None", ...]
BEAM = 24


@dataclass(frozen=True)
class Prices:
    """What the search weighs.

    Attributes:
        op: seconds of an op on one device, if nothing is sharded.
        collective: seconds of a collective by name and payload (global type).
        room: bytes of a weight or a state on one device, if nothing is sharded.
    """

    op: Callable[[Op], float]
    collective: Callable[[str, TensorType], float]
    room: Callable[[Type], float]


@dataclass(frozen=True)
class Sharded:
    """A graph with shardings, and how its weights and states lie.

    Attributes:
        graph: ops with collectives; weights and states typed as they lie.
        placed: weight or state name -> form.
        seconds: price of the graph.
    """

    graph: Graph
    placed: Mapping[str, Form]
    seconds: float


@dataclass(frozen=True)
class _Log:
    """Ops so far, last first: states of the beam share their beginnings."""

    before: "_Log | None"
    op: Op


@dataclass(frozen=True)
class _State:
    """A partial program: forms at hand of every live value, weights placed so far."""

    room: float
    seconds: float
    forms: Mapping[str, Mapping[Form, Value]]
    placed: Mapping[str, Form]
    log: "_Log | None" = None

    @property
    def cost(self) -> tuple[float, float]:
        return self.room, self.seconds

    def ops(self) -> list[Op]:
        found: list[Op] = []
        log = self.log
        while log is not None:
            found.append(log.op)
            log = log.before
        return found[::-1]


@dataclass
class Search:
    """Shards one graph over one axis.

    Args:
        graph: types without shardings over the axis.
        mesh: sizes must divide by its axes.
        axis: the axis.
        prices: what is weighed.
        allowed: whether a scheme (op name, sharded name of its rule) may be used.
    """

    graph: Graph
    mesh: Mesh
    axis: str
    prices: Prices
    allowed: Callable[[str, str], bool] = field(default=lambda op, name: True)

    def __post_init__(self) -> None:
        """Prepare what is asked for often."""
        self.ranks = dict(self.mesh.axes)[self.axis]
        self._last_use = _last_uses(self.graph)
        self._fixed = {v.name for v in (*self.graph.weights, *self.graph.states)}
        self._schemes: dict[object, list[tuple[tuple[Form, ...], tuple[Type, ...]]]] = {}

    def run(self) -> Sharded:
        """The cheapest program found."""
        start: dict[str, dict[Form, Value]] = {v.name: {None: v} for v in self.graph.inputs}
        beam = [_State(0.0, 0.0, start, {})]
        for number, op in enumerate(self.graph.ops):
            beam = self._pruned([s for state in beam for s in self._step(state, op)], number)
        finals = [self._finished(state) for state in beam]
        best = min(finals, key=lambda s: s.cost)
        return self._sharded(best)

    # --- one op --------------------------------------------------------------------------------

    def _step(self, state: _State, op: Op) -> Iterator[_State]:
        if op.is_call:
            yield self._call(state, op)
            return
        whole = self.prices.op(op)
        for forms, results in self._op_schemes(op):
            made = self._placed(state, op, forms)
            if made is None:
                continue
            operands, after = made
            typed = self._typed(op, operands, results)
            is_parallel = any(_is_split(f) for f in forms)
            seconds = after.seconds + (whole / self.ranks if is_parallel else whole)
            forms_at_hand = dict(after.forms)
            for value in typed.results:
                forms_at_hand[value.name] = {form_of(value.type, self.axis): value}
            log = _Log(after.log, typed)
            yield _State(after.room, seconds, forms_at_hand, after.placed, log)

    def _call(self, state: _State, op: Op) -> _State:
        """Blocks take and give whole values."""
        operands = []
        for value in op.operands:
            value, state = self._in_form(state, value, None)
            operands.append(value)
        called = replace(op, operands=tuple(operands))
        made: dict[str, dict[Form, Value]] = {v.name: {None: v} for v in op.results}
        forms = {**state.forms, **made}
        return replace(state, forms=forms, log=_Log(state.log, called))

    def _typed(self, op: Op, operands: Sequence[Value], results: Sequence[Type]) -> Op:
        made = []
        states = iter(v.type for v in operands if v.is_state)
        for value, type_ in zip(op.results, results, strict=True):
            made.append(Value(value.name, next(states) if value.is_state else type_))
        return replace(op, operands=tuple(operands), results=tuple(made))

    def _placed(
        self, state: _State, op: Op, forms: Sequence[Form]
    ) -> tuple[list[Value], _State] | None:
        """Operands in their forms, conversions and placements added; None if it cannot be."""
        operands = []
        for value, form in zip(op.operands, forms, strict=True):
            if value.name.startswith("step."):
                if form is not None:
                    return None
                operands.append(value)
                continue
            if value.name in self._fixed:
                placed = self._weight(state, value, form)
                if placed is None:
                    return None
                value, state = placed
            elif value.is_state:
                if form not in state.forms[value.name]:
                    return None
                value = state.forms[value.name][form]
            elif form == PARTIAL and form not in state.forms[value.name]:
                return None  # nothing becomes a pending sum
            else:
                value, state = self._in_form(state, value, form)
            operands.append(value)
        return operands, state

    def _weight(self, state: _State, value: Value, form: Form) -> tuple[Value, _State] | None:
        if form == PARTIAL:
            return None
        typed = Value(value.name, with_form(value.type, self.axis, form))
        if value.name in state.placed:
            return (typed, state) if state.placed[value.name] == form else None
        room = self.prices.room(value.type)
        room = state.room + (room / self.ranks if _is_split(form) else room)
        return typed, replace(state, room=room, placed={**state.placed, value.name: form})

    def _in_form(self, state: _State, value: Value, form: Form) -> tuple[Value, _State]:
        """A value in a form, converted from the cheapest at hand."""
        at_hand = state.forms[value.name]
        if form in at_hand:
            return at_hand[form], state
        ways = [self._conversion(held, have, form) for have, held in at_hand.items()]
        priced = [(self.prices.collective(o.name, _plain(o.result.tensor)), o) for o in ways]
        price, op = min(priced, key=lambda pair: pair[0])
        forms = {**state.forms, value.name: {**at_hand, form: op.result}}
        log = _Log(state.log, op)
        return op.result, replace(state, seconds=state.seconds + price, forms=forms, log=log)

    def _conversion(self, value: Value, have: Form, form: Form) -> Op:
        attrs: dict[str, Attr] = {"axis": self.axis}
        if have == PARTIAL:
            name = "all_reduce" if form is None else "reduce_scatter"
            attrs.update({} if form is None else {"dim": form})  # type: ignore[dict-item]
        elif have is None:
            name, attrs["dim"] = "take_shard", form  # type: ignore[assignment]
        elif form is None:
            name, attrs["dim"] = "all_gather", have  # type: ignore[assignment]
        else:
            name = "all_to_all"
            attrs.update({"source": have, "target": form})  # type: ignore[dict-item]
        result = Value(f"{value.name}.{name}", with_form(value.type, self.axis, form))
        return Op(name, (value,), (result,), attrs_of(attrs))

    # --- what a rule offers ----------------------------------------------------------------------

    def _op_schemes(self, op: Op) -> list[tuple[tuple[Form, ...], tuple[Type, ...]]]:
        key = (op.name, op.attrs, tuple(v.type for v in op.operands))
        if key not in self._schemes:
            self._schemes[key] = list(self._legal(op))
        return self._schemes[key]

    def _legal(self, op: Op) -> Iterator[tuple[tuple[Form, ...], tuple[Type, ...]]]:
        types = [v.type for v in op.operands]
        results = [v.type for v in op.results]
        seen = set()
        for forms in self._proposed(op, types):
            if forms in seen:
                continue
            seen.add(forms)
            typed = [with_form(t, self.axis, f) for t, f in zip(types, forms, strict=True)]
            try:
                made = propagate(op.name, typed, op.attr, results, self.mesh)
            except TypeMismatch:
                continue
            yield forms, made

    def _proposed(self, op: Op, types: Sequence[Type]) -> Iterator[tuple[Form, ...]]:
        yield tuple(_whole(t) for t in types)
        record = op_def(op.name)
        text = record.shard_rule(types, record.complete(op.attr))
        if not text or "=>" in text:
            return
        rule = parse_rule(text)
        for name in _free_names(rule, types):
            if self.allowed(op.name, name):
                forms = tuple(_form_by(rule, i, t, name) for i, t in enumerate(types))
                if not any(_is_symbolic(t, f) for t, f in zip(types, forms, strict=True)):
                    yield forms
        groups = list(rule.sums)
        if rule.sums_all:
            groups.append(frozenset(range(len(types))))
        for group in groups:
            yield tuple(PARTIAL if i in group else _whole(t) for i, t in enumerate(types))

    # --- the beam ------------------------------------------------------------------------------

    def _pruned(self, states: Sequence[_State], number: int) -> list[_State]:
        """The cheapest of those whose live values lie alike, at most `BEAM`."""
        best: dict[object, _State] = {}
        for state in states:
            live = {n: f for n, f in state.forms.items() if self._last_use.get(n, -1) > number}
            placed = tuple(
                (n, f) for n, f in state.placed.items() if self._last_use.get(n, -1) > number
            )
            key = (tuple((n, tuple(f)) for n, f in live.items()), placed)
            if key not in best or state.cost < best[key].cost:
                best[key] = replace(state, forms=live)
        return sorted(best.values(), key=lambda s: s.cost)[:BEAM]

    def _finished(self, state: _State) -> _State:
        for value in self.graph.outputs:
            if value.name in state.forms:
                _, state = self._in_form(state, value, None)
        return state

    def _sharded(self, state: _State) -> Sharded:
        def swap(value: Value) -> Value:
            at_hand = state.forms.get(value.name, {})
            return at_hand.get(None) or next(iter(at_hand.values()), value)

        def fixed(value: Value) -> Value:
            form = state.placed.get(value.name, _whole(value.type))
            return Value(value.name, with_form(value.type, self.axis, form))

        graph = replace(
            self.graph,
            weights=tuple(fixed(v) for v in self.graph.weights),
            states=tuple(fixed(v) for v in self.graph.states),
            ops=tuple(state.ops()),
            outputs=tuple(
                fixed(v) if v.name in self._fixed else swap(v) for v in self.graph.outputs
            ),
            state_outputs=tuple(
                fixed(v) if v.name in self._fixed else swap(v) for v in self.graph.state_outputs
            ),
        )
        return Sharded(graph, state.placed, state.seconds)


def _last_uses(graph: Graph) -> dict[str, int]:
    """Number of the last op that reads each value; outputs are read past the end."""
    found: dict[str, int] = {}
    for number, op in enumerate(graph.ops):
        found.update((v.name, number) for v in op.operands)
    found.update((v.name, len(graph.ops)) for v in (*graph.outputs, *graph.state_outputs))
    return found


def _whole(type_: Type) -> Form:
    return tuple(None for _ in type_.fields) if isinstance(type_, StateType) else None


def _is_split(form: Form) -> bool:
    if isinstance(form, tuple):
        return any(f is not None for f in form)
    return isinstance(form, int)


def _free_names(rule: Rule, types: Sequence[Type]) -> list[str]:
    """Names of dims that the rule lets be sharded, in order of appearance."""
    names: dict[str, None] = {}
    for index, type_ in enumerate(types):
        for part in _tensors(type_):
            for label in rule.operand(index).labels(part.rank):
                if not label.whole:
                    names.setdefault(label.name)
    return list(names)


def _tensors(type_: Type) -> list[TensorType]:
    return [type_] if isinstance(type_, TensorType) else [t for _, t in type_.fields]


def _form_by(rule: Rule, index: int, type_: Type, name: str) -> Form:
    places = []
    for part in _tensors(type_):
        labels = rule.operand(index).labels(part.rank)
        place = next((i for i, label in enumerate(labels) if label.name == name), None)
        if place is not None and part.shape[place].is_static and part.shape[place].static == 1:
            place = None
        places.append(place)
    return tuple(places) if isinstance(type_, StateType) else places[0]


def _is_symbolic(type_: Type, form: Form) -> bool:
    """Whether a form would shard tokens: their number need not divide by the ranks."""
    return (
        isinstance(type_, TensorType)
        and isinstance(form, int)
        and (not type_.shape[form].is_static)
    )


def with_form(type_: Type, axis: str, form: Form) -> Type:
    """The type with a placement over an axis."""
    if isinstance(type_, StateType):
        forms = form if isinstance(form, tuple) else tuple(None for _ in type_.fields)
        fields = tuple(
            (name, _placed_over(t, axis, f))
            for (name, t), f in zip(type_.fields, forms, strict=True)
        )
        return replace(type_, fields=fields)
    return _placed_over(type_, axis, form)


def _placed_over(type_: TensorType, axis: str, form: Form) -> TensorType:
    axes = dict(type_.sharding.axes)
    axes.pop(axis, None)
    if form is not None:
        axes[axis] = form  # type: ignore[assignment]
    return replace(type_, sharding=Sharding.of(axes))


def form_of(type_: Type, axis: str) -> Form:
    """The placement of a type over an axis."""
    if isinstance(type_, StateType):
        return tuple(t.sharding.placement(axis) for _, t in type_.fields)  # type: ignore[misc]
    return type_.sharding.placement(axis)


def _plain(type_: TensorType) -> TensorType:
    return replace(type_, sharding=Sharding())


__all__ = ["BEAM", "Form", "Prices", "Search", "Sharded", "form_of", "with_form"]
