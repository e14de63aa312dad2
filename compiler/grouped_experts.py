"""Experts by grouped products, in an exported program: one op in place of sort, products, unsort.

    order = ids.flatten().argsort()             rows of each expert stand together
    h = grouped_mm(x[order // K], gate_up, offsets) ...
    y = grouped_mm(h, down, offsets) * weights.flatten()[order, None]
    y = y[inverse].view(T, K, D).sum(1)

The ops around the products have no meaning apart from them, and are spelled in many ways. So what
lies between x, ids and weights and a result is run on random numbers, and replaced where it
computes what the op does.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from metainfer.compiler.lowering import target_name
from metainfer.models import functional
from metainfer.passes.expert_gathers import Cut, roles

_PRODUCTS = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
_VIEWS = ("aten.transpose", "aten.permute", "aten.mT", "aten.to", "aten.contiguous", "aten.t")
_ACTIVATIONS = ("silu", "gelu_tanh")
# Relative to the largest result: the products round between, the op once.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
_MOST_ELEMENTS = 1 << 28  # of the weights, drawn at random: a gigabyte


def raise_grouped(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replace what is found, in place; the program comes back."""
    graph = program.graph
    while (group := _group(graph)) and _replaced(graph, group):
        graph.lint()
    return program


def _group(graph: fx.Graph) -> list[fx.Node]:
    """The first products that share their offsets."""
    by_offsets: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and target_name(node) in _PRODUCTS:
            offsets = node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")
            by_offsets.setdefault(offsets, []).append(node)
    return next((g for g in by_offsets.values() if len(g) in (2, 3)), [])


def _replaced(graph: fx.Graph, group: Sequence[fx.Node]) -> bool:
    weights = [_weight_of(node.args[1]) for node in group]
    stacks = [w for w in weights if w is not None]
    if len(stacks) != len(group) or sum(_fake(w).numel() for w in stacks) > _MOST_ELEMENTS:
        return False
    order = {node: place for place, node in enumerate(graph.nodes)}
    behind = _reached(group[-1], order)
    for root in behind:
        for operands in _operands(root, stacks, order):
            found = _match(root, operands, stacks, order)
            if found is not None:
                _substitute(graph, root, operands, stacks, *found)
                _drop(graph, set(_between(root, {*operands, *stacks}, order) or ()))
                return True
    return False


def _drop(graph: fx.Graph, region: set[fx.Node]) -> None:
    """Erase a region that nothing reads, writes in place and assertions about it among it."""
    for node in reversed(list(graph.nodes)):
        asserts = node.op == "call_function" and target_name(node) == "aten._assert_tensor_metadata"
        inside = node in region or (asserts and any(n in region for n in node.all_input_nodes))
        if inside and not node.users:
            graph.erase_node(node)


def _weight_of(argument: Any) -> fx.Node | None:
    node = argument
    while isinstance(node, fx.Node) and node.op == "call_function" and target_name(node) in _VIEWS:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "placeholder" or _fake(node).ndim != 3:
        return None
    return node


def _fake(node: fx.Node) -> Tensor:
    return cast(Tensor, node.meta.get("val"))


def _is_matrix(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.ndim == 2


def _reached(start: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Matrices that are made of a node's result, in order."""
    found = {start}
    for node in sorted(order, key=lambda n: order[n]):
        if any(n in found for n in node.all_input_nodes):
            found.add(node)
    found.discard(start)
    return [n for n in sorted(found, key=lambda n: order[n]) if _is_matrix(n)]


def _operands(
    root: fx.Node, stacks: Sequence[fx.Node], order: dict[fx.Node, int]
) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """(x, ids, weights) that the root may be made of, by their shapes, the nearest first."""
    near: set[fx.Node] = set()
    pending = [root]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in near:
                near.add(node)
                pending.append(node)
    known = sorted((n for n in near if _is_matrix(n)), key=lambda n: -order[n])
    tokens, width = map(str, _fake(root).shape)
    rows = [n for n in known if str(_fake(n).shape[0]) == tokens and n not in stacks]
    floats = [n for n in rows if _fake(n).is_floating_point()]
    ids = [n for n in rows if _fake(n).dtype in (torch.int64, torch.int32)]
    xs = [n for n in floats if str(_fake(n).shape[1]) == width]
    for x, index, shares in itertools.product(xs, ids, floats):
        if str(_fake(index).shape[1]) == str(_fake(shares).shape[1]):
            yield x, index, shares


def _between(
    root: fx.Node, leaves: set[fx.Node], order: dict[fx.Node, int]
) -> list[fx.Node] | None:
    """Calls that make the root of the leaves, sizes apart; None if something else takes part."""
    needed: set[fx.Node] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node in leaves or node in needed or isinstance(node.meta.get("val"), torch.SymInt | int):
            continue
        if node.op != "call_function":
            return None
        needed.add(node)
        pending.extend(node.all_input_nodes)
    return sorted(needed, key=lambda n: order[n])


def _match(
    root: fx.Node, operands: Sequence[fx.Node], stacks: Sequence[fx.Node],
    order: dict[fx.Node, int],
) -> tuple[tuple[Cut, Cut, Cut], str] | None:  # fmt: skip
    calls = _between(root, {*operands, *stacks}, order)
    if not calls:
        return None
    data = _drawn(operands, stacks)
    try:
        with torch.no_grad():
            made = _run(calls, dict(data))[root]
    except Exception:  # the operands are others than these: any op may refuse them
        return None
    shapes = {w.name: tuple(int(n) for n in _fake(w).shape) for w in stacks}
    held = {w.name: data[w] for w in stacks}
    x, ids, shares = (data[n] for n in operands)
    for cuts in roles(shapes):
        parts = [held[name][:, start:stop] for name, start, stop in cuts]
        for activation in _ACTIVATIONS:
            wanted = functional.experts(x, ids, shares, *parts, activation=activation)
            limit = _TOLERANCE.get(wanted.dtype, 1e-3) * float(wanted.abs().max())
            if made.shape == wanted.shape and float((made - wanted).abs().max()) <= limit:
                return cuts, activation
    return None


def _drawn(operands: Sequence[fx.Node], stacks: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(node: fx.Node) -> Tensor:
        shape = [_hint(n) for n in _fake(node).shape]
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return values.to(_fake(node).dtype)

    x, ids, shares = operands
    experts = int(_fake(stacks[0]).shape[0])
    rows, chosen = (_hint(n) for n in _fake(ids).shape)
    numbers = torch.rand((rows, experts), generator=generator).argsort(-1)[:, :chosen]
    found = {n: randn(n) for n in (x, shares, *stacks)}
    return {**found, ids: numbers.to(_fake(ids).dtype).contiguous()}


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _run(calls: Sequence[fx.Node], values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    def value(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        return _hint(node.meta["val"])

    for node in calls:
        args = map_arg(node.args, value)
        kwargs = dict(cast(Any, map_arg(node.kwargs, value)))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        values[node] = cast(Any, node.target)(*args, **kwargs)
    return values


def _substitute(
    graph: fx.Graph, root: fx.Node, operands: Sequence[fx.Node], stacks: Sequence[fx.Node],
    cuts: tuple[Cut, Cut, Cut], activation: str,
) -> None:  # fmt: skip
    named = {w.name: w for w in stacks}
    meta = {k: v for k, v in root.meta.items() if k in ("stack_trace", "nn_module_stack")}
    with graph.inserting_before(root):
        parts = []
        for name, start, stop in cuts:
            part = weight = named[name]
            if stop - start != int(_fake(weight).shape[1]):
                part = graph.call_function(torch.ops.aten.slice.Tensor, (weight, 1, start, stop))
                part.meta = {**meta, "val": _fake(weight)[:, start:stop]}
            parts.append(part)
        op = torch.ops.metainfer.experts.default
        made = graph.call_function(op, (*operands, *parts), {"activation": activation})
        made.meta = {**meta, "val": _fake(root)}
    root.replace_all_uses_with(made)
