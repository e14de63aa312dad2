"""The graph of a machine: paths between devices, their limits, islands, and shared edges.

Vertices are sockets, roots, switches, network cards and devices by name; edges are links. Data
between two devices takes the path that would carry one MiB soonest; devices do not forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import networkx as nx

from metainfer.hardware.machine import Link, Machine, WriteCollapse
from metainfer.ir.errors import HardwareError

_PROBE_BYTES = 2**20
_NETWORK = ("infiniband", "ethernet")


@dataclass(frozen=True)
class Path:
    """Way of data between two devices.

    Units: bandwidths in bytes/s of one flow in one direction, latencies in us.

    Attributes:
        vertices: names from the first device to the second.
        links: the links between them.
        read: bandwidth when the first device reads the second's memory.
        write: bandwidth when the first device writes to the second's memory.
        read_latency_us: round trip of a read.
        write_latency_us: one way of a write.
        direct: whether the devices may reach each other's memory; otherwise the figures are those
            of two copies through host memory.
        crosses_socket: whether it goes from one socket to another.
        crosses_node: whether it goes over the network.
    """

    vertices: tuple[str, ...]
    links: tuple[Link, ...]
    read: float
    write: float
    read_latency_us: float
    write_latency_us: float
    direct: bool
    crosses_socket: bool
    crosses_node: bool

    def time_us(self, num_bytes: int, mode: str = "write") -> float:
        """Return microseconds of one transfer by an otherwise idle path, mode "read" or "write"."""
        if mode == "read":
            return self.read_latency_us + num_bytes / self.read * 1e6
        return self.write_latency_us + num_bytes / self.write * 1e6


@dataclass(frozen=True)
class Flow:
    """One rank moving data to or from another, among others at the same time.

    Attributes:
        initiator: rank that reads or writes.
        peer: rank whose memory it is.
        mode: "read" or "write".
    """

    initiator: int
    peer: int
    mode: str = "write"


class Topology:
    """Answers about the graph of one machine; holds no state of its own beyond caches."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.graph: nx.Graph = nx.Graph()
        for socket in machine.sockets:
            self.graph.add_node(socket.name, kind="socket", node=socket.node)
        for root in machine.roots:
            self.graph.add_node(root.name, kind="root")
        for switch in machine.switches:
            self.graph.add_node(switch.name, kind="switch", node=switch.node)
        for nic in machine.nics:
            self.graph.add_node(nic.name, kind="nic", node=nic.node)
        for instance in machine.devices:
            self.graph.add_node(instance.name, kind="device", node=instance.node)
        for link in machine.links:
            self.graph.add_edge(*link.ends, link=link, cost=_cost(link))
        self._devices = {instance.name for instance in machine.devices}
        self.path = cache(self._path)

    def _name(self, rank: int) -> str:
        self.machine.device(rank)
        return self.machine.devices[rank].name

    def _kind(self, vertex: str) -> str:
        return str(self.graph.nodes[vertex]["kind"])

    def _route(self, start: str, end: str) -> tuple[str, ...]:
        """Vertices of the best way, without passing through a third device.

        Raises: HardwareError if nothing joins the two.
        """
        others = self._devices - {start, end}
        view = nx.restricted_view(self.graph, list(others), [])
        try:
            return tuple(nx.shortest_path(view, start, end, weight="cost"))
        except nx.NetworkXNoPath as error:
            raise HardwareError(
                f"machine {self.machine.name}: no link leads from {start} to {end}",
                origin=self.machine.path,
                advice="add the missing [[links]], or a host for both",
            ) from error

    def _path(self, a: int, b: int) -> Path:
        """Return the way between two ranks (cached as `path`).

        Raises: HardwareError if nothing joins them, or one is not a rank.
        """
        vertices = self._route(self._name(a), self._name(b))
        links = tuple(self.graph.edges[pair]["link"] for pair in pairwise(vertices))
        sockets = {v for v in vertices if self._kind(v) == "socket"}
        read = min((link.read for link in links), default=float("inf"))
        write = min((link.write for link in links), default=float("inf"))
        read_us = sum(link.read_latency_us for link in links)
        write_us = sum(link.write_latency_us for link in links)
        direct = all(link.p2p for link in links)
        host = self.machine.host
        if not direct and host is not None:
            read, write = min(read, host.staging_bandwidth), min(write, host.staging_bandwidth)
            read_us += host.staging_latency_us
            write_us += host.staging_latency_us
        return Path(
            vertices=vertices,
            links=links,
            read=read,
            write=write,
            read_latency_us=read_us,
            write_latency_us=write_us,
            direct=direct,
            crosses_socket=len(sockets) > 1,
            crosses_node=any(link.kind in _NETWORK for link in links),
        )

    def host_link(self, rank: int) -> Path:
        """Return the way from a device to the nearest socket: the path to host memory.

        Raises: HardwareError if the device is joined to no socket.
        """
        name = self._name(rank)
        sockets = [s.name for s in self.machine.sockets]
        routes = [self._route(name, s) for s in sockets if nx.has_path(self.graph, name, s)]
        if not routes:
            raise HardwareError(
                f"machine {self.machine.name}: {name} is joined to no socket",
                advice="add a [[links]] entry from it to a socket, root or switch of its host",
            )
        route = min(routes, key=len)
        links = tuple(self.graph.edges[pair]["link"] for pair in pairwise(route))
        return Path(
            vertices=route,
            links=links,
            read=min((link.read for link in links), default=float("inf")),
            write=min((link.write for link in links), default=float("inf")),
            read_latency_us=sum(link.read_latency_us for link in links),
            write_latency_us=sum(link.write_latency_us for link in links),
            direct=True,
            crosses_socket=False,
            crosses_node=False,
        )

    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that reach each other without leaving a socket or a host."""
        near: nx.Graph = nx.Graph()
        near.add_nodes_from(range(self.machine.num_devices))
        for a in range(self.machine.num_devices):
            for b in range(a + 1, self.machine.num_devices):
                path = self.path(a, b)
                if not path.crosses_socket and not path.crosses_node:
                    near.add_edge(a, b)
        return tuple(sorted(tuple(sorted(part)) for part in nx.connected_components(near)))

    def islands_of(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return ranks by island, () unless there are several islands of one size above 1."""
        groups = [tuple(r for r in ranks if r in island) for island in self.islands()]
        groups = [group for group in groups if group]
        sizes = {len(group) for group in groups}
        return tuple(groups) if len(groups) > 1 and len(sizes) == 1 and sizes != {1} else ()

    def slowest(self, ranks: Sequence[int] | None = None, mode: str = "write") -> Path:
        """Return the slowest way between any two of the ranks (all, if none are given).

        Raises: HardwareError if there are fewer than two.
        """
        chosen = list(range(self.machine.num_devices)) if ranks is None else list(ranks)
        paths = [self.path(a, b) for a in chosen for b in chosen if a != b]
        if not paths:
            raise HardwareError("a way needs two ranks", advice="ask for two or more ranks")
        return min(paths, key=lambda p: p.read if mode == "read" else p.write)

    def share(self, flows: Sequence[Flow]) -> tuple[float, ...]:
        """Return the bandwidth of each of several flows at once, by max-min fairness.

        Edges are limited in each direction, in both directions together, and by a switch's
        posted-write collapse where the flows meet its condition. What a link carries in all is
        stated for the faster of reads and writes; the slower ones get less of it, as a single one
        does. Flows that go by way of host memory share what its hosts' DMA moves.

        Units: bytes/s, in the order of ``flows``.
        """
        limits = self._flow_limits(flows)
        return _fair_shares(len(flows), limits)

    def _flow_limits(self, flows: Sequence[Flow]) -> list[tuple[float, frozenset[int]]]:
        """List (bytes/s, flows that share it)."""
        one_way: dict[tuple[str, str], set[int]] = {}
        limits: list[tuple[float, frozenset[int]]] = []
        for i, flow in enumerate(flows):
            path = self.path(flow.initiator, flow.peer)
            own = path.read if flow.mode == "read" else path.write
            limits.append((own, frozenset({i})))
            vertices = path.vertices if flow.mode == "write" else path.vertices[::-1]
            for step in pairwise(vertices):
                one_way.setdefault(step, set()).add(i)
        reads = {i for i, flow in enumerate(flows) if flow.mode == "read"}
        for (a, b), users in one_way.items():
            link: Link = self.graph.edges[a, b]["link"]
            limits += _limits_of(link, link.total, users, reads)
            back = one_way.get((b, a), set())
            if back and a < b:
                limits += _limits_of(link, link.both_ways, users | back, reads)
        return limits + self._collapses(flows) + self._staged(flows)

    def _staged(self, flows: Sequence[Flow]) -> list[tuple[float, frozenset[int]]]:
        """The limit of flows that are copied through host memory."""
        host = self.machine.host
        users = [i for i, f in enumerate(flows) if not self.path(f.initiator, f.peer).direct]
        return [(host.dma_total, frozenset(users))] if host is not None and users else []

    def _collapses(self, flows: Sequence[Flow]) -> list[tuple[float, frozenset[int]]]:
        """Limits of switches whose posted-write collapse these flows bring about."""
        found: list[tuple[float, frozenset[int]]] = []
        for switch in self.machine.switches:
            rule = switch.posted_write_collapse
            if rule is None:
                continue
            users = [i for i, flow in enumerate(flows) if self._leaves(flow, switch.name)]
            if self._is_collapse(rule, [flows[i] for i in users]):
                found.append((rule.total, frozenset(users)))
        return found

    def _leaves(self, flow: Flow, switch: str) -> bool:
        """Whether a flow writes from behind this switch to a device that is not."""
        if flow.mode != "write":
            return False
        vertices = self.path(flow.initiator, flow.peer).vertices
        return vertices[1] == switch and vertices[-2] != switch

    def _is_collapse(self, rule: WriteCollapse, flows: list[Flow]) -> bool:
        writers = {flow.initiator for flow in flows}
        roots = {self._root(flow) for flow in flows}
        return len(writers) >= rule.writers and len(roots) >= rule.roots

    def _root(self, flow: Flow) -> str:
        """Root (or else switch) behind which the peer of a flow lies."""
        behind = self.path(flow.initiator, flow.peer).vertices[-2:0:-1]
        return next((v for v in behind if self._kind(v) == "root"), behind[0])


def _limits_of(
    link: Link, whole: float, users: set[int], reads: set[int]
) -> list[tuple[float, frozenset[int]]]:
    """Limits of flows over a link: of all together, and of those of the slower mode."""
    limits = [(whole, frozenset(users))]
    slower = users & reads if link.read < link.write else users - reads
    if slower and link.read != link.write:
        least, most = sorted((link.read, link.write))
        limits.append((whole * least / most, frozenset(slower)))
    return limits


def _cost(link: Link) -> float:
    bandwidth = min(link.read, link.write)
    return link.write_latency_us + _PROBE_BYTES / bandwidth * 1e6


def _fair_shares(num_flows: int, limits: list[tuple[float, frozenset[int]]]) -> tuple[float, ...]:
    """Raise all flows together; freeze those of the tightest limit; repeat."""
    shares: dict[int, float] = {}
    while len(shares) < num_flows:
        tightest, level = frozenset[int](), float("inf")
        for capacity, users in limits:
            open_users = users - shares.keys()
            if not open_users:
                continue
            left = capacity - sum(shares[i] for i in users & shares.keys())
            fair = max(left, 0.0) / len(open_users)
            if fair < level:
                tightest, level = open_users, fair
        if not tightest:
            # Flows of a rank to itself meet no link.
            shares.update({i: float("inf") for i in range(num_flows) if i not in shares})
            break
        shares.update(dict.fromkeys(tightest, level))
    return tuple(shares[i] for i in range(num_flows))
