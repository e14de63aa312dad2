"""What a collective costs among ranks of a machine, algorithm by algorithm.

A measured table of the machine answers for the algorithm that it measured; every other algorithm
is priced from the topology: each of its rounds is a set of simultaneous flows, which share links,
switches and host bridges (`Topology.share`), plus the latency of the slowest way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from metainfer.hardware.machine import Machine
from metainfer.hardware.topology import Flow, Path, Topology
from metainfer.ir.errors import HardwareError

# Starting a kernel that synchronises with peers, beside the wire's own latency.
_ROUND_US = 2.0


@dataclass(frozen=True)
class Price:
    """What one algorithm costs.

    Units: seconds.

    Attributes:
        algorithm: "library" for the measured one of the communication library, "ring", "one_shot",
            "two_shot" or "islands".
        seconds: predicted time.
        basis: "measured here", "measured elsewhere", "assumed" or "analytic".
    """

    algorithm: str
    seconds: float
    basis: str


def cheapest(name: str, machine: Machine, ranks: tuple[int, ...], payload_bytes: int) -> Price:
    """The cheapest exact algorithm: a bound, since not every one that is priced has a kernel.

    Args:
        name: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        machine: where the ranks are.
        ranks: who takes part.
        payload_bytes: as of `hardware.machine.Collective`.
    """
    return min(prices(name, machine, ranks, payload_bytes), key=lambda p: p.seconds)


def price_of(
    name: str, algorithm: str, machine: Machine, ranks: tuple[int, ...], payload_bytes: int
) -> Price:
    """The price of one algorithm.

    Raises: HardwareError if the ranks cannot run it.
    """
    found = [p for p in prices(name, machine, ranks, payload_bytes) if p.algorithm == algorithm]
    if not found:
        raise HardwareError(
            f"{name} by {algorithm} is not for the ranks {list(ranks)} of {machine.name}",
            advice=f"known: {', '.join(_ROUNDS.get(name, {}))}, library",
        )
    return found[0]


def prices(
    name: str, machine: Machine, ranks: tuple[int, ...], payload_bytes: int
) -> tuple[Price, ...]:
    """Every exact algorithm with its price; a single rank pays nothing.

    Raises: HardwareError for a collective that is not known.
    """
    # NOTE: a topology hashes by identity, a machine by all that it holds.
    return _prices(name, machine.topology(), ranks, payload_bytes)


@lru_cache(maxsize=65536)
def _prices(
    name: str, topology: Topology, ranks: tuple[int, ...], payload_bytes: int
) -> tuple[Price, ...]:
    machine = topology.machine
    if name not in _ROUNDS:
        raise HardwareError(f"no algorithm is known for {name!r}", advice=f"known: {[*_ROUNDS]}")
    if len(ranks) == 1:
        return tuple(Price(a, 0.0, "analytic") for a in (*_ROUNDS[name], "library", "islands"))
    found = [
        Price(algorithm, _seconds(topology, ranks, rounds, payload_bytes), "analytic")
        for algorithm, rounds in _ROUNDS[name].items()
    ]
    found.append(
        _measured(name, machine, ranks, payload_bytes) or Price("library", *_unmeasured(found))
    )
    if name == "all_reduce" and len(_islands(topology, ranks)) > 1:
        seconds = _islands_seconds(topology, ranks, payload_bytes)
        found.append(Price("islands", seconds, "analytic"))
    return tuple(found)


def _unmeasured(found: Sequence[Price]) -> tuple[float, str]:
    """A library that nobody measured is taken to run its first, bandwidth-bound algorithm."""
    return found[0].seconds, found[0].basis


def _measured(
    name: str, machine: Machine, ranks: tuple[int, ...], payload_bytes: int
) -> Price | None:
    """The library's time by the machine's best founded table, continued at its ends."""
    for table in machine.tables(name, len(ranks)):
        if table.algorithm not in ("nccl", "gloo", "rccl"):
            continue
        time = table.time_us(payload_bytes)
        if time is None:
            (small, least), (large, most) = table.points[0], table.points[-1]
            time = least if payload_bytes < small else most * payload_bytes / large
        return Price("library", time * 1e-6, table.basis)
    return None


@dataclass(frozen=True)
class _Rounds:
    """Rounds of one algorithm: (how often, part of the payload each flow carries, pattern)."""

    count: str
    part: str
    pattern: str

    def of(self, num_ranks: int) -> tuple[int, float]:
        """(number of rounds, part of the payload)."""
        counts = {"1": 1, "2": 2, "n-1": num_ranks - 1, "2n-2": 2 * (num_ranks - 1)}
        return counts[self.count], 1.0 if self.part == "all" else 1.0 / num_ranks


_ROUNDS: dict[str, dict[str, _Rounds]] = {
    "all_reduce": {
        "ring": _Rounds("2n-2", "1/n", "ring"),
        "one_shot": _Rounds("1", "all", "mesh"),
        "two_shot": _Rounds("2", "1/n", "mesh"),
    },
    "all_gather": {
        "ring": _Rounds("n-1", "1/n", "ring"),
        "one_shot": _Rounds("1", "1/n", "mesh"),
    },
    "reduce_scatter": {
        "ring": _Rounds("n-1", "1/n", "ring"),
        "one_shot": _Rounds("1", "1/n", "mesh"),
    },
    "all_to_all": {"one_shot": _Rounds("1", "1/n", "mesh")},
}


def _seconds(topology: Topology, ranks: tuple[int, ...], rounds: _Rounds, payload: int) -> float:
    count, part = rounds.of(len(ranks))
    bandwidth, latency_us = _pattern(topology, ranks, rounds.pattern)
    return count * ((latency_us + _ROUND_US) * 1e-6 + payload * part / bandwidth)


@cache
def _pattern(topology: Topology, ranks: tuple[int, ...], pattern: str) -> tuple[float, float]:
    """(bytes/s of the slowest flow, latency of the slowest way) while all flows run."""
    flows = [Flow(a, b) for a, b in _pairs(ranks, pattern)]
    shares = topology.share(flows)
    paths: list[Path] = [topology.path(f.initiator, f.peer) for f in flows]
    return min(shares), max(p.write_latency_us for p in paths)


def _pairs(ranks: Sequence[int], pattern: str) -> list[tuple[int, int]]:
    if pattern == "ring":
        return [(r, ranks[(i + 1) % len(ranks)]) for i, r in enumerate(ranks)]
    return [(a, b) for a in ranks for b in ranks if a != b]


@cache
def _islands(topology: Topology, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks by socket or host, () unless there are several islands of one size above 1."""
    groups = [tuple(r for r in island if r in ranks) for island in topology.islands()]
    groups = [g for g in groups if g]
    sizes = {len(g) for g in groups}
    return tuple(groups) if len(groups) > 1 and len(sizes) == 1 and sizes != {1} else ()


def _islands_seconds(topology: Topology, ranks: tuple[int, ...], payload: int) -> float:
    """Reduce-scatter within islands, all-reduce of each part across them, all-gather within."""
    islands = _islands(topology, ranks)
    size = len(islands[0])
    within = [_pattern(topology, island, "mesh") for island in islands]
    inner = min(b for b, _ in within)
    inner_us = max(us for _, us in within)
    across, across_us = _across(topology, islands)
    inside = 2 * ((inner_us + _ROUND_US) * 1e-6 + payload / size / inner)
    return inside + (across_us + _ROUND_US) * 1e-6 + payload / size / across


@cache
def _across(topology: Topology, islands: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """Flows between ranks of the same number in each island, all at once."""
    columns = list(zip(*islands, strict=True))
    flows = [Flow(a, b) for column in columns for a in column for b in column if a != b]
    shares = topology.share(flows)
    return min(shares), max(topology.path(f.initiator, f.peer).write_latency_us for f in flows)
