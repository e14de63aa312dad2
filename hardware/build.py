"""From checked tables of a hardware file to the frozen values of machine.py."""

from metainfer.hardware import device as dev
from metainfer.hardware import machine as mac
from metainfer.hardware import schema


def device(table: schema.DeviceFile) -> dev.Device:
    """Build a device from its tables.

    Units: as Device.
    """
    memory, compute, launch, board = table.memory, table.compute, table.launch, table.board
    sources = [("memory", memory.source), ("compute", compute.source), ("launch", launch.source)]
    if board is not None:
        sources.append(("board", board.source))
    return dev.Device(
        name=table.name,
        title=table.title,
        kind=table.kind,
        capability=table.capability,
        product_names=tuple(table.product_names),
        memory_bytes=memory.capacity,
        reserved_bytes=memory.reserved,
        memory_bandwidth=dev.Bandwidth(
            memory.peak_bandwidth, memory.sustained_bandwidth, memory.source
        ),
        rates=tuple(
            dev.Rate(rate.peak, rate.sustained, rate.source, name)
            for name, rate in table.rates.items()
        ),
        num_sms=compute.sms,
        warps_per_sm=compute.warps_per_sm,
        smem_per_block_bytes=compute.smem_per_block,
        smem_per_sm_bytes=compute.smem_per_sm,
        l2_bytes=compute.l2,
        features=frozenset(compute.features),
        launch_latency_us=launch.latency,
        kernel_floor_us=launch.kernel_floor,
        power_watts=(board.power or 0.0) if board else 0.0,
        clock_hz=(board.clock or 0.0) if board else 0.0,
        libraries=tuple(
            dev.Library(entry.name, entry.version, entry.min_version, entry.absent, entry.source)
            for entry in table.libraries
        ),
        curves=tuple(_curve(entry) for entry in table.curves),
        policy=_policy(table.policy),
        sources=tuple(sources),
    )


def curve_points(entry: schema.CurveTable) -> tuple[tuple[int, float], ...]:
    """Return (rows, FLOP/s) of a curve, times turned into rates."""
    points = []
    for rows, (kind, value) in zip(entry.rows, entry.values, strict=True):
        rate = value if kind == "rate" else 2.0 * rows * entry.n * entry.k / value * 1e6
        points.append((rows, rate))
    return tuple(points)


def _curve(entry: schema.CurveTable) -> dev.Curve:
    return dev.Curve(
        kind=entry.kind,
        dtype=entry.dtype,
        n=entry.n,
        k=entry.k,
        groups=entry.groups,
        points=curve_points(entry),
        basis=entry.basis,
        source=entry.source,
    )


def _policy(entries: list[schema.PolicyTable]) -> tuple[dev.Policy, ...]:
    return tuple(dev.Policy(e.subject, e.name, e.stance, e.phase, e.reason) for e in entries)


def machine(table: schema.MachineFile, devices: dict[str, dev.Device], path: str) -> mac.Machine:
    """Build a machine from its tables and its device types.

    Units: as Machine.
    """
    names = [(name, entry) for entry in table.devices for name in entry.names]
    return mac.Machine(
        name=table.name,
        title=table.title,
        devices=tuple(
            mac.DeviceInstance(name, rank, entry.node, devices[entry.type])
            for rank, (name, entry) in enumerate(names)
        ),
        nodes=tuple(mac.Node(n.name, n.memory or 0, n.source) for n in table.nodes),
        sockets=tuple(
            mac.Socket(s.name, s.node, s.numa, s.cores, s.memory_bandwidth or 0.0)
            for s in table.sockets
        ),
        roots=tuple(mac.Root(r.name, r.socket) for r in table.roots),
        switches=tuple(_switch(s) for s in table.switches),
        nics=tuple(mac.Nic(n.name, n.node) for n in table.nics),
        links=tuple(_link(entry, end) for entry in table.links for end in entry.origins),
        host=_host(table.host),
        collectives=tuple(_collective(c) for c in table.collectives),
        communicator=tuple(
            mac.CommunicatorOption(c.name, c.value, c.reason) for c in table.communicator
        ),
        policy=_policy(table.policy),
        source=table.source,
        path=path,
    )


def _switch(entry: schema.SwitchTable) -> mac.Switch:
    rule = entry.posted_write_collapse
    collapse = None
    if rule is not None:
        collapse = mac.WriteCollapse(rule.writers, rule.roots, rule.total, rule.source)
    return mac.Switch(entry.name, entry.node, entry.kind, collapse)


def _link(entry: schema.LinkTable, end: str) -> mac.Link:
    total = entry.total or max(entry.read, entry.write)
    return mac.Link(
        name=f"{end}-{entry.to}",
        ends=(end, entry.to),
        kind=entry.kind,
        generation=entry.generation or 0,
        width=entry.width or 0,
        read=entry.read,
        write=entry.write,
        total=total,
        both_ways=entry.both_ways or 2 * total,
        read_latency_us=entry.read_latency,
        write_latency_us=entry.write_latency,
        p2p=entry.p2p,
        basis=entry.basis,
        source=entry.source,
    )


def _host(entry: schema.HostTable | None) -> mac.HostPath | None:
    if entry is None:
        return None
    return mac.HostPath(
        entry.staging_bandwidth, entry.staging_latency, entry.dma_total, entry.source
    )


def _collective(entry: schema.CollectiveTable) -> mac.Collective:
    return mac.Collective(
        op=entry.op,
        algorithm=entry.algorithm,
        ranks=entry.ranks,
        points=tuple(zip(entry.sizes, entry.times, strict=True)),
        latency_us=entry.latency or 0.0,
        bandwidth=entry.bandwidth or 0.0,
        basis=entry.basis,
        source=entry.source,
    )
