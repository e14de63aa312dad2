"""What a rank knows of the mesh while it runs: its numbers, and whom it meets along each axis.

Set once by the runtime when a plan of several ranks is loaded; collective kernels read it when they
are called. A process is one rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from metainfer.ir.errors import PlanError
from metainfer.ir.types import Mesh


@dataclass(frozen=True)
class Team:
    """Ranks that meet, as one of them sees them.

    Attributes:
        name: what windows are kept under: the axis, or "<axis>.inner" and "<axis>.outer" of its
            islands.
        group: their process group.
        peers: them, in order, this rank among them.
        own: this rank's place among them.
    """

    name: str
    group: Any
    peers: tuple[int, ...]
    own: int

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.peers)


@dataclass(frozen=True)
class RankContext:
    """One rank of a mesh.

    Attributes:
        mesh: axes over the ranks.
        rank: this one, of all ranks of the plan.
        numbers: its number along each axis.
        groups: process group of each axis.
        peers: ranks that meet along each axis, this one among them.
        limit_s: seconds after which the transport gives up waiting.
        inner: of each axis that goes over several islands: this rank's island.
        outer: of each such axis: the ranks of this one's place in every island.
        windows: memory that teams share, by name and size (`backends.ranks.windows`).
    """

    mesh: Mesh
    rank: int
    numbers: Mapping[str, int]
    groups: Mapping[str, Any]
    peers: Mapping[str, tuple[int, ...]]
    limit_s: float
    inner: Mapping[str, Team] = field(default_factory=dict[str, Team])
    outer: Mapping[str, Team] = field(default_factory=dict[str, Team])
    windows: dict[tuple[str, int], Any] = field(
        default_factory=dict[tuple[str, int], Any], compare=False
    )


_current: RankContext | None = None


def set_context(context: RankContext | None) -> None:
    """Say which rank this process is; None forgets it."""
    global _current
    _current = context


def current() -> RankContext:
    """This process's rank.

    Raises: PlanError if the process is none.
    """
    if _current is None:
        raise PlanError(
            "a kernel of several ranks runs in a process that is none of them",
            advice="run the plan by metainfer run --nproc N, or under torchrun",
        )
    return _current


def group_of(axis: str) -> Any:
    """The process group of an axis.

    Raises: PlanError if the process is no rank of a mesh with that axis.
    """
    context = current()
    if axis not in context.groups:
        raise PlanError(f"the mesh {context.mesh} has no axis {axis!r}")
    return context.groups[axis]


def number_along(axis: str) -> int:
    """This rank's number along an axis.

    Raises: PlanError if the process is no rank of a mesh with that axis.
    """
    context = current()
    if axis not in context.numbers:
        raise PlanError(f"the mesh {context.mesh} has no axis {axis!r}")
    return context.numbers[axis]


def team_of(axis: str) -> Team:
    """The ranks that meet along an axis.

    Raises: PlanError if the process is no rank of a mesh with that axis.
    """
    return Team(axis, group_of(axis), current().peers[axis], number_along(axis))


def island_teams(axis: str) -> tuple[Team, Team]:
    """This rank's island along an axis, and the ranks of its place in every island.

    Raises: PlanError if the axis goes over no islands here.
    """
    context = current()
    if axis not in context.inner:
        raise PlanError(
            f"the ranks along {axis!r} are no islands of one size",
            advice="compile for this machine: its file says which devices are near each other",
        )
    return context.inner[axis], context.outer[axis]
