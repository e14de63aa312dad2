"""Sanity of hardware files: what contradicts itself, physics, or another line.

Every check names the line. Bounds are wide: they catch a wrong unit, a wrong generation or the sum
of two directions, not a bad card.
"""

from collections.abc import Iterable

from metainfer.hardware import build, schema
from metainfer.hardware.document import Document, Loc, near
from metainfer.hardware.machine import Machine
from metainfer.hardware.units import show_quantity
from metainfer.hardware.vocabulary import COMMUNICATOR, FEATURES, RATE_NAMES, is_feature
from metainfer.ir.errors import HardwareError

# One direction, bytes/s: of one lane of PCIe after encoding, of one link of NVLink.
# Source: PCIe base specifications 3.0 to 6.0; NVIDIA data sheets of V100, A100, H100, B200.
LANE_LIMITS: dict[str, dict[int, float]] = {
    "pcie": {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9},
    "nvlink": {2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9},
}
_PCIE_WIDTHS = (1, 2, 4, 8, 16)
# FLOP per byte of memory at which a device turns from memory to arithmetic; CPUs lie at 2-20, GPUs
# at 50-2,000. A wrong prefix of either figure falls outside.
_RIDGE = (0.5, 4000.0)


def check_device(table: schema.DeviceFile, document: Document) -> None:
    """Check one device's tables against each other.

    Raises: HardwareError naming the line.
    """
    _check_memory(table, document)
    _check_rates(table, document)
    for i, feature in enumerate(table.compute.features):
        if not is_feature(feature):
            loc: Loc = ("compute", "features")
            what = f"unknown feature {feature!r}"
            raise document.error(loc, what, near(feature, list(FEATURES)))
        if feature in table.compute.features[:i]:
            raise document.error(("compute", "features"), f"feature {feature!r} is named twice")
    compute = table.compute
    if compute.smem_per_sm and compute.smem_per_block > compute.smem_per_sm:
        what = "smem_per_block is larger than smem_per_sm"
        raise document.error(("compute", "smem_per_block"), what, "they may be swapped")
    _check_unique([e.name for e in table.libraries], "libraries", document)
    for i, curve in enumerate(table.curves):
        _check_curve(i, curve, table, document)


def _check_memory(table: schema.DeviceFile, document: Document) -> None:
    memory = table.memory
    if memory.reserved >= memory.capacity:
        raise document.error(("memory", "reserved"), "reserved leaves no memory", "lower it")
    if memory.sustained_bandwidth > memory.peak_bandwidth:
        what = _above("sustained_bandwidth", memory.sustained_bandwidth, memory.peak_bandwidth)
        loc: Loc = ("memory", "sustained_bandwidth")
        raise document.error(loc, what, "a copy counts what it reads and what it writes")


def _above(name: str, value: float, limit: float, kind: str = "bandwidth") -> str:
    shown = (
        (show_quantity(value, "rate"), show_quantity(limit, "rate"))
        if kind == "rate"
        else (show_quantity(value, "bandwidth"), show_quantity(limit, "bandwidth"))
    )
    return f"{name} {shown[0]} is above the peak of {shown[1]}"


def _check_rates(table: schema.DeviceFile, document: Document) -> None:
    if "f32" not in table.rates:
        what = "a device states at least the rate of f32"
        raise document.error(("rates",), what, "add [rates.f32] with peak, sustained and source")
    for name, rate in table.rates.items():
        loc: Loc = ("rates", name)
        if name not in RATE_NAMES:
            raise document.error(loc, f"unknown rate {name!r}", near(name, list(RATE_NAMES)))
        if rate.sustained > rate.peak:
            what = _above(f"rates.{name}.sustained", rate.sustained, rate.peak, "rate")
            raise document.error((*loc, "sustained"), what, "correct the one that is wrong")
        ridge = rate.peak / table.memory.peak_bandwidth
        if not _RIDGE[0] <= ridge <= _RIDGE[1] and name != "f64":
            what = f"rates.{name}.peak over the memory's peak_bandwidth is {ridge:.3g} FLOP a byte"
            advice = f"devices lie between {_RIDGE[0]} and {_RIDGE[1]:.0f}: look for a wrong unit"
            raise document.error((*loc, "peak"), what, advice)


def _check_curve(
    i: int, curve: schema.CurveTable, table: schema.DeviceFile, document: Document
) -> None:
    loc: Loc = ("curves", i)
    if len(curve.rows) != len(curve.values):
        what = f"{len(curve.rows)} rows and {len(curve.values)} values"
        raise document.error((*loc, "values"), what, "give one value for each number of rows")
    if curve.rows != sorted(set(curve.rows)):
        raise document.error((*loc, "rows"), "rows do not ascend", "sort them, each once")
    if curve.kind == "fused_moe" and any(kind == "time" for kind, _ in curve.values):
        raise document.error((*loc, "values"), "a fused_moe curve wants rates", "give FLOP/s")
    if curve.dtype not in RATE_NAMES:
        what = f"unknown rate {curve.dtype!r}"
        raise document.error((*loc, "dtype"), what, near(curve.dtype, list(RATE_NAMES)))
    if curve.dtype not in table.rates:
        what = f"a curve of {curve.dtype}, which has no rate"
        raise document.error((*loc, "dtype"), what, f"add [rates.{curve.dtype}]")
    peak = table.rates[curve.dtype].peak
    for rows, rate in build.curve_points(curve):
        if rate > peak:
            what = _above(f"{curve.dtype} at {rows} rows: measured", rate, peak, "rate")
            raise document.error((*loc, "values"), what, "one of the two figures is wrong")


def check_machine(table: schema.MachineFile, document: Document) -> None:
    """Check a machine's tables against each other: names, references, links, collectives.

    Raises: HardwareError naming the line.
    """
    vertices = _check_names(table, document)
    nodes = [node.name for node in table.nodes]
    sockets = [socket.name for socket in table.sockets]
    for kind, entries in (
        ("sockets", table.sockets),
        ("nics", table.nics),
        ("devices", table.devices),
        ("switches", [s if s.kind != "network" else None for s in table.switches]),
    ):
        for i, entry in enumerate(entries):
            if entry is not None:
                _check_reference((kind, i, "node"), entry.node, nodes, document)
    for i, root in enumerate(table.roots):
        _check_reference(("roots", i, "socket"), root.socket, sockets, document)
    _check_links(table, vertices, document)
    for i, collective in enumerate(table.collectives):
        _check_collective(i, collective, len(_device_names(table)), document)
    for i, option in enumerate(table.communicator):
        if option.name not in COMMUNICATOR:
            loc: Loc = ("communicator", i, "name")
            what = f"unknown setting {option.name!r} of the communication library"
            raise document.error(loc, what, near(option.name, list(COMMUNICATOR)))
    _check_unique([c.name for c in table.communicator], "communicator", document)


def _device_names(table: schema.MachineFile) -> list[str]:
    return [name for entry in table.devices for name in entry.names]


def _check_names(table: schema.MachineFile, document: Document) -> list[str]:
    """All names that links may join, each once."""
    seen: dict[str, str] = {}
    groups: list[tuple[str, Iterable[tuple[int, str]]]] = [
        ("sockets", enumerate(s.name for s in table.sockets)),
        ("roots", enumerate(r.name for r in table.roots)),
        ("switches", enumerate(s.name for s in table.switches)),
        ("nics", enumerate(n.name for n in table.nics)),
        ("devices", ((i, name) for i, e in enumerate(table.devices) for name in e.names)),
    ]
    for group, entries in groups:
        for i, name in entries:
            if name in seen:
                key = "names" if group == "devices" else "name"
                what = f"the name {name!r} is given twice, in {seen[name]} and in {group}"
                raise document.error((group, i, key), what, "give every part its own name")
            seen[name] = group
    _check_unique([node.name for node in table.nodes], "nodes", document)
    return list(seen)


def _check_unique(names: list[str], group: str, document: Document) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise document.error((group, i, "name"), f"the name {name!r} is given twice in {group}")


def _check_reference(loc: Loc, name: str, known: list[str], document: Document) -> None:
    if name not in known:
        raise document.error(
            loc, f"{loc[0]}: {loc[-1]} {name!r} is not described", near(name, known)
        )


def _check_links(table: schema.MachineFile, vertices: list[str], document: Document) -> None:
    joined: set[frozenset[str]] = set()
    for i, link in enumerate(table.links):
        loc: Loc = ("links", i)
        _check_reference((*loc, "to"), link.to, vertices, document)
        for end in link.origins:
            _check_reference((*loc, "from"), end, vertices, document)
            pair = frozenset((end, link.to))
            if len(pair) == 1:
                raise document.error((*loc, "to"), f"{end!r} is linked to itself")
            if pair in joined:
                what = f"{end!r} and {link.to!r} are linked twice"
                raise document.error(loc, what, "write one link with the sum of both")
            joined.add(pair)
        _check_link(loc, link, document)


def _check_link(loc: Loc, link: schema.LinkTable, document: Document) -> None:
    """Bandwidths of one link against its generation and width, or its line rate."""
    limit, why = _link_limit(loc, link, document)
    total = link.total or max(link.read, link.write)
    both_ways = link.both_ways or 2 * total
    for key, value, most in (
        ("read", link.read, min(limit, total)),
        ("write", link.write, min(limit, total)),
        ("total", total, limit),
        ("both_ways", both_ways, 2 * limit),
    ):
        if value <= most:
            continue
        shown, bound = show_quantity(value, "bandwidth"), show_quantity(most, "bandwidth")
        if most < limit:
            raise document.error((*loc, key), f"{key} {shown} is above the link's total of {bound}")
        advice = "figures are of one direction and of one link, in bytes"
        what = f"{key} {shown} is above {bound}, the limit of {why}"
        raise document.error((*loc, key), what, advice)
    if both_ways < total:
        raise document.error((*loc, "both_ways"), "both_ways is below one direction alone")


def _link_limit(loc: Loc, link: schema.LinkTable, document: Document) -> tuple[float, str]:
    """Most that one direction can carry, and the words for it."""
    lanes = LANE_LIMITS.get(link.kind)
    if lanes is not None:
        for key in ("generation", "width"):
            if getattr(link, key) is None:
                raise document.error((*loc, key), f"a {link.kind} link states its {key}")
        assert link.generation is not None
        assert link.width is not None
        if link.generation not in lanes:
            known = ", ".join(map(str, lanes))
            what = f"unknown generation {link.generation} of {link.kind}"
            raise document.error((*loc, "generation"), what, f"known: {known}")
        if link.kind == "pcie" and link.width not in _PCIE_WIDTHS:
            what = f"a PCIe link is not {link.width} lanes wide"
            raise document.error((*loc, "width"), what, f"known: {_PCIE_WIDTHS}")
        rate = lanes[link.generation] * link.width
        return rate, f"{link.kind} generation {link.generation} x{link.width} in one direction"
    if link.line_rate is not None:
        return link.line_rate, "its line_rate"
    if link.kind in ("infiniband", "ethernet"):
        what = f"an {link.kind} link states its line_rate"
        raise document.error(loc, what, 'add line_rate = "400 Gbit/s", of one direction')
    return float("inf"), ""


def _check_collective(
    i: int, entry: schema.CollectiveTable, num_devices: int, document: Document
) -> None:
    loc: Loc = ("collectives", i)
    if entry.ranks > num_devices:
        what = f"a collective of {entry.ranks} ranks on {num_devices} devices"
        raise document.error((*loc, "ranks"), what, "correct the number of ranks")
    if len(entry.sizes) != len(entry.times):
        what = f"{len(entry.sizes)} sizes and {len(entry.times)} times"
        raise document.error((*loc, "times"), what, "give one time for each size")
    if entry.sizes != sorted(set(entry.sizes)):
        raise document.error((*loc, "sizes"), "sizes do not ascend", "sort them, each once")
    if any(time == 0 for time in entry.times):
        raise document.error((*loc, "times"), "a time of 0", "no collective is free")
    has_line = entry.latency is not None and entry.bandwidth is not None
    if bool(entry.sizes) == has_line or (entry.latency is None) != (entry.bandwidth is None):
        what = "a collective has sizes and times, or latency and bandwidth"
        raise document.error(loc, what, "give one of the two pairs, whole")


def check_paths(machine: Machine, document: Document) -> None:
    """Check that all devices reach each other, and have a way to host memory where it is needed.

    Raises: HardwareError naming the devices.
    """
    topology = machine.topology()
    if machine.sockets:
        socket_of = {socket.node for socket in machine.sockets}
        for instance in machine.devices:
            if instance.node in socket_of and instance.device.kind != "cpu":
                topology.host_link(instance.rank)
    for a in range(machine.num_devices):
        for b in range(a + 1, machine.num_devices):
            if not topology.path(a, b).direct and machine.host is None:
                raise HardwareError(
                    f"{machine.devices[a].name} and {machine.devices[b].name} cannot reach each "
                    "other directly, and [host] is missing",
                    origin=document.path,
                    advice="describe the way through host memory in [host], or set p2p = true",
                )
