"""select: cover each group with kernels, as a table by size.

    before: %1 = linear(%0, @w) : f32[T,64]
    after:  %1 = linear(%0, @w) : f32[T,64] by {T <= 16: cpu.linear_w8a8, else: torch.linear_f32}

The cheapest legal kernel wins at each size. A fused group for which its parts together are cheaper,
or for which there is no kernel, is split again: into smaller groups, or into its ops. Refusals are
repaired or reported; a generic kernel is a fallback, which --strict makes an error.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metainfer.backends.kernel import Cost, Query
from metainfer.ir.errors import StrictError, Unsupported
from metainfer.ir.graph import Choice, Graph, Module, Op, Value
from metainfer.ir.printer import print_op
from metainfer.ir.streams import meeting_of, meets, payload_bytes
from metainfer.ir.types import TensorType
from metainfer.passes.candidates import (
    Candidate,
    candidates_of,
    cost_of,
    kind_of,
    leading_symbol,
    needs_kernel,
    query_of,
    sample_sizes,
    strided_of,
)
from metainfer.passes.gains import gain_of_kernel
from metainfer.passes.regroup import smaller_groups
from metainfer.passes.target import Decision, Target

# What falls back, by the pass that says so.
_FALLBACKS = {
    "select": ("group", "with only a generic kernel"),
    "layout": ("state", "in pages that a faster kernel refuses"),
    "quantize_activations": ("request", "for fp8 activations on a device without fp8 units"),
}


@dataclass(frozen=True)
class _Row:
    """The choice at one size."""

    env: Mapping[str, int]
    best: Candidate
    cost: Cost
    runner_up: tuple[str, float] | None
    unforced: tuple[str, float] | None  # the choice without --pin and --forbid, where it is faster


def select(module: Module, target: Target) -> Module:
    """Choose kernels for all groups.

    Raises: Unsupported if a group has no kernel at all; StrictError under --strict if anything fell
    back (a generic kernel here, a page size in `layout`), listing every one.
    """
    limits = module.limits()
    for graph in module.graphs:
        module = module.with_graph(_select_graph(graph, target, limits))
    if target.options.strict:
        _refuse_fallbacks(target)
    return module


def _select_graph(graph: Graph, target: Target, limits: Mapping[str, tuple[int, int]]) -> Graph:
    ops: list[Op] = []
    for op in graph.ops:
        if not needs_kernel(op) or meets(op):
            ops.append(op)  # algorithms of collectives are the next pass's
        else:
            ops.extend(covered(op, graph, target, limits))
    return replace(graph, ops=tuple(ops))


def covered(
    op: Op, graph: Graph, target: Target, limits: Mapping[str, tuple[int, int]]
) -> list[Op]:
    """An op with its kernel table, or the parts of a group with theirs, reported.

    Args:
        op: a group of the graph.
        graph: where it stands.
        target: the outside.
        limits: bounds of the size symbols.

    Raises: Unsupported if no kernel takes it.
    """
    if op.name == "fused":
        return _fused_or_split(op, graph, target, limits)
    return [choose_kernels(op, graph, target, limits)]


def _fused_or_split(
    op: Op, graph: Graph, target: Target, limits: Mapping[str, tuple[int, int]]
) -> list[Op]:
    strided = strided_of(graph)
    whole = _total(op, strided, target, limits)
    inlined = inline_group(op)
    inner = replace(graph, ops=tuple(inlined))
    inner_strided = strided_of(inner) | strided
    pinned = kind_of(op) in dict(target.options.pins)
    covers = [tuple(inlined)]
    # What a sum over ranks saves by being one with what follows it is not in its price.
    if whole is None or not (pinned or meets(op)):
        covers += smaller_groups(op, inlined, target, limits)
    priced = [(_sum(cover, inner_strided, target, limits), cover) for cover in covers]
    found = [(seconds, cover) for seconds, cover in priced if seconds is not None]
    split, parts = min(found, key=lambda pair: pair[0], default=(None, tuple(inlined)))
    if whole is not None and (pinned or split is None or whole <= split):
        return [choose_kernels(op, graph, target, limits)]
    if split is None:
        raise _no_kernel(op, graph, target, limits)
    reason = (
        "no kernel takes it whole"
        if whole is None
        else f"its parts save {(whole - split) * 1e6:.1f} us"
    )
    forced = _cost_of_forced_split(op, parts, inner_strided, target, limits)
    if forced is not None:
        kernel, seconds = forced
        reason += f"; forced: {kernel} would take {seconds * 1e6:.1f} us less"
    data = (("unforced_split", list(forced)),) if forced is not None else ()
    groups = [kind_of(o) for o in parts if needs_kernel(o)]
    is_apart = not any(o.name == "fused" for o in parts)
    chosen = "split into its ops" if is_apart else f"split into {', '.join(groups)}"
    # Parts that are cheaper are a choice; parts that alone can be had are what is left.
    severity = "repair" if whole is None or forced is not None else "info"
    target.report.add(Decision(f"select {graph.name}", kind_of(op), chosen, reason, severity, data))
    inner = replace(graph, ops=parts)
    return [
        choose_kernels(o, inner, target, limits, inner_strided) if needs_kernel(o) else o
        for o in parts
    ]


def _sum(
    ops: Sequence[Op], strided: frozenset[str], target: Target,
    limits: Mapping[str, tuple[int, int]],
) -> float | None:  # fmt: skip
    """Cost of ops one after the other, None if one of them has no usable kernel."""
    parts = [_total(o, strided, target, limits) for o in ops if needs_kernel(o)]
    return None if any(p is None for p in parts) else sum(p for p in parts if p is not None)


def _cost_of_forced_split(
    op: Op, inlined: Sequence[Op], strided: frozenset[str], target: Target,
    limits: Mapping[str, tuple[int, int]],
) -> tuple[str, float] | None:  # fmt: skip
    """(kernel, seconds lost) where only a --pin or --forbid made the group be split."""
    query = query_of(op, target, limits, strided)
    forced = [
        replace(c, ban="")
        for c in candidates_of(op, query, target)
        if c.is_forced and c.repairs is not None
    ]
    if not forced:
        return None
    sizes = sample_sizes(target, limits)
    env = sizes[0] if target.strategy.phase == "decode" else sizes[-1]
    whole = min((cost_of(c, query, target, env).seconds, c.kernel.name) for c in forced)
    parts = 0.0
    for part in inlined:
        if needs_kernel(part):
            asked = query_of(part, target, limits, strided)
            usable = _usable(candidates_of(part, asked, target))
            parts += min(cost_of(c, asked, target, env).seconds for c in usable)
    return (whole[1], parts - whole[0]) if whole[0] < parts else None


def inline_group(op: Op) -> list[Op]:
    """The body's ops in place of the group, their inner values renamed after its first result."""
    body = op.body
    assert body is not None
    names: dict[str, Value] = {p.name: v for p, v in zip(body.inputs, op.operands, strict=True)}
    names.update((o.name, r) for o, r in zip(body.outputs, op.results, strict=True))
    base = op.results[0].name

    def local(value: Value) -> Value:
        if value.name in names or value.name.startswith("step."):
            return names.get(value.name, value)
        return Value(f"{base}.{value.name[1:]}", value.type)

    return [
        replace(
            o,
            operands=tuple(local(v) for v in o.operands),
            results=tuple(local(v) for v in o.results),
            source=o.source or op.source,
        )
        for o in body.ops
    ]


def _total(
    op: Op, strided: frozenset[str], target: Target, limits: Mapping[str, tuple[int, int]]
) -> float | None:
    """Cost in sum over the sampled sizes, None without a usable kernel."""
    query = query_of(op, target, limits, strided)
    # Weights are packed by now: a kernel that reads them otherwise is no alternative.
    usable = [c for c in _usable(candidates_of(op, query, target)) if _layouts_fit(c, op)]
    if not usable:
        return None
    sizes = sample_sizes(target, limits)
    return sum(min(cost_of(c, query, target, env).seconds for c in usable) for env in sizes)


def _usable(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Kernels that apply; generic ones only where no made one does."""
    usable = [c for c in candidates if c.is_usable]
    return [c for c in usable if not c.kernel.generic] or usable


def choose_kernels(
    op: Op,
    graph: Graph,
    target: Target,
    limits: Mapping[str, tuple[int, int]],
    strided: frozenset[str] | None = None,
) -> Op:
    """The op with its kernel table, reported.

    Args:
        op: a group of the graph.
        graph: where it stands.
        target: the outside.
        limits: bounds of the size symbols.
        strided: values that are views with gaps; the graph's own if None.

    Raises: Unsupported if no kernel takes it.
    """
    query = query_of(op, target, limits, strided_of(graph) if strided is None else strided)
    found = candidates_of(op, query, target)
    usable = [c for c in _usable(found) if _layouts_fit(c, op)]
    if not usable:
        raise _no_kernel(op, graph, target, limits)
    rows = [_row(usable, found, query, target, env) for env in sample_sizes(target, limits)]
    choices = _compress(rows, leading_symbol(limits))
    _report(op, graph, rows, found, query, target)
    return replace(op, choices=choices)


def _layouts_fit(candidate: Candidate, op: Op) -> bool:
    """Whether the weights are packed as the kernel reads them."""
    for position, value in enumerate(op.operands):
        if isinstance(value.type, TensorType) and value.is_weight:
            if value.type.layout != candidate.kernel.layouts.get(position, ""):
                return False
    return True


def _row(
    usable: Sequence[Candidate],
    found: Sequence[Candidate],
    query: Query,
    target: Target,
    env: Mapping[str, int],
) -> _Row:
    priced = sorted(
        ((cost_of(c, query, target, env), c) for c in usable), key=lambda p: p[0].seconds
    )
    preferred = [p for p in priced if _is_preferred(p[1], target)]
    cost, best = (preferred or priced)[0]
    others = [c for c in found if c.is_usable and c.kernel.name != best.kernel.name]
    rest = sorted((cost_of(c, query, target, env).seconds, c.kernel.name) for c in others)
    runner_up = (rest[0][1], rest[0][0] - cost.seconds) if rest else None
    return _Row(env, best, cost, runner_up, _unforced(found, cost, query, target, env))


def _unforced(
    found: Sequence[Candidate], cost: Cost, query: Query, target: Target, env: Mapping[str, int]
) -> tuple[str, float] | None:
    """(kernel, seconds) that would be taken if the user had not forced another choice."""
    free = [replace(c, ban="") if c.is_forced else c for c in found]
    if free == list(found):
        return None
    priced = [(cost_of(c, query, target, env).seconds, c.kernel.name) for c in _usable(free)]
    seconds, name = min(priced)
    return (name, seconds) if seconds < cost.seconds else None


def _is_preferred(candidate: Candidate, target: Target) -> bool:
    stances = target.machine.stances("kernel", candidate.kernel.name, target.strategy.phase)
    return any(p.stance == "prefer" for p in stances)


def _compress(rows: Sequence[_Row], symbol: str | None) -> tuple[Choice, ...]:
    """Merge neighbouring sizes with one kernel into the rows of a table."""
    choices: list[Choice] = []
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        name = row.best.kernel.name
        if after is None or symbol is None:
            choices.append(Choice(name))
        elif after.best.kernel.name != name:
            choices.append(Choice(name, symbol, row.env[symbol]))
    return tuple(choices)


def _report(
    op: Op,
    graph: Graph,
    rows: Sequence[_Row],
    found: Sequence[Candidate],
    query: Query,
    target: Target,
) -> None:
    last = rows[-1] if target.strategy.phase != "decode" else rows[0]
    kernel = last.best.kernel
    repairs = [r.text for r in last.best.repairs or ()]
    ideal = _roofline(op, target, last.env, kernel.efficiency.rate)
    loss = max(last.cost.seconds - ideal, 0.0)
    parts = [f"{last.cost.seconds * 1e6:.1f} us at {_sizes(last.env)}, {last.cost.bound}-bound"]
    if kernel.error:
        parts.append(f"adds a relative error of up to {kernel.error:.1e}")
    if repairs:
        parts.append(f"repaired: {'; '.join(repairs)} ({last.best.waste(query):.0%} more work)")
    if last.unforced is not None:
        name, seconds = last.unforced
        lost = last.cost.seconds - seconds
        parts.append(f"forced: {name} would take {lost * 1e6:.1f} us less")
    severity = "repair" if repairs else "info"
    if kernel.generic:
        severity = "fallback"
        parts.append(
            f"generic: {kernel.launches} launches, about {loss * 1e6:.1f} us over the roofline"
        )
    alternates = [
        {"kernel": c.kernel.name, "refused": [str(r) for r in c.refusals], "ban": c.ban}
        for c in found
        if not c.is_usable
    ]
    saved = gain_of_kernel(op, kernel.launches, last.env)
    data = {
        "graph": graph.name,
        "op": print_op(replace(op, body=None)) if op.body is None else kind_of(op),
        "result": op.results[0].name,
        "source": str(op.source or ""),
        "table": [[r.best.kernel.name, dict(r.env), r.cost.seconds] for r in rows],
        "bases": [r.cost.basis for r in rows],
        "seconds": last.cost.seconds,
        "flops": last.cost.flops,
        "bytes": last.cost.bytes,
        "saves": {"bytes": saved.bytes, "launches": saved.launches},
        "bound": last.cost.bound,
        "basis": last.cost.basis,
        "roofline_seconds": ideal,
        "next_best": list(last.runner_up) if last.runner_up else None,
        "unforced": list(last.unforced) if last.unforced else None,
        "refused": alternates,
        "repairs": repairs,
        "generic": kernel.generic,
        **_crossovers(op, rows),
    }
    target.report.add(
        Decision(
            f"select {graph.name}",
            group_subject(op),
            kernel.name,
            "; ".join(parts),
            severity,
            tuple(data.items()),
        )
    )


def group_subject(op: Op) -> str:
    """What a decision about a group is said of."""
    return f"{kind_of(op)} {op.results[0].name}"


def _crossovers(op: Op, rows: Sequence[_Row]) -> dict[str, Any]:
    """Of a collective, at each size: bytes, kernel, seconds, basis, next best and its gap."""
    meeting = meeting_of(op)
    if meeting is None:
        return {}
    found = []
    for row in rows:
        name, gap = row.runner_up or ("", 0.0)
        size = payload_bytes(meeting, row.env)
        made = row.cost
        found.append([size, row.best.kernel.name, made.seconds, made.basis, name, gap])
    return {"crossovers": found}


def _roofline(op: Op, target: Target, env: Mapping[str, int], arithmetic: str) -> float:
    cost: Cost = target.costs.roofline(op, target.device, env, arithmetic)
    return cost.seconds


def _sizes(env: Mapping[str, int]) -> str:
    return ", ".join(f"{k}={v}" for k, v in env.items())


def _no_kernel(
    op: Op, graph: Graph, target: Target, limits: Mapping[str, tuple[int, int]]
) -> Unsupported:
    query = query_of(op, target, limits, strided_of(graph))
    lines = []
    for c in candidates_of(op, query, target):
        why = (
            c.ban or "; ".join(map(str, c.refusals)) or "its weights are packed for another kernel"
        )
        lines.append(f"{c.kernel.name}: {why}")
    return Unsupported(
        f"no kernel for {kind_of(op)} on {target.device.name}",
        text="\n".join(
            [print_op(replace(op, body=None)) if op.body is None else kind_of(op), *lines]
        ),
        origin=str(op.source or graph.name),
        advice="lift a --pin, a --forbid or a policy, or add a kernel (CONTRIBUTING, recipe d)",
    )


def _refuse_fallbacks(target: Target) -> None:
    fallbacks = [d for d in target.report.decisions if d.severity == "fallback"]
    if not fallbacks:
        return
    raise StrictError(
        f"the {target.strategy.phase} plan for {target.device.name} falls back: "
        f"{_fallback_counts(fallbacks)}",
        text="\n".join(f"{d.place}: {d.subject} -> {d.chosen}: {d.reason}" for d in fallbacks),
        advice="compile without --strict to accept them, lift a --page-size, --pin or --forbid, "
        "or add kernels for this device",
    )


def _fallback_counts(fallbacks: Sequence[Decision]) -> str:
    """How many there are of each kind, in words."""
    parts = []
    for place, count in Counter(d.place.split()[0] for d in fallbacks).items():
        noun, what = _FALLBACKS.get(place, ("decision", f"of {place}"))
        parts.append(f"{count} {noun}{'s' * (count != 1)} {what}")
    return ", ".join(parts)
