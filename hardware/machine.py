"""A machine as frozen values: devices in rank order, and the graph that joins them.

Files are read by metainfer.hardware.load; this module only holds what they say. Equal machines hash
equal; `Machine.to_dict` and `Machine.from_dict` carry them through JSON.
"""

import dataclasses
import hashlib
import json
import types
import typing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from metainfer.hardware.device import Device, Policy, interpolate
from metainfer.ir.errors import HardwareError

if TYPE_CHECKING:
    from metainfer.hardware.topology import Topology


@dataclass(frozen=True)
class Node:
    """One host.

    Units: memory_bytes in bytes, 0 if not stated.
    """

    name: str
    memory_bytes: int
    source: str


@dataclass(frozen=True)
class Socket:
    """One CPU package of a host; the root ports of devices that name no root belong to it.

    Units: memory_bandwidth in bytes/s, 0 if not stated.
    """

    name: str
    node: str
    numa: int
    cores: int
    memory_bandwidth: float


@dataclass(frozen=True)
class Root:
    """A PCIe root complex of a socket, named where several matter (write collapse)."""

    name: str
    socket: str


@dataclass(frozen=True)
class WriteCollapse:
    """Posted writes of one switch to devices behind several roots collapse to a trickle.

    Units: total in bytes/s, shared by the writers.

    Attributes:
        writers: number of devices behind the switch, writing at once, from which it happens.
        roots: number of different roots written to, from which it happens.
        total: what is left to all of them together.
        source: where it was seen.
    """

    writers: int
    roots: int
    total: float
    source: str


@dataclass(frozen=True)
class Switch:
    """A switch: of PCIe, of NVLink, or of the network (then it belongs to no node)."""

    name: str
    node: str
    kind: str
    posted_write_collapse: WriteCollapse | None


@dataclass(frozen=True)
class Nic:
    """A network card of a host."""

    name: str
    node: str


@dataclass(frozen=True)
class Link:
    """One link between two named things; both directions are alike.

    Units: bandwidths in bytes/s of ONE direction (both_ways: sum of the two), latencies in us.

    Attributes:
        name: "gpu0-socket0".
        ends: the two things it joins.
        kind: "pcie", "nvlink", "xgmi", "upi", "infiniband", "ethernet" or "memory".
        generation: of the kind, 0 if not stated.
        width: lanes (pcie), links (nvlink), 0 if not stated.
        read: one flow of reads (the reader waits for the data).
        write: one flow of writes (posted).
        total: all flows of one direction together.
        both_ways: both directions together.
        read_latency_us: this link's share of a read's round trip.
        write_latency_us: this link's share of a write's one way.
        p2p: whether traffic between devices may cross it directly.
        basis: "measured here", "measured elsewhere", "datasheet" or "assumed".
        source: where the figures come from.
    """

    name: str
    ends: tuple[str, str]
    kind: str
    generation: int
    width: int
    read: float
    write: float
    total: float
    both_ways: float
    read_latency_us: float
    write_latency_us: float
    p2p: bool
    basis: str
    source: str


@dataclass(frozen=True)
class HostPath:
    """How data goes between devices by way of host memory, where it cannot go directly.

    Units: bytes/s, microseconds; dma_total over all devices of a host, one direction.
    """

    staging_bandwidth: float
    staging_latency_us: float
    dma_total: float
    source: str


@dataclass(frozen=True)
class Collective:
    """Time of one collective by size: a measured table, or a latency and a bandwidth.

    Units: points are (payload bytes, microseconds); latency_us; bandwidth in payload bytes/s.
    The payload is what every rank holds: the tensor (all_reduce, broadcast, send), the gathered
    result (all_gather), the whole input (reduce_scatter, all_to_all).

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "send".
        algorithm: library or algorithm ("nccl", "one_shot_push", "two_shot_islands", "gloo"); one
            without a direction was run in the better one.
        ranks: number of ranks measured.
        points: the table, () if none.
        latency_us: cost of an empty one, 0 with a table.
        bandwidth: slope, 0 with a table.
        basis: "measured here", "measured elsewhere" or "assumed".
        source: where the figures come from.
    """

    op: str
    algorithm: str
    ranks: int
    points: tuple[tuple[int, float], ...]
    latency_us: float
    bandwidth: float
    basis: str
    source: str

    def time_us(self, payload_bytes: int) -> float | None:
        """Return microseconds at a payload; a table answers only between its first and last."""
        if not self.points:
            return self.latency_us + payload_bytes / self.bandwidth * 1e6
        return interpolate(self.points, payload_bytes)


@dataclass(frozen=True)
class CommunicatorOption:
    """A setting of the communication library on this machine, with its reason."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class DeviceInstance:
    """A device in its place; its position in `Machine.devices` is its rank."""

    name: str
    rank: int
    node: str
    device: Device


# What has no part in a plan's decisions, and so none in the machine's hash.
_TEXTS = frozenset({"title", "source", "sources", "reason", "path", "product_names"})


@dataclass(frozen=True)
class Machine:
    """A machine: devices in rank order, hosts, the links between them, and what is known of both.

    Attributes:
        path: file it was read from, "" if none; not part of equality or hash.
    """

    name: str
    title: str
    devices: tuple[DeviceInstance, ...]
    nodes: tuple[Node, ...]
    sockets: tuple[Socket, ...]
    roots: tuple[Root, ...]
    switches: tuple[Switch, ...]
    nics: tuple[Nic, ...]
    links: tuple[Link, ...]
    host: HostPath | None
    collectives: tuple[Collective, ...]
    communicator: tuple[CommunicatorOption, ...]
    policy: tuple[Policy, ...]
    source: str
    path: str = dataclasses.field(default="", compare=False)

    @property
    def num_devices(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def kinds(self) -> tuple[Device, ...]:
        """The different devices, in order of first rank."""
        return tuple(dict.fromkeys(instance.device for instance in self.devices))

    def device(self, rank: int) -> Device:
        """Return the device of a rank.

        Raises: HardwareError if there is no such rank.
        """
        if not 0 <= rank < len(self.devices):
            raise HardwareError(
                f"machine {self.name} has no rank {rank}",
                advice=f"ranks are 0 to {len(self.devices) - 1}",
            )
        return self.devices[rank].device

    @cached_property
    def _topology(self) -> "Topology":
        from metainfer.hardware.topology import Topology

        # NOTE: a type checker may see this file under two names, by the folder and by its link.
        return Topology(typing.cast(Any, self))

    def topology(self) -> "Topology":
        """Return the graph of the machine (built once)."""
        return self._topology

    def tables(self, op: str, ranks: int) -> tuple[Collective, ...]:
        """Return what is known of a collective over a number of ranks, best founded first."""
        order = ("measured here", "measured elsewhere", "assumed")
        found = [c for c in self.collectives if c.op == op and c.ranks == ranks]
        return tuple(sorted(found, key=lambda c: order.index(c.basis)))

    def stances(self, subject: str, name: str, phase: str, rank: int = 0) -> tuple[Policy, ...]:
        """Return the entries about a kernel, rule, collective or library, the machine's first."""
        entries = (*self.policy, *self.device(rank).policy)
        return tuple(entry for entry in entries if entry.applies(subject, name, phase))

    def to_dict(self) -> dict[str, Any]:
        """Return the machine as plain JSON values, without its path."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        del plain["path"]
        return plain

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Machine":
        """Return the machine that `to_dict` wrote.

        Raises: HardwareError if the values are not those of a machine.
        """
        try:
            machine = _restore(Machine, data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HardwareError(
                f"not the record of a machine: {error!r}",
                advice="the plan was written by another version; compile it again",
            ) from error
        assert isinstance(machine, Machine)
        return machine

    def machine_hash(self) -> str:
        """Return a hexadecimal hash of all that can decide a plan: figures, not their sources."""
        text = json.dumps(_without_texts(self.to_dict()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Turn dataclasses, tuples and sets into dicts and lists, sets sorted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_texts(v) for k, v in value.items() if k not in _TEXTS}
    if isinstance(value, list):
        return [_without_texts(item) for item in value]
    return value


def _restore(hint: Any, value: Any) -> Any:
    """Rebuild a value of a type hint from plain JSON values."""
    if dataclasses.is_dataclass(hint):
        return _restore_record(hint, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _restore(arguments[0], value)
    if origin is frozenset:
        return frozenset(value)
    if origin is not tuple:
        return hint(value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_restore(arguments[0], item) for item in value)
    return tuple(_restore(a, item) for a, item in zip(arguments, value, strict=True))


def _restore_record(record: Any, value: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(record)
    return record(**{name: _restore(hints[name], item) for name, item in value.items()})


# A driver's figure for memory differs from a description's by what it reserves itself.
_MEMORY_TOLERANCE = 0.97


def matches(plan_machine: Machine, here: Machine) -> tuple[str, ...]:
    """Return the differences that forbid running a plan made for one machine on another.

    Asks for number and kind of devices, features, memory, shared memory and direct peer access;
    never for names, rates or bandwidths, which change a plan's speed and not its legality.
    """
    if here.num_devices < plan_machine.num_devices:
        return (f"the plan needs {plan_machine.num_devices} devices, here are {here.num_devices}",)
    found: list[str] = []
    for planned, present in zip(plan_machine.devices, here.devices, strict=False):
        found += _device_differences(planned.rank, planned.device, present.device)
    ours, theirs = plan_machine.topology(), here.topology()
    for a in range(plan_machine.num_devices):
        for b in range(a + 1, plan_machine.num_devices):
            if ours.path(a, b).direct and not theirs.path(a, b).direct:
                found.append(f"ranks {a} and {b}: the plan reads peer memory, here it cannot")
    return tuple(found)


def _device_differences(rank: int, planned: Device, present: Device) -> list[str]:
    if planned.kind != present.kind:
        return [f"rank {rank}: the plan needs a {planned.kind}, here is a {present.kind}"]
    found = []
    missing = sorted(planned.features - present.features)
    if missing:
        found.append(f"rank {rank}: missing features {', '.join(missing)}")
    if present.memory_bytes < planned.memory_bytes * _MEMORY_TOLERANCE:
        found.append(
            f"rank {rank}: the plan counts on {planned.memory_bytes / 1e9:.1f} GB of memory, "
            f"here are {present.memory_bytes / 1e9:.1f}"
        )
    if present.smem_per_block_bytes < planned.smem_per_block_bytes:
        found.append(
            f"rank {rank}: the plan counts on {planned.smem_per_block_bytes} B of shared memory "
            f"a block, here are {present.smem_per_block_bytes}"
        )
    return found
