"""The cost model: one roofline per group, from the machine file, or what was measured.

Where a group was measured (`compiler.tuning`) its time is the measured one; else
time = max(bytes / memory rate, operations / arithmetic rate) + launches, with the fractions of the
rates that the kernel's record states. Where the device's description has no rate for the arithmetic
of a kernel, that of another type stands in, and the basis of the figure says which.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from metainfer.backends.kernel import Cost, Kernel
from metainfer.backends.layout import LayoutRegistry
from metainfer.compiler.tuning.measured import NOTHING, Measured
from metainfer.hardware.collective_cost import Price, cheapest, price_of
from metainfer.hardware.device import Device
from metainfer.hardware.machine import Machine
from metainfer.ir.dtypes import Block
from metainfer.ir.errors import HardwareError
from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.ops.record import op_def, op_sizes
from metainfer.ir.simulate import axis_groups
from metainfer.ir.streams import meeting_of, payload_bytes
from metainfer.ir.types import Mesh, StateType, TensorType


@dataclass(frozen=True)
class CostModel:
    """Predicts how long a group takes on a device.

    Attributes:
        layouts: to know how wide a packed weight is; a layout may widen what it holds.
        machine: where collectives run; None where there are none.
        mesh: axes over the ranks of one stage.
        first_rank: where they begin among the machine's ranks.
        compression: what sums may be sent as (`ir.options.Options.compress_collectives`).
        measured: times of groups that were measured on such a device; they go before the model's.
    """

    layouts: LayoutRegistry
    machine: Machine | None = None
    mesh: Mesh = field(default_factory=Mesh)
    first_rank: int = 0
    compression: str = "none"
    measured: Measured = NOTHING

    def kernel(
        self, kernel: Kernel, op: Op, device: Device, env: Mapping[str, int], waste: float = 0.0,
        *, apart: bool = False,
    ) -> Cost:  # fmt: skip
        """Predicted cost of a group by a kernel at concrete sizes.

        Args:
            kernel: the candidate.
            op: the group.
            device: where it runs.
            env: values of the size symbols.
            waste: extra work of repairs, as a fraction.
            apart: whether results that might take an operand's place did not get it.
        """
        meeting = meeting_of(op)
        if meeting is not None:
            return self._meeting(kernel, op, meeting, device, env)
        made = self.measured.adjusted(
            kernel, op, env, lambda sizes: self._analytic(kernel, op, device, sizes, waste)
        )
        if not (apart and kernel.starts_as_copy):
            return made
        moved = sum(2 * _tensor_bytes(op.results[i], env) for i in kernel.in_place)
        seconds = moved / (device.memory_bandwidth.sustained * kernel.efficiency.memory)
        seconds += len(kernel.in_place) * self.launch_seconds(device, kernel.backend)
        return replace(made, seconds=made.seconds + seconds, bytes=made.bytes + moved)

    def failure(self, kernel: Kernel, op: Op) -> str:
        """Why a kernel could not be measured for a group on such a device; "" if it could."""
        return self.measured.failure(kernel, op)

    def _analytic(
        self, kernel: Kernel, op: Op, device: Device, env: Mapping[str, int], waste: float
    ) -> Cost:
        """One roofline by the kernel's fractions of the device's rates."""
        flops, compulsory = work_of(op, env)
        compulsory += self._widening(kernel, op)
        moved = compulsory * (1.0 + kernel.extra_bytes + waste)
        rate, basis = self._rate(kernel, op, device)
        memory = moved / (device.memory_bandwidth.sustained * kernel.efficiency.memory)
        effort = kernel.effort(op, device, env) if kernel.effort is not None else 1.0
        compute = flops * effort * (1.0 + waste) / (rate * kernel.efficiency.compute)
        launch = self.launch_seconds(device, kernel.backend) * kernel.launches
        bound = "memory" if memory >= compute else "compute"
        if launch > max(memory, compute):
            bound = "latency"
        return Cost(max(memory, compute) + launch, flops, int(moved), bound, basis)

    def _meeting(
        self, kernel: Kernel, op: Op, meeting: Op, device: Device, env: Mapping[str, int]
    ) -> Cost:
        """Cost of a collective by the algorithm that the kernel runs, and of the pass behind it."""
        payload = payload_bytes(meeting, env)
        algorithm = kernel.name.removeprefix(f"{kernel.backend}.{kernel.op}_")
        price = self._price(meeting, payload, algorithm)
        if op.body is None:
            beside = (kernel.launches - 1) * self.launch_seconds(device, kernel.backend)
            beside += kernel.extra_bytes * payload / device.memory_bandwidth.sustained
            return Cost(price.seconds + beside, 0, payload, "fabric", price.basis)
        moved = _pass_bytes(op.body, meeting, env)
        memory = moved / (device.memory_bandwidth.sustained * kernel.efficiency.memory)
        seconds = price.seconds + memory + self.launch_seconds(device, kernel.backend)
        return Cost(seconds, 0, payload + moved, "fabric", price.basis)

    def _price(self, op: Op, payload: int, algorithm: str) -> Price:
        if self.machine is None:
            raise HardwareError(f"{op.name} cannot be priced without a machine")
        groups = self._groups(op)
        return max(
            (price_of(op.name, algorithm, self.machine, group, payload) for group in groups),
            key=lambda p: p.seconds,
        )

    def _groups(self, op: Op) -> list[tuple[int, ...]]:
        """The machine's ranks that meet in a collective, group by group."""
        groups = axis_groups(self.mesh, str(op.attr["axis"]))
        return [tuple(self.first_rank + r for r in group) for group in groups]

    def _widening(self, kernel: Kernel, op: Op) -> int:
        """Bytes that the kernel's packings read beyond the weights' own formats."""
        if op.name == "embedding" or not kernel.layouts:
            return 0  # only the rows looked up are read
        extra = 0
        for position, name in kernel.layouts.items():
            if name and position < len(op.operands):
                type_ = op.operands[position].tensor
                extra += self.resident_bytes(replace(type_, layout=name)) - type_.bytes_at({})
        return extra

    def resident_bytes(self, type_: TensorType) -> int:
        """Bytes of a weight as it lies in memory, in its packing."""
        if type_.layout:
            return self.layouts.get(type_.layout).num_bytes(type_)
        return type_.bytes_at({})

    def roofline(
        self, op: Op, device: Device, env: Mapping[str, int], arithmetic: str = ""
    ) -> Cost:
        """What no kernel can beat: the device's sustained rates and no launch.

        Args:
            op: the group.
            device: where it runs.
            env: values of the size symbols.
            arithmetic: name of the rate that the kernel computes at; "" is that of the op's type.
        """
        meeting = meeting_of(op)
        if meeting is not None and self.machine is not None:
            payload = payload_bytes(meeting, env)
            machine, groups = self.machine, self._groups(meeting)
            least = max(self.collective(meeting.name, machine, g, payload) for g in groups)
            moved = _pass_bytes(op.body, meeting, env) if op.body is not None else 0
            least += moved / device.memory_bandwidth.sustained
            return Cost(least, 0, payload + moved, "fabric")
        flops, moved = work_of(op, env)
        rate, _ = _device_rate(device, arithmetic or _arithmetic(op))
        memory, compute = moved / device.memory_bandwidth.sustained, flops / rate
        bound = "memory" if memory >= compute else "compute"
        return Cost(max(memory, compute), flops, moved, bound)

    def collective(
        self, name: str, machine: Machine, ranks: Sequence[int], payload_bytes: int
    ) -> float:
        """Seconds of a collective by the cheapest algorithm (`hardware.collective_cost`)."""
        is_exact = self.compression == "none"
        return cheapest(name, machine, tuple(ranks), payload_bytes, is_exact=is_exact).seconds

    def launch_seconds(self, device: Device, backend: str = "") -> float:
        """Time of one launch.

        Inside a bound program (a command list on a CPU, a captured graph on a GPU) that is the
        kernel's floor; a torch op on a CPU is dispatched from Python each time.
        """
        if device.kind == "cpu" and backend == "torch":
            return device.launch_latency_us * 1e-6
        return device.kernel_floor_us * 1e-6

    def _rate(self, kernel: Kernel, op: Op, device: Device) -> tuple[float, str]:
        return _device_rate(device, kernel.efficiency.rate or _arithmetic(op))


def _device_rate(device: Device, name: str) -> tuple[float, str]:
    """(operations a second, what that is based on)."""
    try:
        rate = device.rate(name)
    except HardwareError:
        rate = device.rate("f32")
    is_own = rate.dtype == name
    return rate.sustained, "analytic" if is_own else f"analytic, by the rate of {rate.dtype}"


def _arithmetic(op: Op) -> str:
    """Name of the type that an op computes in: its first floating-point operand's."""
    for value in op.operands:
        if isinstance(value.type, TensorType) and value.type.dtype.is_float:
            dtype = value.type.dtype
            return "f32" if isinstance(dtype, Block) else dtype.name
    return "f32"


def work_of(op: Op, env: Mapping[str, int]) -> tuple[int, int]:
    """Operations and compulsory bytes of a group at concrete sizes.

    A fused group does its body's arithmetic, but moves only what crosses its border.
    """
    if op.name != "fused" or op.body is None:
        record, sizes = op_def(op.name), op_sizes(op, env)
        return record.flops(sizes), record.bytes(sizes)
    inner = [work_of(o, env) for o in op.body.ops]
    return sum(f for f, _ in inner), fused_bytes(op.body, env)


def _pass_bytes(body: Graph, meeting: Op, env: Mapping[str, int]) -> int:
    """Traffic of what follows a collective in a group: its result is read, once.

    What was received on the way there belongs to the collective's own price, as where it is alone.
    """
    sent = _tensor_bytes(meeting.operands[0], env)
    return fused_bytes(body, env) - sent + _tensor_bytes(meeting.result, env)


# Ops that read only what they pick of an operand.
_LOOKUPS = frozenset({"experts", "embedding", "gather"})


def fused_bytes(body: Graph, env: Mapping[str, int]) -> int:
    """Traffic across the border of a fused group: each input once, each result once."""
    inside = {v.name for o in body.ops for v in o.results}
    total = sum(_tensor_bytes(v, env) for v in body.outputs)
    total += sum(_tensor_bytes(v, env) for v in body.inputs)
    for inner in body.ops:
        # States are touched by their own ops (a page written, a context read), never as a whole.
        if any(v.is_state for v in inner.operands):
            tensors = [v for v in (*inner.operands, *inner.results) if v.name in inside]
            own = op_def(inner.name).bytes(op_sizes(inner, env))
            total += max(own - sum(_tensor_bytes(v, env) for v in tensors), 0)
        if inner.name in _LOOKUPS:
            whole = sum(_tensor_bytes(v, env) for v in (*inner.operands, *inner.results))
            total -= max(whole - op_def(inner.name).bytes(op_sizes(inner, env)), 0)
    return total


def _tensor_bytes(value: Value, env: Mapping[str, int]) -> int:
    if isinstance(value.type, StateType):
        return 0
    return value.type.bytes_at(env)
