"""Layers that are alike are traced once; the others are copies of what the first became.

Tracing dominates the time of a capture: of 94 equal layers all would be traced to make one block.
A layer is like another if it is of the same class, its attributes are equal, and its parameters
have the same shapes; it is then called with tensors of the same shapes. What cannot be compared
counts as different, and is traced.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn

from metainfer.compiler.lowering import Lowering
from metainfer.ir.graph import Op, Value

_PLAIN = (int, float, str, bool, type(None), torch.dtype)
# What every nn.Module holds; parameters and children are compared by themselves.
_INTERNAL = frozenset({*vars(nn.Module()), "_parameters", "_buffers", "_modules"})


@torch.library.custom_op("metainfer::layer_begin", mutates_args=())
def layer_begin(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Mark where the traced layer of a group begins: its inputs, passed on."""
    return [x.clone() for x in inputs]


@layer_begin.register_fake
def _(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in inputs]


@torch.library.custom_op("metainfer::layer_end", mutates_args=())
def layer_end(output: torch.Tensor, number: int) -> torch.Tensor:
    """Mark where the traced layer of a group ends: its output, passed on."""
    return output.clone()


@layer_end.register_fake
def _(output: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(output)


@torch.library.custom_op("metainfer::layer_again", mutates_args=())
def layer_again(inputs: list[torch.Tensor], number: int, member: int) -> torch.Tensor:
    """Stand for one more layer of a group, whose output is like its first input."""
    return inputs[0].clone()


@layer_again.register_fake
def _(inputs: list[torch.Tensor], number: int, member: int) -> torch.Tensor:
    return torch.empty_like(inputs[0])


@dataclass(eq=False)
class _Group:
    """Layers that are alike.

    Attributes:
        members: (path, layer), in the model's order.
        calls: how often each was called.
        first: number of the one that was traced, -1 before any was.
        inputs: description of the traced one's inputs.
        fits: whether its output is like its first input.
    """

    members: list[tuple[str, nn.Module]]
    calls: list[int] = field(default_factory=list[int])
    first: int = -1
    inputs: tuple[Any, ...] = ()
    fits: bool = False


class Repeats:
    """Groups of like layers of a model, and how their calls are lowered."""

    def __init__(self, groups: Sequence[_Group] = ()) -> None:
        self._groups = list(groups)
        self._begins: dict[int, tuple[int, tuple[Value, ...]]] = {}
        self._spans: dict[int, tuple[int, int, Value]] = {}

    @property
    def is_sound(self) -> bool:
        """Whether no layer of a group was called twice: states and blocks want that."""
        return all(n <= 1 for g in self._groups for n in g.calls)

    def lowerings(self) -> dict[str, Any]:
        """What the marks become."""
        return {
            "metainfer.layer_begin": self._begin,
            "metainfer.layer_end": self._end,
            "metainfer.layer_again": self._again,
        }

    def _begin(self, s: Lowering, n: fx.Node) -> tuple[Value, ...]:
        inputs, number = n.args
        values = tuple(s.value(x) for x in cast(Sequence[Any], inputs))
        self._begins[cast(int, number)] = (len(s.builder.ops), values)
        return values

    def _end(self, s: Lowering, n: fx.Node) -> Value:
        output, number = s.value(n.args[0]), cast(int, n.args[1])
        self._spans[number] = (self._begins[number][0], len(s.builder.ops), output)
        return output

    def _again(self, s: Lowering, n: fx.Node) -> Value:
        inputs, number, member = cast(tuple[Any, int, int], n.args)
        group = self._groups[number]
        before, after = f"{group.members[group.first][0]}.", f"{group.members[member][0]}."
        start, stop, output = self._spans[number]
        values = [s.value(x) for x in inputs]
        swap = {v.name: w for v, w in zip(self._begins[number][1], values, strict=True)}
        copies = _Copies(s, before, after, swap)
        for index in range(start, stop):
            copies.add(s.builder.ops[index], s.owner[index])
        copies.states()
        return copies.value(output)


@dataclass(frozen=True)
class _Copies:
    """Copies ops of one layer for another: names begin otherwise, results are new."""

    lowering: Lowering
    before: str
    after: str
    swap: dict[str, Value]

    def value(self, value: Value) -> Value:
        found = self.swap.get(value.name)
        if found is not None:
            return found
        sigil, bare = value.name[:1], value.name[1:]
        if sigil in "@$" and bare.startswith(self.before):
            return replace(value, name=sigil + self._renamed(bare))
        return value

    def _renamed(self, name: str) -> str:
        return self.after + name.removeprefix(self.before)

    def add(self, op: Op, owner: str) -> None:
        made = tuple(self.lowering.builder.fresh(v.type) for v in op.results)
        operands = tuple(self.value(v) for v in op.operands)
        self.swap.update({v.name: w for v, w in zip(op.results, made, strict=True)})
        self.lowering.builder.append(replace(op, operands=operands, results=made))
        inside = f"{owner}.".startswith(self.before)
        self.lowering.owner.append(self._renamed(f"{owner}.")[:-1] if inside else owner)

    def states(self) -> None:
        """Declare the copy's states, and their last versions."""
        known = self.lowering
        for name in [n for n in known.states if n.startswith(self.before)]:
            known.states[self._renamed(name)] = self.value(known.states[name])
            known.final[self._renamed(name)] = self.value(known.final[name])


@contextmanager
def repeated(model: nn.Module) -> Iterator[Repeats]:
    """Within, calls of a layer that is like one traced before become a single mark."""
    groups = _groups(model)
    changed = [layer for group in groups for _, layer in group.members]
    try:
        for number, group in enumerate(groups):
            for member, (_, layer) in enumerate(group.members):
                layer.forward = _forward(group, number, member, layer.forward)
        yield Repeats(groups)
    finally:
        for layer in changed:
            del layer.forward


def _forward(group: _Group, number: int, member: int, original: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        group.calls[member] += 1
        described = tuple(map(_described, args))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if kwargs or not tensors or None in described:
            return original(*args, **kwargs)
        if group.first < 0:
            group.first, group.inputs = member, described
            passed = iter(layer_begin(tensors, number))
            output = original(*(next(passed) if isinstance(a, torch.Tensor) else a for a in args))
            group.fits = isinstance(output, torch.Tensor) and _described(output) == described[0]
            return layer_end(output, number) if group.fits else output
        if group.fits and described == group.inputs:
            return layer_again(tensors, number, member)
        return original(*args)

    return forward


def _described(argument: Any) -> Any:
    """An argument as something to compare: a tensor by its sizes and type; None if it cannot be."""
    if isinstance(argument, torch.Tensor):
        return ("tensor", *map(str, argument.shape), str(argument.dtype))
    return ("plain", type(argument), argument) if isinstance(argument, _PLAIN) else None


# --- which layers are alike --------------------------------------------------------------------


def _groups(model: nn.Module) -> list[_Group]:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    found: list[tuple[Any, _Group]] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(p) for p in lists):
            continue
        lists.append(f"{path}." if path else "")
        for name, layer in module.named_children():
            full = f"{path}.{name}" if path else name
            form = _form(layer, f"{full}.", first)
            if form is None or "forward" in vars(layer):
                continue
            group = next((g for f, g in found if f == form), None)
            if group is None:
                group = _Group([])
                found.append((form, group))
            group.members.append((full, layer))
    groups = [g for _, g in found if len(g.members) > 1]
    for group in groups:
        group.calls = [0] * len(group.members)
    return groups


class _Same:
    """Any object, equal only to itself."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]


def _form(layer: nn.Module, prefix: str, first: dict[int, str]) -> Any:
    """What makes a layer compute what it does, its numbers apart; None if it cannot be told."""
    parts: list[Any] = []
    for path, module in layer.named_modules():
        hooks = (v for k, v in vars(module).items() if "_hooks" in k)
        if module._buffers or any(hooks):
            return None
        own = {k: _plain(v) for k, v in vars(module).items() if k not in _INTERNAL}
        parts.append((path, type(module), own))
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        if first[id(parameter)] != prefix + name:
            return None
        parts.append((name, tuple(parameter.shape), parameter.dtype))
    return parts


def _plain(value: Any) -> Any:
    """A value to compare by content where that says all, else by identity."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, list | tuple):
        return (type(value), [_plain(v) for v in value])
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), {f.name: _plain(getattr(value, f.name)) for f in fields(value)})
    return _Same(value)
