"""Predicted times of a compiled phase: per group and in sum, at the sizes that users ask about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metainfer.backends.kernel import Cost, Query
from metainfer.backends.registry import Backends
from metainfer.compiler.cost import CostModel
from metainfer.compiler.tuning.measured import NOTHING, Measured
from metainfer.hardware.machine import Machine
from metainfer.hardware.sharing import sharing_of
from metainfer.ir.flatten import FlatOp, flatten
from metainfer.ir.graph import Module, Op
from metainfer.ir.strategy import Strategy
from metainfer.ir.streams import is_empty
from metainfer.ir.timeline import Timeline, simulate
from metainfer.passes.overlap_prices import choice_at
from metainfer.passes.step_tasks import tasks_of
from metainfer.runtime.in_place import in_place


def phase_sizes(module: Module, strategy: Strategy, tokens: int) -> dict[str, int]:
    """Values of the symbols for a step of so many tokens."""
    env = {s.name: s.high for s in module.symbols}
    env.update((k, v) for k, v in strategy.typical if k in env)
    if "T" in env:
        env["T"] = tokens
    if strategy.phase == "decode":
        env.update({s: tokens for s in ("B", "R") if s in env})
    return env


def predict(
    module: Module, machine: Machine, backends: Backends, strategy: Strategy,
    measured: Measured = NOTHING,
) -> list[dict[str, Any]]:  # fmt: skip
    """Predicted step times at the smallest and largest step of the phase.

    Units: seconds; bytes and operations are sums over the step.
    """
    high = dict(module.limits()).get("T", (1, 1))[1]
    rows = []
    for tokens in sorted({1, high}):
        env = phase_sizes(module, strategy, tokens)
        rows.append(predict_step(module, machine, backends, env, strategy.first_rank, measured))
    return rows


@dataclass(frozen=True)
class GroupCost:
    """One group of a step.

    Attributes:
        item: the group.
        kernel: which kernel runs at these sizes.
        cost: predicted.
        roofline_seconds: what no kernel can beat.
    """

    item: FlatOp
    kernel: str
    cost: Cost
    roofline_seconds: float


def group_costs(
    module: Module, machine: Machine, backends: Backends, env: Mapping[str, int],
    first_rank: int = 0, measured: Measured = NOTHING,
) -> list[GroupCost]:  # fmt: skip
    """Predicted cost of every group of a step, in order; views and empty parts cost nothing."""
    device = machine.device(first_rank)
    model = CostModel(backends.layouts, machine, module.mesh, first_rank, measured=measured)
    limits = module.limits()
    cache: dict[Any, tuple[Cost, float]] = {}
    found: list[GroupCost] = []
    flat = flatten(module)
    over = in_place(flat, backends)
    for item in flat.ops:
        op = item.op
        if not op.choices or is_empty(op, env):
            continue
        kernel = backends.kernels.get(choice_at(op, env).kernel)
        apart = not any(v.name in over for v in op.results)
        key = (kernel.name, op.attrs, tuple(v.type for v in (*op.operands, *op.results)), apart)
        if key not in cache:
            query = Query(op, device, limits)
            repairs = kernel.repairs_for(kernel.refusals(query)) or ()
            waste = sum(r.waste(query) for r in repairs)
            cost = model.kernel(kernel, op, device, env, waste, apart=apart)
            # What a kernel compresses is bounded by compressed bytes.
            bound = replace(model, compression=kernel.option.partition("=")[2] or "none")
            least = bound.roofline(op, device, env, kernel.efficiency.rate)
            cache[key] = cost, least.seconds
        found.append(GroupCost(item, kernel.name, *cache[key]))
    return found


def step_timeline(
    module: Module, machine: Machine, groups: Sequence[GroupCost], env: Mapping[str, int],
    first_rank: int = 0,
) -> Timeline:  # fmt: skip
    """When each group of a step begins and ends on its stream.

    Args:
        module: a compiled phase.
        machine: where it runs.
        groups: their costs, as `group_costs` gives them.
        env: values of the size symbols.
        first_rank: whose device it is.
    """
    costs = {g.item.op.results[0].name: g for g in groups}

    def price(op: Op) -> tuple[float, float]:
        found = costs.get(op.results[0].name) if op.results else None
        if found is None:
            return 0.0, 1.0
        seconds = found.cost.seconds
        return seconds, min(found.roofline_seconds / seconds, 1.0) if seconds else 1.0

    tasks, _ = tasks_of([item.op for item in flatten(module).ops], price, env)
    return simulate(tasks, sharing_of(machine.device(first_rank)))


def predict_step(
    module: Module, machine: Machine, backends: Backends, env: Mapping[str, int],
    first_rank: int = 0, measured: Measured = NOTHING,
) -> dict[str, Any]:  # fmt: skip
    """Sums over the groups of a step at concrete sizes. Units: seconds, bytes, operations.

    ``seconds`` is the simulated time of the step's streams, ``serial_seconds`` the sum of its
    groups; ``meeting_seconds`` is how long ranks exchange, ``hidden_seconds`` how much of it lies
    beside computation.
    """
    groups = group_costs(module, machine, backends, env, first_rank, measured)
    timeline = step_timeline(module, machine, groups, env, first_rank)
    return {
        "sizes": dict(env),
        "seconds": timeline.seconds,
        "serial_seconds": sum(g.cost.seconds for g in groups),
        "meeting_seconds": timeline.meeting_seconds,
        "hidden_seconds": timeline.hidden_seconds,
        "roofline_seconds": sum(g.roofline_seconds for g in groups),
        "bytes": sum(g.cost.bytes for g in groups),
        "flops": sum(g.cost.flops for g in groups),
        "groups": len(groups),
    }
