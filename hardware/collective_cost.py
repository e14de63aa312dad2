"""What a collective costs among ranks of a machine, algorithm by algorithm.

Algorithms over the communication library cost what its measured tables say, or a ring where nobody
measured it. Those over windows are priced from the topology: each of their rounds is a set of
simultaneous flows, which share links, switches and host bridges (`Topology.share`), plus the
latency of the slowest way. Where somebody measured such an algorithm for this machine, the topology
says how the time of all of them grows, and the table how much of it there is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from metainfer.hardware.machine import Collective, Machine
from metainfer.hardware.topology import Flow, Topology
from metainfer.ir.dtypes import FP8_GROUP
from metainfer.ir.errors import HardwareError

# A round over windows beside the wire's latency: writing, telling all peers, reading. The smallest
# all-gather of two ranks by PCIe IPC takes 4.1 us (flashinfer #5023), 0.7 of them the wire's.
_ROUND_US = 3.4
# A call of the library, and each hop of it beside the wire's latency: fitted to NCCL's times at
# 2 KiB on 2, 4 and 8 RTX PRO 6000 (AIConfigurator 0.12.0: all-reduce 6, 13, 26 us; of eight,
# all-gather 15 us and all-to-all 10 us), within a fifth of them on the links of 8xpcie.
_CALL_US, _HOP_US = 2.0, 1.2
_LAUNCH_US = 4.0  # of a pass that turns numbers to codes or back; assumed
_LIBRARIES = ("nccl", "gloo", "rccl")
# Names that tables have for algorithms over windows; without a direction it was the better one.
_TABLES: Mapping[str, tuple[str, ...]] = {
    **{f"{shots}_{way}": (f"{shots}_{way}",)
       for shots in ("one_shot", "two_shot") for way in ("push", "pull")},
    "one_shot": ("one_shot_push", "one_shot_pull"),
    "two_shot": ("two_shot_push", "two_shot_pull"),
    "two_shot_islands": ("islands",), "islands": ("islands",),
}  # fmt: skip
# A table that is faster than what the described links carry was measured on others; figures round.
_CREDIBLE = 0.8
# Wire bytes of fp8 with its scales, over bytes of bf16.
COMPRESSED = (1 + 4 / FP8_GROUP.block[-1]) / 2


@dataclass(frozen=True)
class Price:
    """What one algorithm costs.

    Units: seconds.

    Attributes:
        algorithm: as kernels name it: "library", "one_shot", "two_shot" (over the library),
            "one_shot_push", "two_shot_pull" (over windows) and so on, "islands".
        seconds: predicted time.
        basis: where the figure comes from, "measured here" down to "analytic".
        is_exact: whether it adds no more than rounding does.
    """

    algorithm: str
    seconds: float
    basis: str
    is_exact: bool = True


def cheapest(
    name: str, machine: Machine, ranks: tuple[int, ...], payload_bytes: int,
    *, is_exact: bool = True,
) -> Price:  # fmt: skip
    """The cheapest algorithm that the machine allows in any phase.

    Args:
        name: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        machine: where the ranks are.
        ranks: who takes part.
        payload_bytes: as of `hardware.machine.Collective`.
        is_exact: whether only those count that add no more than rounding does.
    """
    every = prices(name, machine, ranks, payload_bytes)
    found = [p for p in every if p.is_exact or not is_exact]
    allowed = [p for p in found if not is_forbidden(machine, p.algorithm, "any")]
    return min(allowed or found, key=lambda p: p.seconds)


def is_forbidden(machine: Machine, algorithm: str, phase: str) -> bool:
    """Whether the machine's policy is against an algorithm of collectives."""
    return any(p.stance == "forbid" for p in machine.stances("collective", algorithm, phase))


def price_of(
    name: str, algorithm: str, machine: Machine, ranks: tuple[int, ...], payload_bytes: int
) -> Price:
    """The price of one algorithm.

    Raises: HardwareError if the ranks cannot run it.
    """
    found = prices(name, machine, ranks, payload_bytes)
    for price in found:
        if price.algorithm == algorithm:
            return price
    raise HardwareError(
        f"{name} by {algorithm} is not for the ranks {list(ranks)} of {machine.name}",
        advice=f"known: {', '.join(p.algorithm for p in found)}",
    )


def prices(
    name: str, machine: Machine, ranks: tuple[int, ...], payload_bytes: int
) -> tuple[Price, ...]:
    """Every algorithm that the ranks can run, with its price; a single rank pays nothing.

    Raises: HardwareError for a collective that is not known.
    """
    # NOTE: a topology hashes by identity, a machine by all that it holds.
    return _prices(name, machine.topology(), ranks, payload_bytes)


@lru_cache(maxsize=65536)
def _prices(
    name: str, topology: Topology, ranks: tuple[int, ...], payload_bytes: int
) -> tuple[Price, ...]:
    if name not in _DIRECT:
        raise HardwareError(f"no algorithm is known for {name!r}", advice=f"known: {[*_DIRECT]}")
    if len(ranks) == 1:
        known = ("library", "one_shot", "two_shot", *_DIRECT[name], "islands")
        return tuple(Price(algorithm, 0.0, "analytic") for algorithm in known)
    found = _over_library(name, topology, ranks, payload_bytes)
    if is_reached(topology, ranks):
        found += _over_windows(name, topology, ranks, payload_bytes)
    return tuple(found)


def is_reached(topology: Topology, ranks: tuple[int, ...]) -> bool:
    """Whether ranks are on one host and reach each other's memory."""
    paths = [topology.path(a, b) for a in ranks for b in ranks if a < b]
    return all(path.direct and not path.crosses_node for path in paths)


# --- over the library --------------------------------------------------------------------------


def _over_library(
    name: str, topology: Topology, ranks: tuple[int, ...], payload: int
) -> list[Price]:
    def library(name: str, payload: int) -> Price:
        return _library(name, topology, ranks, payload)

    if name != "all_reduce":
        plain = library("all_to_all" if name == "reduce_scatter" else name, payload)
        own = "one_shot" if name == "reduce_scatter" else "library"
        return [Price(own, plain.seconds, plain.basis)]
    gathered = library("all_gather", len(ranks) * payload)
    narrow = int(payload * COMPRESSED)
    return [
        library(name, payload),
        Price("one_shot", gathered.seconds, gathered.basis),
        _in_turn("two_shot", library("all_to_all", payload), library("all_gather", payload)),
        _in_turn(
            "two_shot_fp8", library("all_to_all", narrow), library("all_gather", narrow),
            _coding(topology, ranks, payload), is_exact=False,
        ),
    ]  # fmt: skip


def _coding(topology: Topology, ranks: tuple[int, ...], payload: int) -> Price:
    """What turning a payload to codes, adding codes up and turning them back takes.

    A launch each: the payload is read once and written once, its codes twice both ways.
    """
    moved = (2 + 4 * COMPRESSED) * payload
    machine = topology.machine
    slowest = min(machine.device(rank).memory_bandwidth.sustained for rank in ranks)
    return Price("coding", moved / slowest + 3 * _LAUNCH_US * 1e-6, "assumed")


def _in_turn(algorithm: str, *rounds: Price, is_exact: bool = True) -> Price:
    """One round after the other; the least founded figure is the whole's basis."""
    order = ("measured here", "measured elsewhere", "assumed")
    least = max(rounds, key=lambda p: order.index(p.basis) if p.basis in order else len(order))
    return Price(algorithm, sum(p.seconds for p in rounds), least.basis, is_exact)


def _library(name: str, topology: Topology, ranks: tuple[int, ...], payload: int) -> Price:
    """The library's time by the best founded table, continued at its ends; else a ring's.

    Where only its all-reduces were measured, rings of others are as much slower than expected.
    """
    shape = "an exchange at once" if name == "all_to_all" else "a ring"
    made, least = _ring_seconds(name, topology, ranks, payload)
    for table in _library_tables(name, topology, ranks):
        seconds = _continued(table, payload)
        if seconds < _CREDIBLE * least and not is_reached(topology, ranks):
            basis = f"analytic, as {shape}: the table is of links with peer access"
            return Price("library", made, basis)
        return Price("library", seconds, table.basis)
    for table in _library_tables("all_reduce", topology, ranks):
        at = _within_table(table, payload)
        level = _continued(table, at) / _ring_seconds("all_reduce", topology, ranks, at)[0]
        level = max(level, 1.0)
        basis = f"analytic, as {shape}, times {level:.2f} as its all_reduce measured"
        return Price("library", made * level, basis)
    return Price("library", made, f"analytic, as {shape}: nobody measured the library")


def _library_tables(name: str, topology: Topology, ranks: tuple[int, ...]) -> list[Collective]:
    tables = topology.machine.tables(name, len(ranks))
    return [table for table in tables if table.algorithm in _LIBRARIES]


def _continued(table: Collective, payload: int) -> float:
    """Seconds by a table, constant below it and proportional above."""
    time = table.time_us(payload)
    if time is None:
        (small, least), (large, most) = table.points[0], table.points[-1]
        time = least if payload < small else most * payload / large
    return time * 1e-6


def _ring_seconds(
    name: str, topology: Topology, ranks: tuple[int, ...], payload: int
) -> tuple[float, float]:
    """(seconds, those of the wire alone with one latency)."""
    number, is_mesh = len(ranks), name == "all_to_all"
    hops = 2 * (number - 1) if name == "all_reduce" else number - 1
    bandwidth, latency_us = _pattern(topology, ranks, "mesh" if is_mesh else "ring", "write")
    # A ring waits for the wire at every hop; an exchange has all parts under way at once.
    waits_us, parts = latency_us, 1
    if not is_mesh:
        around = _pairs(ranks, "ring")
        waits_us = hops * sum(topology.path(a, b).write_latency_us for a, b in around) / number
        parts = hops
    wire = parts * payload / number / bandwidth
    return (_CALL_US + hops * _HOP_US + waits_us) * 1e-6 + wire, latency_us * 1e-6 + wire


# --- over windows ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rounds:
    """Rounds of an algorithm: how many, which part of the payload each flow carries, which way."""

    count: int
    is_whole: bool
    mode: str


_SHARED = _Rounds(1, False, "write")
_ONE = {"one_shot_push": _SHARED, "one_shot_pull": _Rounds(1, False, "read")}
_DIRECT: Mapping[str, Mapping[str, _Rounds]] = {
    "all_reduce": {
        "one_shot_push": _Rounds(1, True, "write"), "one_shot_pull": _Rounds(1, True, "read"),
        "two_shot_push": _Rounds(2, False, "write"), "two_shot_pull": _Rounds(2, False, "read"),
    },
    "all_gather": _ONE, "reduce_scatter": _ONE, "all_to_all": _ONE,
}  # fmt: skip


def _over_windows(
    name: str, topology: Topology, ranks: tuple[int, ...], payload: int
) -> list[Price]:
    algorithms = (*_DIRECT[name], "islands")
    known = [a for a in algorithms if _is_known(name, a, topology, ranks)]
    return [_levelled(name, algorithm, topology, ranks, payload) for algorithm in known]


def _levelled(
    name: str, algorithm: str, topology: Topology, ranks: tuple[int, ...], payload: int
) -> Price:
    """The topology's time, times what a table found beside the topology at the nearest size.

    Another algorithm's table counts too, and one of all-reduces for the other collectives: so the
    times compared are of one measure.
    """
    seconds = _seconds(name, algorithm, topology, ranks, payload)
    for op in dict.fromkeys((name, "all_reduce")):
        tables = [t for t in topology.machine.tables(op, len(ranks)) if t.algorithm in _TABLES]
        for table in sorted(tables, key=lambda t: algorithm not in _TABLES[t.algorithm]):
            alike = [a for a in _TABLES[table.algorithm] if _is_known(op, a, topology, ranks)]
            if not alike:
                continue
            # Held beside the size at which as much flows from rank to rank.
            is_whole = op != name and _DIRECT[op].get(alike[0], _SHARED).is_whole
            at = _within_table(table, payload // len(ranks) if is_whole else payload)
            expected = min(_seconds(op, a, topology, ranks, at) for a in alike)
            is_own = op == name and algorithm in alike
            basis = table.basis if is_own else f"analytic, as {table.algorithm} measured"
            return Price(algorithm, seconds * _continued(table, at) / expected, basis)
    return Price(algorithm, seconds, "analytic")


def _within_table(table: Collective, payload: int) -> int:
    """The nearest size that a table answers for."""
    if not table.points:
        return payload
    return min(max(payload, table.points[0][0]), table.points[-1][0])


def _is_known(name: str, algorithm: str, topology: Topology, ranks: tuple[int, ...]) -> bool:
    if algorithm == "islands":
        return name == "all_reduce" and bool(topology.islands_of(ranks))
    return algorithm in _DIRECT[name]


def _seconds(
    name: str, algorithm: str, topology: Topology, ranks: tuple[int, ...], payload: int
) -> float:
    if algorithm == "islands":
        return _islands_seconds(topology, ranks, payload)
    rounds = _DIRECT[name][algorithm]
    part = 1.0 if rounds.is_whole else 1.0 / len(ranks)
    bandwidth, latency_us = _pattern(topology, ranks, "mesh", rounds.mode)
    return rounds.count * ((latency_us + _ROUND_US) * 1e-6 + payload * part / bandwidth)


@cache
def _pattern(
    topology: Topology, ranks: tuple[int, ...], pattern: str, mode: str
) -> tuple[float, float]:
    """(bytes/s of the slowest flow, latency of the slowest way) while all flows run.

    A reader is told by a write that it may read, and then waits for its answer.
    """
    return _flowing(topology, [Flow(a, b, mode) for a, b in _pairs(ranks, pattern)])


def _flowing(topology: Topology, flows: Sequence[Flow]) -> tuple[float, float]:
    paths = [topology.path(f.initiator, f.peer) for f in flows]
    waits = [
        p.write_latency_us + (p.read_latency_us if f.mode == "read" else 0.0)
        for f, p in zip(flows, paths, strict=True)
    ]
    return min(topology.share(flows)), max(waits)


def _pairs(ranks: Sequence[int], pattern: str) -> list[tuple[int, int]]:
    if pattern == "ring":
        return [(r, ranks[(i + 1) % len(ranks)]) for i, r in enumerate(ranks)]
    return [(a, b) for a in ranks for b in ranks if a != b]


def _islands_seconds(topology: Topology, ranks: tuple[int, ...], payload: int) -> float:
    """Reduce-scatter within islands, all-reduce of each part across them, all-gather within."""
    islands = topology.islands_of(ranks)
    size = len(islands[0])
    inner, inner_us = _within(topology, islands)
    across, across_us = _across(topology, islands)
    inside = 2 * ((inner_us + _ROUND_US) * 1e-6 + payload / size / inner)
    return inside + (across_us + _ROUND_US) * 1e-6 + payload / size / across


@cache
def _within(topology: Topology, islands: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """Flows within all islands at once."""
    return _flowing(topology, [Flow(a, b) for i in islands for a in i for b in i if a != b])


@cache
def _across(topology: Topology, islands: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """Flows between ranks of the same number in each island, all at once."""
    columns = list(zip(*islands, strict=True))
    flows = [Flow(a, b) for column in columns for a in column for b in column if a != b]
    return _flowing(topology, flows)
