"""Candidates for a group: which kernels apply, what repairs they need, what they cost.

Shared by `layout` (which packing pays) and `select` (which kernel at which size).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metainfer.backends.kernel import Cost, Kernel, Query, Refusal, Repair
from metainfer.ir.graph import Graph, Op
from metainfer.ir.simulate import axis_groups
from metainfer.ir.streams import meeting_of, meets
from metainfer.ir.views import VIEW_OPS, moving_values, strided_values
from metainfer.passes.target import Target


@dataclass(frozen=True)
class Candidate:
    """One kernel for one group.

    Attributes:
        kernel: the kernel.
        refusals: what it refuses, repairs not yet applied; empty if it applies as it is.
        repairs: what makes it apply; None if nothing does.
        ban: why the user, the machine's policy or exactness forbids it, or "".
    """

    kernel: Kernel
    refusals: tuple[Refusal, ...] = ()
    repairs: tuple[Repair, ...] | None = ()
    ban: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether the kernel can be taken."""
        return self.repairs is not None and not self.ban

    @property
    def is_forced(self) -> bool:
        """Whether it is the user who forbids it."""
        return self.ban.startswith("--")

    def waste(self, query: Query) -> float:
        """Extra work of the repairs, as a fraction."""
        return sum(r.waste(query) for r in self.repairs or ())


def kind_of(op: Op) -> str:
    """What kernels register for: the op's name, or the fused group's kind."""
    return str(op.attr["kind"]) if op.name == "fused" else op.name


def needs_kernel(op: Op) -> bool:
    """Whether a kernel must run for the op; views and calls need none."""
    return not op.is_call and op.name not in VIEW_OPS


def strided_of(graph: Graph) -> frozenset[str]:
    """Values of a graph that are views with gaps, or begin where no fixed address is."""
    return strided_values(graph.ops) | moving_values(graph.ops)


def query_of(
    op: Op, target: Target, limits: Mapping[str, tuple[int, int]], strided: frozenset[str]
) -> Query:
    """The question that kernels' constraints are asked."""
    gaps = frozenset(i for i, v in enumerate(op.operands) if v.name in strided)
    meeting = meeting_of(op)
    if meeting is None:
        return Query(op, target.device, limits, gaps)
    axis, first = str(meeting.attr["axis"]), target.strategy.first_rank
    groups = axis_groups(target.strategy.mesh, axis)
    met = tuple(tuple(first + rank for rank in group) for group in groups)
    return Query(op, target.device, limits, gaps, target.machine, met)


def candidates_of(op: Op, query: Query, target: Target) -> tuple[Candidate, ...]:
    """All kernels registered for the group, usable or not."""
    found: list[Candidate] = []
    kernels: Sequence[Any] = target.kernels.candidates(kind_of(op))
    for kernel in kernels:
        refusals = kernel.refusals(query)
        repairs = kernel.repairs_for(refusals) if refusals else ()
        found.append(Candidate(kernel, refusals, repairs, _ban(kernel, op, target)))
    return tuple(found)


def _ban(kernel: Kernel, op: Op, target: Target) -> str:
    pinned = dict(target.options.pins).get(kind_of(op))
    if pinned is not None and pinned != kernel.name:
        return f"--pin {kind_of(op)}={pinned}"
    if kernel.name in target.options.forbids:
        return "--forbid"
    if kernel.error and target.strategy.exact:
        return f"adds a relative error of {kernel.error:.1e}, exact kernels are wanted"
    if kernel.option:
        name, _, value = kernel.option.partition("=")
        if getattr(target.options, name) != value:
            flag = f"--{name.replace('_', '-')} {value}"
            return f"it changes numbers by up to {kernel.error:.1e}: only with {flag}"
    phase, names = target.strategy.phase, [("kernel", kernel.name)]
    if meets(op):
        names.append(("collective", kernel.name.removeprefix(f"{kernel.backend}.{kernel.op}_")))
    for subject, name in names:
        for policy in target.machine.stances(subject, name, phase):
            if policy.stance == "forbid":
                return f"policy of the machine against {policy.name}: {policy.reason}"
    failure = target.costs.failure(kernel, op)
    return f"it failed when it was measured: {failure}" if failure else ""


def cost_of(candidate: Candidate, query: Query, target: Target, env: Mapping[str, int]) -> Cost:
    """Predicted cost at concrete sizes, repairs included."""
    waste = candidate.waste(query)
    made: Cost = target.costs.kernel(candidate.kernel, query.op, query.device, env, waste)
    return made


def sample_sizes(
    target: Target, limits: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, int], ...]:
    """Sizes to compare candidates at: powers of two of the leading symbol, others typical."""
    typical = {name: high for name, (_, high) in limits.items()}
    typical.update((k, v) for k, v in target.strategy.typical if k in limits)
    symbol = leading_symbol(limits)
    if symbol is None:
        return (typical,)
    low, high = limits[symbol]
    points = sorted({min(max(low, 2**i), high) for i in range(high.bit_length() + 1)} | {low, high})
    return tuple(_at(typical, symbol, n, target.strategy.phase) for n in points)


def _at(typical: Mapping[str, int], symbol: str, size: int, phase: str) -> dict[str, int]:
    env = {**typical, symbol: size}
    if phase == "decode":
        # One token of each sequence: the sizes move together.
        env.update({s: size for s in ("B", "R") if s in env})
    return env


def leading_symbol(limits: Mapping[str, tuple[int, int]]) -> str | None:
    """The symbol that kernel tables select by: tokens of the step, else the first one."""
    if "T" in limits:
        return "T"
    return next(iter(limits), None)
