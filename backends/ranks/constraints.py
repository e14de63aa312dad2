"""What algorithms want of the ranks that meet: reach, islands. Asked where the machine is known.

A plan is loaded without asking again: its machine was held against this one, and a window that
cannot be made is refused by all ranks together when it is first wanted.
"""

from collections.abc import Callable
from itertools import combinations

from metainfer.backends.kernel import Constraint, Query
from metainfer.backends.ranks.direct import needed_bytes
from metainfer.backends.ranks.windows import bucket_bytes
from metainfer.hardware.machine import Machine
from metainfer.ir.streams import meeting_of


def obstacle(machine: Machine, ranks: tuple[int, ...]) -> str:
    """The first pair of devices of which one cannot reach the other's memory, "" if all can."""
    topology = machine.topology()
    for a, b in combinations(ranks, 2):
        path = topology.path(a, b)
        names = f"{machine.devices[a].name} and {machine.devices[b].name}"
        if path.crosses_node or machine.devices[a].node != machine.devices[b].node:
            return f"{names} are on different hosts"
        if not path.direct:
            link = next(link for link in path.links if not link.p2p)
            return f"{names} have no peer access (p2p = false on the link {link.name})"
    return ""


def _is_reached(query: Query) -> str | None:
    if query.machine is None:
        return None
    found = (obstacle(query.machine, group) for group in query.groups)
    return next((one for one in found if one), None)


def _has_islands(query: Query) -> str | None:
    if query.machine is None:
        return None
    topology = query.machine.topology()
    for group in query.groups:
        if not topology.islands_of(group):
            names = ", ".join(query.machine.devices[rank].name for rank in group)
            return f"{names} are no islands of one size above 1"
    return None


def _runs(query: Query) -> str | None:
    device = query.device
    return (
        f"{device.name} lacks triton" if device.kind == "gpu" and not device.has("triton") else None
    )


# For algorithms over windows.
REACHED = Constraint("ranks of one host that reach each other's memory", _is_reached)
RUNS = Constraint("on a gpu, feature triton", _runs)
ISLANDS = Constraint("several islands of one size above 1", _has_islands)


def requires_of(algorithm: str) -> tuple[Constraint, ...]:
    """What an algorithm wants, by its name."""
    if algorithm == "islands":
        return (RUNS, REACHED, ISLANDS)
    return (RUNS, REACHED) if is_direct(algorithm) else ()


def is_direct(algorithm: str) -> bool:
    """Whether an algorithm goes over windows."""
    return algorithm.endswith(("_push", "_pull")) or algorithm == "islands"


def window_of_query(algorithm: str) -> Callable[[Query], int] | None:
    """How many bytes of windows a call takes, both halves, at the bounds of a query."""
    if not is_direct(algorithm):
        return None

    def window(query: Query) -> int:
        meeting = meeting_of(query.op)
        assert meeting is not None
        highs = {name: high for name, (_, high) in query.limits.items()}
        payload, ranks = meeting.operands[0].tensor.bytes_at(highs), int(str(meeting.attr["ranks"]))
        is_sum_at_once = meeting.name == "all_reduce" and algorithm.startswith("one_shot")
        half = needed_bytes(
            payload, ranks, is_whole=is_sum_at_once or meeting.name == "all_gather",
            rounds=2 if algorithm.startswith("two_shot") else 1,
        )  # fmt: skip
        # Islands have a window within and one across, neither larger than this.
        return (4 if algorithm == "islands" else 2) * bucket_bytes(half)

    return window
