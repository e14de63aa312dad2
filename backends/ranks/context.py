"""What a rank knows of the mesh while it runs: its numbers, and whom it meets along each axis.

Set once by the runtime when a plan of several ranks is loaded; collective kernels read it when they
are called. A process is one rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metainfer.ir.errors import PlanError
from metainfer.ir.types import Mesh


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
    """

    mesh: Mesh
    rank: int
    numbers: Mapping[str, int]
    groups: Mapping[str, Any]
    peers: Mapping[str, tuple[int, ...]]
    limit_s: float


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
