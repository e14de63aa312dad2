"""Packings of the weights of each group: the cheapest, or the cheapest that fit the device.

The cheapest packing may widen a weight: four bytes for each 4-bit code. Where all weights in their
cheapest packings are too much for the device, they are weighed again by time and bytes, as
`quantize` did, with times of both phases: so these agree and share what lies in memory.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from metainfer.backends.kernel import Kernel
from metainfer.ir.graph import Module, Op
from metainfer.passes.candidates import (
    Candidate,
    candidates_of,
    cost_of,
    needs_kernel,
    query_of,
    sample_sizes,
    strided_of,
)
from metainfer.passes.target import Decision, Target
from metainfer.passes.weight_options import Option, choose_within, packing_options, weight_budget

Limits = Mapping[str, tuple[int, int]]
Packings = dict[str, str]  # weight -> name of its packing
Place = tuple[str, int]  # graph, number of the op
# Packings by operand: what two kernels must share to read one copy of a weight.
_Key = tuple[tuple[int, str], ...]


def packings_of(op: Op, target: Target, limits: Limits, strided: frozenset[str]) -> Packings:
    """Weight -> packing that is cheapest for the group; for its parts where no kernel takes it."""
    found: Packings = {}
    for part in parts_of(op, target, limits, strided):
        best = cheapest_layouts(part, target, limits, strided)
        found |= {
            part.operands[i].name: p for i, p in best.items() if p and part.operands[i].is_weight
        }
    return found


def parts_of(op: Op, target: Target, limits: Limits, strided: frozenset[str]) -> Iterator[Op]:
    """The group itself, or the ops of its body, operands as outside, where no kernel takes it."""
    if op.body is None or any(
        c.is_usable for c in candidates_of(op, query_of(op, target, limits, strided), target)
    ):
        yield op
        return
    outer = {p.name: v for p, v in zip(op.body.inputs, op.operands, strict=True)}
    for part in op.body.ops:
        named = replace(part, operands=tuple(outer.get(v.name, v) for v in part.operands))
        if needs_kernel(named):
            yield from parts_of(named, target, limits, strided)


def cheapest_layouts(
    op: Op, target: Target, limits: Mapping[str, tuple[int, int]], strided: frozenset[str]
) -> dict[int, str]:
    """Operand -> packing of the kernels that lose least to the best ones over the phase's sizes.

    Each size counts alike: were it the time in sum, the largest steps of a prefill would decide
    alone, and decode, which reads the weights again for every token, would want another copy.
    """
    query = query_of(op, target, limits, strided)
    usable = [c for c in candidates_of(op, query, target) if c.is_usable]
    groups: dict[_Key, list[Candidate]] = {}
    for candidate in usable:
        groups.setdefault(_key(candidate.kernel), []).append(candidate)
    if not groups:
        return {}
    sizes = sample_sizes(target, limits)
    prices = {
        key: [min(cost_of(c, query, target, env).seconds for c in members) for env in sizes]
        for key, members in groups.items()
    }
    least = [min(at_size) for at_size in zip(*prices.values(), strict=True)]

    def slowdown(key: _Key) -> tuple[bool, float]:
        is_generic = all(c.kernel.generic for c in groups[key])
        return is_generic, sum(p / best for p, best in zip(prices[key], least, strict=True))

    return dict(sorted(groups, key=slowdown)[0])


def _key(kernel: Kernel) -> _Key:
    return tuple(sorted((i, name) for i, name in kernel.layouts.items() if name))


# --- what fits -------------------------------------------------------------------------


def fitting(
    module: Module, quick: Mapping[Place, Packings], target: Target
) -> dict[Place, Packings]:
    """Packings of every group: the quickest if all weights fit so, else the quickest that fit.

    Args:
        module: with types of one rank.
        quick: packings of each group that cost least time in this phase.
        target: machine and kernels.
    """
    total, budget = _total(module, quick, target), weight_budget(target)
    if total <= budget:
        return dict(quick)
    limits, calls = module.limits(), _calls(module)
    places, options, counts = [], [], []
    strided = {graph.name: strided_of(graph) for graph in module.graphs}
    for (name, number), packings in quick.items():
        for part in parts_of(module.graph(name).ops[number], target, limits, strided[name]):
            weights = [i for i, v in enumerate(part.operands) if v.is_weight]
            found = packing_options(part, weights, target, limits) if weights else ()
            names = [part.operands[i].name for i in weights]
            found = _narrower(found, tuple(packings.get(n, "") for n in names))
            if found:
                places.append(((name, number), names))
                options.append(found)
                counts.append(calls[name])
    if all(len(o) == 1 for o in options):
        return dict(quick)
    chosen = choose_within(options, counts, budget)
    made: dict[Place, Packings] = {place: {} for place in quick}
    for (place, names), option in zip(places, chosen, strict=True):
        made[place] |= {n: p for n, p in zip(names, option.packings, strict=True) if p}
    _report(total, _total(module, made, target), budget, target)
    return made


def _narrower(options: Sequence[Option], taken: tuple[str, ...]) -> tuple[Option, ...]:
    """The packings taken, and those that are narrower, not just less padded."""
    now = next((o for o in options if o.packings == taken), None)
    if now is None:
        return tuple(options)
    return (now, *(o for o in options if o.bytes * 1.1 < now.bytes))


def _calls(module: Module) -> Counter[str]:
    return Counter({"main": 1}) + Counter(str(c.attr["block"]) for c in module.calls())


def _total(module: Module, packings: Mapping[Place, Packings], target: Target) -> int:
    """Bytes of all calls; a weight that two groups read in one packing counts once."""
    calls = _calls(module)
    sizes: dict[tuple[str, str, str], int] = {}
    for (name, number), chosen in packings.items():
        for value in module.graph(name).ops[number].operands:
            if value.is_weight:
                packing = chosen.get(value.name, "")
                held = (
                    target.costs.resident_bytes(replace(value.tensor, layout=packing)) * calls[name]
                )
                sizes[name, value.name, packing] = held
    return sum(sizes.values())


def _report(wanted: int, total: int, budget: float, target: Target) -> None:
    reason = (
        f"weights in the packings that are quickest take {wanted / 2**30:.2f} GiB, "
        f"{budget / 2**30:.2f} GiB are there for them; in the smaller ones {total / 2**30:.2f} GiB"
    )
    data = (("bytes", total), ("bytes_wanted", wanted))
    target.report.add(Decision("layout", "weights", "smaller packings", reason, data=data))
