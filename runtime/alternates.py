"""Alternates of collectives: another algorithm where the one that was planned is broken here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from metainfer.backends.kernel import Kernel
from metainfer.backends.registry import Backends
from metainfer.hardware.collective_cost import is_forbidden, prices
from metainfer.hardware.machine import Machine
from metainfer.ir.graph import Choice, Graph, Module, Op
from metainfer.ir.streams import meeting_of


@dataclass(frozen=True)
class Alternates:
    """What may stand in for a broken algorithm.

    Attributes:
        machine: by whose prices alternates are ranked.
        backends: the kernels.
        is_exact: whether only those count that add no rounding of their own.
    """

    machine: Machine
    backends: Backends
    is_exact: bool

    def of(self, op: str, num_ranks: int, payload_bytes: int, broken: frozenset[str]) -> list[str]:
        """Algorithms of a collective that are not broken, the cheapest first.

        Args:
            op: name of the collective.
            num_ranks: ranks that meet.
            payload_bytes: at which they are compared.
            broken: names of kernels.
        """
        ranks = tuple(range(min(num_ranks, self.machine.num_devices)))
        cost = {p.algorithm: p.seconds for p in prices(op, self.machine, ranks, payload_bytes)}
        found = [k for k in self.backends.kernels.candidates(op) if self._may(k, broken)]
        names = [k.name.rpartition(f".{op}_")[2] for k in found]
        # What has no price is not for these ranks; what the machine's policy forbids is neither.
        usable = [n for n in names if n in cost and not is_forbidden(self.machine, n, "any")]
        return sorted(usable, key=lambda name: cost[name])

    def _may(self, kernel: Kernel, broken: frozenset[str]) -> bool:
        """Whether a kernel works, and changes no more than the plan's do."""
        is_apt = not kernel.option and not (self.is_exact and kernel.error)
        return is_apt and kernel.name not in broken


def without(module: Module, broken: frozenset[str], alternates: Alternates) -> Module | None:
    """The module with other algorithms for the broken ones; None if there is none left.

    Args:
        module: compiled.
        broken: kernels of collectives by themselves; groups that hold them change with them.
        alternates: what may stand in.
    """
    highs = {name: high for name, (_, high) in module.limits().items()}
    graphs: list[Graph] = []
    for graph in module.graphs:
        ops = [_changed(op, highs, broken, alternates) for op in graph.ops]
        kept = [op for op in ops if op is not None]
        if len(kept) < len(ops):
            return None
        graphs.append(replace(graph, ops=tuple(kept)))
    return replace(module, graphs=tuple(graphs))


def planned_algorithm(op: Op, meeting: Op, kernel: str) -> str:
    """The kernel of the collective by itself, of a kernel of the group that holds it."""
    kind = str(op.attr.get("kind", op.name))
    return kernel.replace(f".{kind}_", f".{meeting.name}_")


def _changed(
    op: Op, highs: Mapping[str, int], broken: frozenset[str], alternates: Alternates
) -> Op | None:
    meeting = meeting_of(op)
    if meeting is None:
        return op
    choices: list[Choice] = []
    for choice in op.choices:
        planned = planned_algorithm(op, meeting, choice.kernel)
        if planned not in broken:
            choices.append(choice)
            continue
        sizes = {**highs, **({choice.symbol: choice.limit} if choice.symbol else {})}
        payload = meeting.operands[0].tensor.bytes_at(sizes)
        num_ranks = int(str(meeting.attr["ranks"]))
        stem = choice.kernel.removesuffix(planned.rpartition(f".{meeting.name}_")[2])
        known = {k.name for k in alternates.backends.kernels.all()}
        found = [
            stem + name
            for name in alternates.of(meeting.name, num_ranks, payload, broken)
            if stem + name in known
        ]
        if not found:
            return None
        choices.append(replace(choice, kernel=found[0]))
    return replace(op, choices=tuple(choices))
