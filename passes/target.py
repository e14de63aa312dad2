"""What a pass may see of the outside: the machine, the strategy, kernels' contracts and costs.

`backends.kernel` holds contracts only (records, constraints, costs); it is the one module of the
backends that passes import.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from metainfer.backends.kernel import Cost, Kernel, Registry
from metainfer.hardware.device import Device
from metainfer.hardware.machine import Machine
from metainfer.ir.graph import Op
from metainfer.ir.histogram import RoutingHistogram
from metainfer.ir.ops.record import Array
from metainfer.ir.options import Options
from metainfer.ir.strategy import Strategy
from metainfer.ir.types import TensorType


class CostModel(Protocol):
    """Predicts times (`compiler.cost.CostModel`)."""

    def kernel(
        self, kernel: Kernel, op: Op, device: Device, env: Mapping[str, int], waste: float = 0.0
    ) -> Cost:
        """Predicted cost of a group by a kernel."""
        ...

    def failure(self, kernel: Kernel, op: Op) -> str:
        """Why a kernel could not be measured for a group, "" if it could or nobody tried."""
        ...

    def roofline(
        self, op: Op, device: Device, env: Mapping[str, int], arithmetic: str = ""
    ) -> Cost:
        """What no kernel can beat that computes at the named rate."""
        ...

    def resident_bytes(self, type_: TensorType) -> int:
        """Bytes of a weight as it lies in memory, in its packing."""
        ...

    def collective(
        self, name: str, machine: Machine, ranks: Sequence[int], payload_bytes: int
    ) -> float:
        """Predicted seconds of a collective among ranks, payload as in `hardware.Collective`."""
        ...


@dataclass(frozen=True)
class Decision:
    """One line of the report: what was wanted, what was taken, and why.

    Attributes:
        place: pass, or group.
        subject: what it is about ("@self_attn.q_proj.weight").
        chosen: what was taken.
        reason: why, with the estimated cost where there is one.
        severity: "info", "repair" or "fallback".
        data: numbers for machines.
    """

    place: str
    subject: str
    chosen: str
    reason: str
    severity: str = "info"
    data: tuple[tuple[str, Any], ...] = ()


@dataclass
class Report:
    """Decisions in the order in which passes made them."""

    decisions: list[Decision] = field(default_factory=list)

    def add(self, decision: Decision) -> None:
        """Append a decision, unless the same one stands there already."""
        if decision not in self.decisions:
            self.decisions.append(decision)

    def drop(self, place: str, subject: str) -> None:
        """Take back what was decided about something that a later pass took apart."""
        self.decisions = [d for d in self.decisions if (d.place, d.subject) != (place, subject)]


@dataclass(frozen=True)
class Target:
    """The outside, as a pass sees it.

    Attributes:
        machine: where the plan runs.
        strategy: of the phase.
        options: what the user asked for.
        kernels: all kernels' contracts.
        costs: predicts times.
        report: gets every decision.
        routing: how often each expert is chosen, None if nobody recorded it.
        constants: gets tensors that a pass makes and no checkpoint holds, by full name.
    """

    machine: Machine
    strategy: Strategy
    options: Options
    kernels: Registry
    costs: CostModel
    report: Report
    routing: RoutingHistogram | None = None
    constants: dict[str, Array] = field(default_factory=dict[str, Array])

    @property
    def device(self) -> Device:
        """The device of rank 0."""
        return self.machine.device(0)
