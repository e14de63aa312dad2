"""What a compilation starts from, and what it has made of one pipeline stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from metainfer.backends.registry import Backends
from metainfer.compiler.tuning.measured import NOTHING, Measured
from metainfer.hardware.device import Device
from metainfer.hardware.machine import Machine
from metainfer.ir.graph import Module
from metainfer.ir.histogram import RoutingHistogram
from metainfer.ir.ops.record import Array
from metainfer.ir.options import Options
from metainfer.ir.strategy import Strategy
from metainfer.models.spec import ModelSpec
from metainfer.passes.target import Decision, Report
from metainfer.runtime.checkpoint import Checkpoint

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What a compilation starts from."""

    spec: ModelSpec
    machine: Machine
    options: Options
    backends: Backends
    checkpoint: Checkpoint | None
    absent: str  # why there is no checkpoint
    report: Report
    progress: Progress
    argument: str
    constants: dict[str, Array]  # tensors that passes make
    routing: RoutingHistogram | None = None
    interpreted: bool = False  # whether every pass is checked by interpreting before and after
    measured: Measured = NOTHING  # times of groups on such a device

    @property
    def device(self) -> Device:
        """The device of rank 0."""
        return self.machine.device(0)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, compiled."""

    strategies: Mapping[str, Strategy]
    modules: Mapping[str, Module]
    decisions: Mapping[str, Sequence[Decision]]
    page_size: int
