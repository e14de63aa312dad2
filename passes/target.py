"""What a pass may see of the outside: the machine, the strategy, kernels' contracts and costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from metainfer.hardware.device import Device
from metainfer.hardware.machine import Machine
from metainfer.ir.graph import Op
from metainfer.ir.options import Options
from metainfer.ir.strategy import Strategy


class KernelContract(Protocol):
    """What passes need to know of a kernel (`backends.kernel.Kernel`)."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def layouts(self) -> Mapping[int, str]: ...
    @property
    def generic(self) -> bool: ...
    @property
    def error(self) -> float: ...
    def refusals(self, query: Any) -> Sequence[Any]: ...
    def repairs_for(self, refusals: Sequence[Any]) -> Sequence[Any] | None: ...


class KernelSet(Protocol):
    """Kernels by what they implement (`backends.kernel.Registry`)."""

    def candidates(self, op: str) -> Sequence[KernelContract]: ...
    def get(self, name: str) -> KernelContract: ...


class CostModel(Protocol):
    """Predicts times (`compiler.cost.CostModel`)."""

    def kernel(
        self, kernel: Any, op: Op, device: Device, env: Mapping[str, int], waste: float = 0.0
    ) -> Any: ...


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


@dataclass(frozen=True)
class Target:
    """The outside, as a pass sees it."""

    machine: Machine
    strategy: Strategy
    options: Options
    kernels: KernelSet
    costs: CostModel
    report: Report
    layouts: Any = None

    @property
    def device(self) -> Device:
        """The device of rank 0."""
        return self.machine.device(0)
