"""Propagation of shardings: what each op makes of how its operands lie over the mesh.

Every op carries a rule (`ir.shard_rule`). Axes of the mesh are looked at one by one; they do not
interact, but that of several axes which shard one dim only the innermost may change alone. A state
carries the shardings of its fields. A missing collective is a type error.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import Block
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Attr, Op
from metainfer.ir.ops.collective import MEETING, OWN, block_extent
from metainfer.ir.ops.record import COLLECTIVE, VIEW, OpDef, op_def
from metainfer.ir.refine import refined_format
from metainfer.ir.shard_rule import NamedDim, Rule, parse_rule
from metainfer.ir.types import PARTIAL, Mesh, Sharding, StateType, TensorType, Type

WHOLE = "whole"
_COLLECTIVE = re.compile(r"(?P<source>\w+) => (?P<target>\w+)")


@dataclass(frozen=True)
class _Slot:
    """A tensor operand, or one field of a state operand, with the names of its dims."""

    index: int
    name: str
    type: TensorType
    labels: tuple[NamedDim, ...]

    def at(self, axis: str) -> NamedDim | None:
        """The dim that is sharded over an axis."""
        place = self.type.sharding.placement(axis)
        return self.labels[place] if isinstance(place, int) else None

    def is_pending(self, axis: str) -> bool:
        return self.type.sharding.placement(axis) == PARTIAL

    def place_of(self, name: str) -> int | None:
        """Number of the dim of that name, None where it is absent or of size 1."""
        for place, label in enumerate(self.labels):
            if label.name == name and self.type.shape[place] != dim(1):
                return place
        return None


def propagate(
    name: str,
    operands: Sequence[Type],
    attrs: Mapping[str, Attr],
    results: Sequence[Type],
    mesh: Mesh | None = None,
) -> tuple[Type, ...]:
    """Result types with the shardings that the operands' shardings give.

    Args:
        name: of the op.
        operands: operand types with their shardings.
        attrs: attributes of the op.
        results: result types, whose shardings are replaced. A state's fields keep theirs, which are
            those of the operand that the state came from.
        mesh: if given, sharded sizes must divide by its axes.

    Raises: TypeMismatch naming the op, the operand, the axis and the rule.
    """
    record = op_def(name)
    if is_local(name, attrs):
        _check_local(name, operands)
        return tuple(results)
    if not _is_sharded(operands) and not record.has(COLLECTIVE):
        return tuple(_with_sharding(r, {}) if _is_sharded([r]) else r for r in results)
    complete = record.complete(attrs)
    rule_text = record.shard_rule(operands, complete)
    collective = _COLLECTIVE.fullmatch(rule_text)
    if collective:
        made = _collective(record, collective, operands, complete, results, mesh)
    else:
        made = _by_rule(record, rule_text, operands, results)
    if mesh is not None:
        for type_ in (*operands, *made):
            check_divides(type_, mesh)
    return made


def check_sharding(op: Op, mesh: Mesh | None = None) -> None:
    """Check that declared shardings of an op's results are those that its operands give.

    Raises: TypeMismatch naming the op, the operand, the axis and the rule.
    """
    types = [v.type for v in op.operands]
    declared = [v.type for v in op.results]
    if not _is_sharded((*types, *declared)):
        if is_local(op.name, op.attr) or not op_def(op.name).has(COLLECTIVE):
            return
    for value, wanted in zip(
        op.results, propagate(op.name, types, op.attr, declared, mesh), strict=True
    ):
        if value.type != wanted:
            raise TypeMismatch(
                f"{op.name}: the result {value.name} lies {_described(wanted)}, "
                f"declared {_described(value.type)}",
                advice=_rule_of(op_def(op.name), types, op.attr),
            )


def is_local(name: str, attrs: Mapping[str, Attr]) -> bool:
    """Whether an op is a collective in local form: its types are those of one rank's part."""
    return (name in OWN or name in MEETING) and bool(attrs.get("ranks", 0))


def _check_local(name: str, operands: Sequence[Type]) -> None:
    if _is_sharded(operands):
        raise TypeMismatch(
            f"{name} over parts of one rank takes no sharded operand: {operands[0]}",
            advice="leave ranks out where types are global",
        )


def _is_sharded(types: Sequence[Type]) -> bool:
    return any(part.sharding.axes for type_ in types for _, part in _parts(type_))


def _parts(type_: Type) -> Iterator[tuple[str, TensorType]]:
    """The tensor itself, or the fields of a state."""
    if isinstance(type_, TensorType):
        yield "", type_
        return
    yield from type_.fields


def _with_sharding(type_: Type, placements: Mapping[str, int | str]) -> Type:
    if isinstance(type_, StateType):
        return type_
    return replace(type_, sharding=Sharding.of(placements))


def _described(type_: Type) -> str:
    if isinstance(type_, StateType):
        return f"as {type_}"
    return f"@ {type_.sharding}" if type_.sharding.axes else "whole on every rank"


def _rule_of(record: OpDef, operands: Sequence[Type], attrs: Mapping[str, Attr]) -> str:
    text = record.shard_rule(operands, record.complete(attrs))
    return f'rule of {record.name}: "{text}"' if text else f"{record.name} has no sharding rule"


def _by_rule(
    record: OpDef, rule_text: str, operands: Sequence[Type], results: Sequence[Type]
) -> tuple[Type, ...]:
    rule = parse_rule(rule_text) if rule_text else None
    slots = _slots(record, rule, operands)
    placements: list[dict[str, int | str]] = [{} for _ in results]
    axes = sorted({axis for slot in slots for axis, _ in slot.type.sharding.axes})
    for axis in axes:
        if rule is None:
            raise _no_rule(record, axis, slots)
        found = _AxisRule(record, rule, axis, slots, len(operands)).placement()
        for index, result in enumerate(results):
            if isinstance(result, StateType):
                continue
            place = _result_place(rule, index, result, found)
            if place is not None:
                placements[index][axis] = place
    return tuple(_with_sharding(r, p) for r, p in zip(results, placements, strict=True))


def _no_rule(record: OpDef, axis: str, slots: Sequence[_Slot]) -> TypeMismatch:
    bad = next(s for s in slots if s.type.sharding.placement(axis) is not None)
    return TypeMismatch(
        f"{record.name} takes no sharded operands, {bad.name} is {bad.type}",
        advice=f"make it whole over {axis} first, by an all_gather or an all_reduce",
    )


def _slots(record: OpDef, rule: Rule | None, operands: Sequence[Type]) -> list[_Slot]:
    slots = []
    for index, type_ in enumerate(operands):
        spec = record.operands[min(index, len(record.operands) - 1)]
        name = f"{spec.name}[{index}]" if spec.variadic else spec.name
        for field, part in _parts(type_):
            _check_places(record, name, part)
            labels = rule.operand(index).labels(part.rank) if rule else ()
            slots.append(_Slot(index, f"{name}.{field}" if field else name, part, labels))
    return slots


def _check_places(record: OpDef, name: str, type_: TensorType) -> None:
    for axis, place in type_.sharding.axes:
        if isinstance(place, int) and not 0 <= place < type_.rank:
            raise TypeMismatch(
                f"{record.name}: {name} is sharded over {axis} in dim {place} of {type_.rank}"
            )


def _result_place(
    rule: Rule, index: int, result: TensorType, found: NamedDim | str | None
) -> int | str | None:
    if not isinstance(found, NamedDim):
        return found
    if found.contracted:
        return PARTIAL
    names = [label.name for label in rule.result(index).labels(result.rank)]
    return names.index(found.name)


@dataclass(frozen=True)
class _AxisRule:
    """A rule applied over one axis of the mesh."""

    record: OpDef
    rule: Rule
    axis: str
    slots: Sequence[_Slot]
    count: int

    def placement(self) -> NamedDim | str | None:
        """The name that is sharded, PARTIAL, or None where all operands are whole.

        Raises: TypeMismatch if the operands do not fit together.
        """
        pending = [s for s in self.slots if s.is_pending(self.axis)]
        sharded = [(s, label) for s in self.slots if (label := s.at(self.axis))]
        if pending:
            return self._pending(pending, bool(sharded))
        if not sharded:
            return None
        first, label = sharded[0]
        for slot, other in sharded:
            if other.whole or not (other.contracted or self._is_kept(other)):
                raise self._error(slot, f"must be whole in dim {other.name}", "all_gather")
            if other.name != label.name:
                raise self._error(
                    slot, f"is sharded in dim {other.name}, {first.name} in {label.name}", ""
                )
        for slot in self.slots:
            self._check_agrees(slot, first, label)
        return label

    def _pending(self, pending: Sequence[_Slot], meets_sharded: bool) -> str:
        indices = frozenset(s.index for s in pending)
        if not meets_sharded and self.rule.passes(indices, self.count):
            return PARTIAL
        names = " and ".join(s.name for s in pending)
        raise TypeMismatch(
            f"a pending sum over {self.axis} reaches {self.record.name}: an all_reduce is missing",
            text=f"{names}: {pending[0].type}",
            advice=self._advice("insert all_reduce (or reduce_scatter)"),
        )

    def _is_kept(self, label: NamedDim) -> bool:
        if self.rule.elementwise or label.name.startswith("..."):
            return True
        return all(label.name in [d.name for d in term.dims] for term in self.rule.results)

    def _check_agrees(self, slot: _Slot, first: _Slot, label: NamedDim) -> None:
        at = slot.at(self.axis)
        if at is not None:
            return
        if slot.place_of(label.name) is not None:
            raise self._error(
                slot, f"holds all of dim {label.name}, {first.name} is sharded in it", "take_shard"
            )
        if self.rule.multiplies(slot.index):
            return
        if label.contracted and not any(d.name == label.name for d in slot.labels):
            raise self._error(
                slot, f"would be added once per rank, since {first.name} makes a pending sum", ""
            )

    def _error(self, slot: _Slot, what: str, remedy: str) -> TypeMismatch:
        return TypeMismatch(
            f"{self.record.name}: {slot.name} {what}, over axis {self.axis}",
            text=f"{slot.name}: {slot.type}",
            advice=self._advice(f"insert {remedy}" if remedy else ""),
        )

    def _advice(self, remedy: str) -> str:
        rule = f'rule of {self.record.name}: "{self.rule.text}"'
        return f"{remedy} over {self.axis}; {rule}" if remedy else rule


def _collective(
    record: OpDef,
    match: re.Match[str],
    operands: Sequence[Type],
    attrs: Mapping[str, Attr],
    results: Sequence[Type],
    mesh: Mesh | None,
) -> tuple[Type, ...]:
    axis = str(attrs["axis"])
    (x,) = operands
    if not isinstance(x, TensorType):
        raise TypeMismatch(f"{record.name} of a state")
    wanted, target = (_placement(match[k], attrs, x.rank) for k in ("source", "target"))
    placements = dict(x.sharding.axes)
    actual = placements.pop(axis, None)
    if actual != wanted:
        raise TypeMismatch(
            f"{record.name} over {axis} takes an operand that is {_placed(wanted)}, "
            f"this one is {_placed(actual)}: {x}"
        )
    for place in (wanted, target):
        _check_innermost(record, axis, place, placements, mesh)
    if target is not None:
        placements[axis] = target
    return tuple(_with_sharding(r, placements) for r in results)


def _placement(word: str, attrs: Mapping[str, Attr], rank: int) -> int | str | None:
    if word == WHOLE:
        return None
    if word == PARTIAL:
        return PARTIAL
    place = attrs[word]
    if not isinstance(place, int) or not 0 <= place < rank:
        raise TypeMismatch(f"{word} = {place} is no dim of a tensor of rank {rank}")
    return place


def _placed(place: int | str | None) -> str:
    if place is None:
        return "whole"
    return "a pending sum" if place == PARTIAL else f"sharded in dim {place}"


def _check_innermost(
    record: OpDef,
    axis: str,
    place: int | str | None,
    others: Mapping[str, int | str],
    mesh: Mesh | None,
) -> None:
    """Of several axes that shard one dim, only the innermost may change alone."""
    if not isinstance(place, int):
        return
    order = [name for name, _ in mesh.axes] if mesh else []
    for other, at in others.items():
        if at != place:
            continue
        if axis not in order or other not in order or order.index(other) > order.index(axis):
            raise TypeMismatch(
                f"{record.name} over {axis}: dim {place} is sharded over {other} too",
                advice="the mesh must say that it is the outer axis; handle inner axes first",
            )


def check_divides(type_: Type, mesh: Mesh) -> None:
    """Check that every sharded size is a multiple of the ranks that share it.

    Symbolic sizes pass: they are padded when they are bound. Blocks of a format must stay whole.

    Raises: TypeMismatch naming the size and the axis.
    """
    for _, part in _parts(type_):
        for place in {p for _, p in part.sharding.axes if isinstance(p, int)}:
            ranks = _ranks(part, place, mesh)
            size = part.shape[place]
            if size.is_static and size.static % ranks:
                raise TypeMismatch(
                    f"dim {place} of {part} does not divide by {ranks} ranks of {mesh}",
                    advice="pad the size, or leave the dim whole",
                )
            block = block_extent(part, place)
            if ranks > 1 and block and size.is_static and size.static // ranks % block:
                finer = refined(part, mesh).dtype
                raise TypeMismatch(
                    f"{ranks} ranks of {mesh} cut blocks of {block} in dim {place} of {part}",
                    advice=f'refine_scales {{format = "{finer}"}} first, or leave the dim whole',
                )


def refined(type_: TensorType, mesh: Mesh) -> TensorType:
    """The type with the coarsest blocks that no rank's border cuts; itself where none is cut.

    Raises: TypeMismatch if a sharded size does not divide by its ranks.
    """
    if not isinstance(type_.dtype, Block):
        return type_
    parts: dict[int, int] = {}
    for place in {p for _, p in type_.sharding.axes if isinstance(p, int)}:
        ranks, size = _ranks(type_, place, mesh), type_.shape[place].static
        if size % ranks:
            raise TypeMismatch(
                f"dim {place} of {type_} does not divide by {ranks} ranks of {mesh}",
                advice="pad the size, or leave the dim whole",
            )
        parts[place] = size // ranks
    shape = tuple(n.static for n in type_.shape)
    return replace(type_, dtype=refined_format(type_.dtype, shape, parts))


def _ranks(type_: TensorType, place: int, mesh: Mesh) -> int:
    sizes = dict(mesh.axes)
    ranks = 1
    for axis, at in type_.sharding.axes:
        if axis not in sizes:
            raise TypeMismatch(f"{type_} names the axis {axis}, the mesh is {mesh}")
        ranks *= sizes[axis] if at == place else 1
    return ranks


def local_type(type_: TensorType, mesh: Mesh) -> TensorType:
    """The part of a tensor that one rank holds, as a plain type.

    Raises: TypeMismatch if a sharded size does not divide.
    """
    check_divides(type_, mesh)
    shape = tuple(_local_size(type_, i, mesh) for i in range(type_.rank))
    return replace(type_, shape=shape, sharding=Sharding())


def _local_size(type_: TensorType, place: int, mesh: Mesh) -> Dim:
    return type_.shape[place].ceildiv(_ranks(type_, place, mesh))


def local_attrs(
    name: str, attrs: Mapping[str, Attr], results: Sequence[Type], mesh: Mesh
) -> dict[str, Attr]:
    """Attributes of an op as one rank runs it: the ``shape`` of a view is that of its part."""
    found = dict(attrs)
    first = results[0]
    if op_def(name).has(VIEW) and "shape" in found and isinstance(first, TensorType):
        sizes = local_type(first, mesh).shape
        found["shape"] = tuple(n.attr for n in sizes)
    return found


__all__ = [
    "check_divides",
    "check_sharding",
    "is_local",
    "local_attrs",
    "local_type",
    "propagate",
]
