"""layout: one packing per weight and use, one page size per state.

    before: linear(%x, @w: i8/32:f16[64,64])            $kv : pages(...) per token
    after:  linear(%x, @w: ... as "cpu.i8g32_n16")      $kv : pages(...) per token page 16

The packing is that of the kernels that lose least over the sizes of the phase, or of those that fit
the device; a weight that two uses want in two packings is held twice, and the report says what the
copy costs. Page sizes are chosen jointly: the one that most kernels take, raised or lowered before
a fast one is given up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from metainfer.backends.kernel import Query
from metainfer.ir.graph import Graph, Module, Op, Value
from metainfer.ir.types import StateType, TensorType
from metainfer.passes.candidates import (
    Candidate,
    candidates_of,
    cost_of,
    needs_kernel,
    query_of,
    sample_sizes,
    strided_of,
)
from metainfer.passes.packings import Packings, Place, fitting, packings_of
from metainfer.passes.target import Decision, Target
from metainfer.passes.weights import LoadEditor

PAGE_SIZES = (16, 32, 64, 128)
DEFAULT_PAGE = 16


def layout(module: Module, target: Target) -> Module:
    """Choose page sizes, then packings."""
    module = _choose_pages(module, target)
    chosen = fitting(module, _quick(module, target), target)
    for name in [g.name for g in module.graphs]:
        module = _pack_graph(module, name, target, chosen)
    return module


# --- packings ----------------------------------------------------------------------------------


def _quick(module: Module, target: Target) -> dict[Place, Packings]:
    """The cheapest packings of every group that reads weights."""
    found: dict[Place, Packings] = {}
    for graph in module.graphs:
        strided = strided_of(graph)
        for number, op in enumerate(graph.ops):
            if needs_kernel(op) and any(v.is_weight for v in op.operands):
                found[graph.name, number] = packings_of(op, target, module.limits(), strided)
    return found


def _pack_graph(
    module: Module, name: str, target: Target, chosen: Mapping[Place, Packings]
) -> Module:
    graph = module.graph(name)
    wanted: dict[tuple[str, str], list[int]] = {}
    for (where, number), packings in chosen.items():
        if where == name:
            for weight, packing in packings.items():
                wanted.setdefault((weight, packing), []).append(number)
    if not wanted:
        return module
    return _apply(module, graph, wanted, target)


def _apply(
    module: Module, graph: Graph, wanted: Mapping[tuple[str, str], list[int]], target: Target
) -> Module:
    editor = LoadEditor(module, graph.name)
    ops = list(graph.ops)
    plain_uses = _uses(graph)
    for (weight, packing), numbers in wanted.items():
        packed = editor.emit("pack", editor.made(weight), layout=packing)
        alone = len(plain_uses[weight]) == len(set(numbers))
        name = weight if alone else f"{weight}.as.{packing}"
        if alone:
            editor.update(weight, packed)
        else:
            editor.add(name, packed)
            size = packed.tensor.bytes_at({})
            target.report.add(
                Decision(
                    "layout",
                    f"{weight} of {graph.name}",
                    packing,
                    f"a second copy of {size / 2**20:.1f} MiB: uses want different packings",
                    data=(("bytes", size),),
                )
            )
        for number in numbers:
            ops[number] = _use_packed(ops[number], weight, Value(name, packed.type))
    return editor.finish(lambda g: replace(g, ops=tuple(ops)))


def _uses(graph: Graph) -> dict[str, set[int]]:
    uses: dict[str, set[int]] = {}
    for number, op in enumerate(graph.ops):
        for value in op.operands:
            uses.setdefault(value.name, set()).add(number)
    return uses


def _use_packed(op: Op, weight: str, packed: Value) -> Op:
    operands = tuple(packed if v.name == weight else v for v in op.operands)
    body = op.body
    if body is not None:
        renamed = {
            p.name: replace(p, type=packed.type)
            for p, v in zip(body.inputs, op.operands, strict=True)
            if v.name == weight
        }
        body = _retyped(body, renamed)
    return replace(op, operands=operands, body=body)


def _retyped(body: Graph, changed: Mapping[str, Value]) -> Graph:
    return replace(
        body,
        inputs=tuple(changed.get(v.name, v) for v in body.inputs),
        ops=tuple(
            replace(o, operands=tuple(changed.get(v.name, v) for v in o.operands)) for o in body.ops
        ),
    )


# --- pages -------------------------------------------------------------------------------------


def _choose_pages(module: Module, target: Target) -> Module:
    states = [v for g in module.graphs for v in g.states if v.state.kind == "pages"]
    if not states:
        return module
    size, reason, severity = _page_size(module, target)
    for state in states:
        target.report.add(Decision("layout", state.name, f"page {size}", reason, severity))
    return with_page_size(module, size)


def _page_size(module: Module, target: Target) -> tuple[int, str, str]:
    """The page size at which the groups that touch states are cheapest in sum.

    Larger pages than the smallest are looked at only if that one costs a group its best kernel:
    asking kernels may mean compiling them.
    """
    fixed = target.options.page_size or target.strategy.page_size
    reason = "as asked for" if target.options.page_size else "as the other phase chose"
    losses = _page_losses(module, fixed or DEFAULT_PAGE, target)
    if not losses and fixed:
        return fixed, reason, "info"
    if not losses:
        return DEFAULT_PAGE, "kernels take it, and small pages waste least", "info"
    scores = {size: _page_cost(module, size, target) for size in PAGE_SIZES}
    best = min(PAGE_SIZES, key=lambda size: (scores[size], size))
    if fixed:
        return fixed, f"{reason}; page {best} costs least. {'; '.join(losses)}", "fallback"
    losses = _page_losses(module, best, target)
    if losses:
        return best, f"no page size suits every group. {'; '.join(losses)}", "fallback"
    if best == DEFAULT_PAGE:
        return best, "kernels take it, and small pages waste least", "info"
    gain = scores[DEFAULT_PAGE] - scores[best]
    return (
        best,
        f"raised from {DEFAULT_PAGE}: saves {gain * 1e6:.1f} us a step over that size",
        "repair",
    )


def _page_cost(module: Module, size: int, target: Target) -> float:
    total = 0.0
    for _, query, candidates, env in _page_groups(module, size, target):
        usable = [c for c in candidates if c.is_usable]
        made = [c for c in usable if not c.kernel.generic] or usable
        # A size that leaves only generic kernels must lose to any that leaves a made one.
        penalty = 0.0 if made and not made[0].kernel.generic else 1.0
        costs = [cost_of(c, query, target, env).seconds for c in made]
        total += min(costs, default=10.0) + penalty
    return total


def _page_losses(module: Module, size: int, target: Target) -> list[str]:
    """Per group that loses its cheapest kernel to the page size: which, and what that costs."""
    found: dict[str, None] = {}
    for group, query, candidates, env in _page_groups(module, size, target):
        taken = [cost_of(c, query, target, env).seconds for c in candidates if c.is_usable]
        for candidate in candidates:
            if candidate.is_usable or candidate.ban or not _refuses_pages(candidate):
                continue
            saved = (
                min(taken, default=float("inf")) - cost_of(candidate, query, target, env).seconds
            )
            if saved > 0:
                wants = candidate.refusals[0].constraint
                found[f"{group}: {candidate.kernel.name} wants {wants}, {saved * 1e6:.1f} us"] = (
                    None
                )
    return list(found)


def _refuses_pages(candidate: Candidate) -> bool:
    """Whether the page size is all that the kernel refuses."""
    return all(r.constraint.startswith("page size") for r in candidate.refusals)


def _page_groups(
    module: Module, size: int, target: Target
) -> Iterator[tuple[str, Query, tuple[Candidate, ...], Mapping[str, int]]]:
    """Groups that touch states, with their candidates at a page size and typical sizes.

    Contexts are equally long at every page size: typical pages are counted in default ones.
    """
    changed = with_page_size(module, size)
    limits = changed.limits()
    env = sample_sizes(target, limits)[-1]
    if "P" in env:
        env = {**env, "P": max(env["P"] * DEFAULT_PAGE // size, 1)}
    for graph in changed.graphs:
        strided = strided_of(graph)
        for op in graph.ops:
            if op.is_call or not any(v.is_state for v in op.operands):
                continue
            query = query_of(op, target, limits, strided)
            yield f"{op.name} of {graph.name}", query, candidates_of(op, query, target), env


def with_page_size(module: Module, size: int) -> Module:
    """The module with the page size of all paged states set."""

    def state(type_: Any) -> Any:
        if isinstance(type_, StateType) and type_.kind == "pages":
            return replace(type_, page_size=size)
        return type_

    def value(v: Value) -> Value:
        return v if isinstance(v.type, TensorType) else replace(v, type=state(v.type))

    def graph(g: Graph) -> Graph:
        return replace(
            g,
            inputs=tuple(map(value, g.inputs)),
            states=tuple(map(value, g.states)),
            ops=tuple(op(o) for o in g.ops),
            outputs=tuple(map(value, g.outputs)),
            state_outputs=tuple(map(value, g.state_outputs)),
        )

    def op(o: Op) -> Op:
        body = graph(o.body) if o.body is not None else None
        return replace(
            o,
            operands=tuple(map(value, o.operands)),
            results=tuple(map(value, o.results)),
            body=body,
        )

    return replace(module, graphs=tuple(map(graph, module.graphs)))
