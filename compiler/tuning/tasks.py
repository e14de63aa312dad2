"""What a plan has to be measured: its groups, their parts, by every kernel that may run them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from metainfer.backends.registry import Backends
from metainfer.compiler.cost import CostModel
from metainfer.compiler.tuning.keys import key_of, sizes_text
from metainfer.hardware.device import Device
from metainfer.hardware.machine import Machine
from metainfer.ir.graph import Choice, Graph, Module, Op
from metainfer.ir.options import Options
from metainfer.ir.plan import Plan
from metainfer.ir.strategy import Strategy
from metainfer.ir.streams import meets
from metainfer.ir.types import Mesh
from metainfer.passes.candidates import (
    candidates_of,
    cost_of,
    kind_of,
    needs_kernel,
    query_of,
    sample_sizes,
    strided_of,
)
from metainfer.passes.fuse import fuse
from metainfer.passes.regroup import smaller_groups
from metainfer.passes.select import inline_group
from metainfer.passes.target import Report, Target


@dataclass(frozen=True)
class Task:
    """One measurement: a group by a kernel at sizes.

    Attributes:
        group: text of its key.
        kind: op name, or kind of the fused group.
        phase: of the plan that it was met in first.
        kernel: name of the kernel.
        sizes: as the file says them.
        op: the group.
        env: values of the size symbols.
        device: that it is measured on.
        predicted_us: by the cost model alone.
        share_us: what the group takes of a step as predicted, its calls together; 0 for the part of
            a group.
    """

    group: str
    kind: str
    phase: str
    kernel: str
    sizes: str
    op: Op
    env: tuple[tuple[str, int], ...]
    device: Device
    predicted_us: float
    share_us: float


@dataclass(frozen=True)
class Met:
    """A group where it stands.

    Attributes:
        op: the group, without what was chosen for it.
        strided: values there that are views with gaps.
        calls: how often a step runs it; 0 for a part of a group.
        choices: kernels that the plan took; none for a part.
    """

    op: Op
    strided: frozenset[str]
    calls: int
    choices: tuple[Choice, ...] = ()


def tasks_of(plan: Plan, backends: Backends, phase: str = "") -> tuple[Task, ...]:
    """All measurements that a plan's choices rest on, those that decide most time first.

    Groups in which ranks meet are not among them: they take a fabric, not a device.

    Args:
        plan: the plan.
        backends: its kernels.
        phase: only those of this phase; "" for all.
    """
    found: dict[tuple[str, str, str], Task] = {}
    for target, module in targets_of(plan, backends):
        if phase in ("", target.strategy.phase):
            for met in met_in(module, target):
                for task in _of_op(met, target, module.limits()):
                    found.setdefault((task.group, task.kernel, task.sizes), task)
    shares: dict[str, float] = {}
    for task in found.values():
        shares[task.group] = max(shares.get(task.group, 0.0), task.share_us)
    return tuple(sorted(found.values(), key=lambda t: -shares[t.group]))


def targets_of(plan: Plan, backends: Backends) -> Iterator[tuple[Target, Module]]:
    """What the passes saw when they made a plan: one target for each phase of each stage."""
    machine = Machine.from_dict(dict(plan.meta["machine"]))
    options = Options.from_dict(dict(plan.meta["options"]))
    for phase in plan.phases:
        for stage in range(plan.layout.pp):
            strategy = strategy_of(plan.entry(phase, stage)["strategy"])
            costs = CostModel(backends.layouts, machine, strategy.mesh, strategy.first_rank)
            target = Target(machine, strategy, options, backends.kernels, costs, Report())
            yield target, plan.module(phase, stage)


def strategy_of(data: Mapping[str, Any]) -> Strategy:
    """The strategy that a plan holds as plain data."""
    axes = tuple((str(name), int(size)) for name, size in data["mesh"]["axes"])
    typical = tuple((str(name), int(size)) for name, size in data["typical"])
    fields = {**data, "mesh": Mesh(axes), "typical": typical, "experts": tuple(data["experts"])}
    return Strategy(**fields)


def met_in(module: Module, target: Target) -> Iterator[Met]:
    """The groups of a module that run by a kernel on one device, each followed by its parts.

    A group competes with its parts: both must be known, or the unknown one wins by a guess. For the
    same reason groups that the compiler split, and that rules form again, come last.
    """
    calls = {"main": 1}
    for call in module.calls():
        name = str(call.attr["block"])
        calls[name] = calls.get(name, 0) + 1
    for graph in module.graphs:
        strided = strided_of(graph)
        for op in graph.ops:
            if op.choices and needs_kernel(op) and not meets(op):
                plain = replace(op, choices=(), source=None, after=(), stream=0)
                yield Met(plain, strided, calls.get(graph.name, 0), op.choices)
                yield from _parts(plain, graph, strided, target, module.limits())
    yield from _wholes(module, target)


def _wholes(module: Module, target: Target) -> Iterator[Met]:
    """Groups that rules make of a compiled module's ops: those that were split, for one."""
    bare = replace(
        module,
        graphs=tuple(
            replace(g, ops=tuple(replace(op, choices=()) for op in g.ops)) for g in module.graphs
        ),
    )
    for before, graph in zip(bare.graphs, fuse(bare, target).graphs, strict=True):
        known, strided = set(before.ops), strided_of(before)
        for op in graph.ops:
            if op.body is not None and op not in known and not meets(op):
                yield Met(replace(op, source=None, after=(), stream=0), strided, 0)


def _parts(
    op: Op, graph: Graph, strided: frozenset[str], target: Target,
    limits: Mapping[str, tuple[int, int]],
) -> Iterator[Met]:  # fmt: skip
    if op.body is None:
        return
    inlined = inline_group(op)
    within = strided_of(replace(graph, ops=tuple(inlined))) | strided
    covers = [tuple(inlined), *smaller_groups(op, inlined, target, limits)]
    for part in dict.fromkeys(one for cover in covers for one in cover):
        if needs_kernel(part):
            yield Met(replace(part, source=None), within, 0)


def _of_op(met: Met, target: Target, limits: Mapping[str, tuple[int, int]]) -> Iterator[Task]:
    op = met.op
    query = query_of(op, target, limits, met.strided)
    candidates = [c for c in candidates_of(op, query, target) if c.is_usable]
    made = [c for c in candidates if not c.kernel.generic] or candidates
    key = key_of(op)
    for env in sample_sizes(target, limits):
        priced = [(cost_of(c, query, target, env).seconds * 1e6, c) for c in made]
        least = min((us for us, _ in priced), default=0.0)
        if not is_possible(op, env):
            continue
        for us, candidate in priced:
            yield Task(
                key.text, kind_of(op), target.strategy.phase, candidate.kernel.name,
                sizes_text(key.sizes(env)), op, tuple(sorted(env.items())), target.device, us,
                least * met.calls,
            )  # fmt: skip


def is_possible(op: Op, env: Mapping[str, int]) -> bool:
    """Whether there are steps of such sizes: each sequence's tokens find room in its pages."""
    states = [v.state for v in op.operands if v.is_state]
    reads_pages = any(v.name == "step.pages" for v in op.operands)
    if not states or not reads_pages:
        return True
    room = env["P"] * (states[0].page_size or 1)
    return env["T"] >= env["B"] and -(-env["T"] // env["B"]) <= room
