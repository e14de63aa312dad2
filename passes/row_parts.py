"""Rows in parts: the ops of a region run once for each part of the step's tokens.

    before: %1 = linear(%0, @w) : bf16[T,64]
            %2 = all_reduce(%1) {axis = "tp", ranks = 8} : bf16[T,64]
    after:  %1/0 = linear(%0/0, @w) : bf16[T-128*(T//256),64]
            %1/1 = linear(%0/1, @w) : bf16[128*(T//256),64]
            %2/0 = all_reduce(%1/0) ...     runs while %1/1 is computed
            %2/1 = all_reduce(%1/1) ...
            %2 = concat(%2/0, %2/1) {dim = 0} : bf16[T,64]

Which ops may be cut follows from their sharding rules: rows that could be sharded without a word to
other ranks are independent. Parts but the first are multiples of a grain, so that a step of few
tokens has them all in the first part; ops of an empty part are not run.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import Block
from metainfer.ir.graph import Attr, Choice, Graph, Op, Value, attrs_of
from metainfer.ir.ops.collective import MEETING
from metainfer.ir.ops.record import op_def
from metainfer.ir.shard_rule import parse_rule
from metainfer.ir.types import TensorType


@dataclass(frozen=True)
class Parts:
    """How the rows are cut.

    Attributes:
        symbol: number of rows.
        count: parts.
        grain: rows that all parts but the first are multiples of.
    """

    symbol: str
    count: int
    grain: int

    @property
    def least_rows(self) -> int:
        """Fewest rows of which more than one part is made."""
        return self.count * self.grain

    def size(self, part: int) -> Dim:
        """Rows of a part."""
        rows, later = dim(self.symbol), self._later()
        return later if part else rows - later * (self.count - 1)

    def start(self, part: int) -> Dim:
        """First row of a part."""
        return dim(self.symbol) - self._later() * (self.count - part) if part else dim(0)

    def _later(self) -> Dim:
        return dim(self.symbol) // self.least_rows * self.grain

    def limit(self, part: int, rows: int) -> int:
        """Largest step of which a part has at most so many rows, by the rule of thumb."""
        if part == 0 and rows < self.grain:
            return rows
        return self.least_rows * (rows // self.grain + 1) - 1


# --- which ops ---------------------------------------------------------------------------------


def row_ops(graph: Graph, symbol: str) -> frozenset[int]:
    """Numbers of the ops whose rows are independent, rows being what the symbol counts."""
    return frozenset(i for i, op in enumerate(graph.ops) if is_row_op(op, symbol))


def is_row_op(op: Op, symbol: str) -> bool:
    """Whether each row of an op's results depends on the same row of its operands only."""
    values = (*op.operands, *op.results)
    if op.is_call or not op.results or any(v.is_state for v in values):
        return False
    if not all(_is_clear(v, symbol) for v in values):
        return False
    rows = {v.name for v in op.operands if _has_rows(v, symbol)}
    if not rows or not all(_has_rows(v, symbol) for v in op.results):
        return False
    if op.body is not None:
        return all(is_row_op(o, symbol) for o in op.body.ops if _mentions(o, symbol))
    if op.name in MEETING or op.name in ("take_shard", "local_index"):
        return _keeps_rows(op)
    return _rule_allows(op, rows)


def _is_clear(value: Value, symbol: str) -> bool:
    """Whether rows, if the value has any, are its first dim only, a whole number of times."""
    assert isinstance(value.type, TensorType)
    shape = value.type.shape
    if any(symbol in n.symbols() for n in shape[1:]):
        return False
    return not _has_rows(value, symbol) or _multiple(shape[0], symbol) > 0


def _has_rows(value: Value, symbol: str) -> bool:
    return (
        isinstance(value.type, TensorType)
        and bool(value.type.shape)
        and symbol in value.type.shape[0].symbols()
    )


def _multiple(size: Dim, symbol: str) -> int:
    """m where the size is m rows for each one, else 0."""
    if size.constant or len(size.terms) != 1 or size.terms[0][0] != symbol:
        return 0
    return size.terms[0][1]


def _mentions(op: Op, symbol: str) -> bool:
    return any(_has_rows(v, symbol) for v in (*op.operands, *op.results))


def _keeps_rows(op: Op) -> bool:
    """Whether parts of an exchange are exchanges of parts.

    Where ranks gather rows (``dim = 0``) those of a part come together, each rank's own in order;
    it is `split` that keeps such rows within the region.
    """
    if op.name in ("all_gather", "reduce_scatter"):
        return True
    return all(op.attr.get(key) != 0 for key in ("dim", "source", "target"))


def _rule_allows(op: Op, rows: Collection[str]) -> bool:
    record, types = op_def(op.name), [v.type for v in op.operands]
    text = record.shard_rule(types, record.complete(op.attr))
    if not text or "=>" in text:
        return False
    rule = parse_rule(text)
    first = op.results[0].tensor
    name = rule.result(0).labels(first.rank)[0].name
    for number, value in enumerate(op.operands):
        labels = rule.operand(number).labels(value.tensor.rank)
        places = [i for i, label in enumerate(labels) if label.name == name]
        if value.name in rows:
            if places != [0] or labels[0].whole or labels[0].contracted:
                return False
        elif any(value.tensor.shape[i] != dim(1) for i in places):
            return False
    made = (rule.result(i).labels(v.tensor.rank)[0].name for i, v in enumerate(op.results))
    return all(other == name for other in made)


# --- cutting -----------------------------------------------------------------------------------


def split(
    graph: Graph, region: Collection[int], parts: Parts, copied: bool
) -> tuple[Op, ...] | None:
    """The graph's ops with those of a region cut into parts.

    Args:
        graph: where the ops stand.
        region: numbers of ops, all of them row ops of the parts' symbol.
        parts: how rows are cut.
        copied: whether kernels want fixed addresses: parts of what comes in are copied then.

    Returns: None if rows that ranks gathered, or codes with their scales, would leave the region.
    """
    run = _Split(graph, region, parts, copied)
    for number, op in enumerate(graph.ops):
        if number in region:
            run.cut(op)
        else:
            run.keep(op)
    run.whole(graph.outputs)
    return None if run.leaks else tuple(run.ops)


class _Split:
    def __init__(self, graph: Graph, region: Collection[int], parts: Parts, copied: bool) -> None:
        self.ops: list[Op] = []
        self.leaks = False
        self._parts, self._copied = parts, copied
        self._made = {v.name for i in region for v in graph.ops[i].results}
        self._joined: set[str] = set()
        self._sliced: dict[str, tuple[Value, ...]] = {}
        self._rows = [{parts.symbol: parts.size(part)} for part in range(parts.count)]
        self._types: dict[tuple[TensorType, int], TensorType] = {}

    def keep(self, op: Op) -> None:
        """An op outside the region, what it reads made whole before it."""
        self.whole(op.operands)
        self.ops.append(op)

    def whole(self, values: Iterable[Value]) -> None:
        """Join the parts of values that are read as a whole."""
        for value in values:
            if value.name not in self._made or value.name in self._joined:
                continue
            self._joined.add(value.name)
            self.leaks |= not self._may_cross(value)
            pieces = tuple(self._piece(value, part) for part in range(self._parts.count))
            self.ops.append(Op("concat", pieces, (value,), attrs_of({"dim": 0})))

    def cut(self, op: Op) -> None:
        """An op of the region, once for each part."""
        for part in range(self._parts.count):
            operands = tuple(self._operand(v, part) for v in op.operands)
            cut = _substituted(op, self._rows[part], self._parts, part)
            results = tuple(self._piece(v, part) for v in op.results)
            self.ops.append(replace(cut, operands=operands, results=results))

    def _operand(self, value: Value, part: int) -> Value:
        if not _has_rows(value, self._parts.symbol):
            return value
        if value.name in self._made:
            return self._piece(value, part)
        self.leaks |= not self._may_cross(value)
        if value.name not in self._sliced:
            self._sliced[value.name] = self._slices(value)
        return self._sliced[value.name][part]

    def _may_cross(self, value: Value) -> bool:
        """Whether a value can be cut where a region begins, and joined where it ends.

        Codes and their scales lie apart: no view holds both.
        """
        is_plain = not isinstance(value.tensor.dtype, Block)
        return is_plain and value.tensor.shape[0] == dim(self._parts.symbol)

    def _slices(self, value: Value) -> tuple[Value, ...]:
        found = []
        for part in range(self._parts.count):
            start, size = self._parts.start(part), self._parts.size(part)
            piece = self._piece(value, part)
            copied = self._copied and part > 0
            view = Value(f"{piece.name}/view", piece.type) if copied else piece
            attrs = {"dim": 0, "start": start.attr, "stop": (start + size).attr}
            self.ops.append(Op("slice", (value,), (view,), attrs_of(attrs)))
            if copied:
                self.ops.append(Op("concat", (view,), (piece,), attrs_of({"dim": 0})))
            found.append(piece)
        return tuple(found)

    def _piece(self, value: Value, part: int) -> Value:
        name = value.name if value.name.startswith("%") else f"%{value.name}"
        key = (value.tensor, part)
        if key not in self._types:
            self._types[key] = _of_rows(value.tensor, self._rows[part])
        return Value(f"{name}/{part}", self._types[key])


def _of_rows(type_: TensorType, rows: Mapping[str, Dim]) -> TensorType:
    return type_.with_shape(tuple(n.substitute(rows) for n in type_.shape))


def _substituted(op: Op, rows: Mapping[str, Dim], parts: Parts, part: int) -> Op:
    """An op with its rows counted by a part's size: attributes, body, kernel table."""
    return replace(
        op,
        attrs=tuple((k, _attr_of(v, rows)) for k, v in op.attrs),
        body=None if op.body is None else _body_of(op.body, rows),
        choices=_choices_of(op.choices, parts, part),
    )


def _attr_of(value: Attr, rows: Mapping[str, Dim]) -> Attr:
    if isinstance(value, Dim):
        return value.substitute(rows)
    if isinstance(value, tuple):
        return tuple(_attr_of(v, rows) for v in value)
    return value


def _body_of(body: Graph, rows: Mapping[str, Dim]) -> Graph:
    def value(v: Value) -> Value:
        return Value(v.name, _of_rows(v.tensor, rows))

    def values(some: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(map(value, some))

    ops = tuple(
        replace(
            op,
            operands=values(op.operands),
            results=values(op.results),
            attrs=tuple((k, _attr_of(v, rows)) for k, v in op.attrs),
            body=None if op.body is None else _body_of(op.body, rows),
        )
        for op in body.ops
    )
    return replace(body, inputs=values(body.inputs), ops=ops, outputs=values(body.outputs))


def _choices_of(choices: Sequence[Choice], parts: Parts, part: int) -> tuple[Choice, ...]:
    """A kernel table by the part's rows, asked by the step's."""
    made: list[Choice] = []
    last = 0
    for choice in choices:
        if choice.symbol != parts.symbol:
            made.append(choice)
            continue
        limit = parts.limit(part, choice.limit)
        if limit > last:
            made.append(replace(choice, limit=limit))
            last = limit
    return tuple(made)
