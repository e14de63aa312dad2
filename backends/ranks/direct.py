"""Algorithms over windows: ranks write to their peers' memory (push), or read from it (pull).

A push moves data while the writer goes on, a pull waits for each answer; fabrics carry the two at
rates of their own, and some turn one of them into a trickle. Sums are those of the reference bit
for bit, on every rank: in float32 and rank order, rounded once.

What a half of a window holds, for all: slots of the first round, one a rank; behind them those of
the second.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from metainfer.backends.ranks.context import Team
from metainfer.backends.ranks.rounds import Part, receive, send, total
from metainfer.backends.ranks.windows import ALIGN, Place, Window, padded, window_of

# (what a rank gives, what it gets, who meets); both dense and flat.
Algorithm = Callable[[torch.Tensor, torch.Tensor, Team], None]


@dataclass(frozen=True)
class _Slots:
    """Parts of one size in a half of a window.

    Attributes:
        window: the window.
        slot: bytes of a part, padded to whole vectors.
    """

    window: Window
    slot: int

    @property
    def order(self) -> list[int]:
        """All ranks, beginning behind this one: so not all turn to the same at once."""
        return [(self.window.own + 1 + i) % self.window.size for i in range(self.window.size)]

    def at(self, rank: int, number: int, start: int = 0, *, second: bool = False) -> Part:
        """Slot of a number in a rank's memory, of the first round or the second."""
        place = number + (self.window.size if second else 0)
        return Part(Place(rank, place * self.slot), start)


def _slots(team: Team, x: torch.Tensor, size: int, rounds: int = 1) -> _Slots:
    slot = padded(size * x.dtype.itemsize)
    return _Slots(window_of(team, rounds * team.size * slot, x.device), slot)


def needed_bytes(payload: int, ranks: int, *, is_whole: bool, rounds: int) -> int:
    """Bytes of a half that a call needs.

    Args:
        payload: of the tensor that each rank gives.
        ranks: that meet.
        is_whole: whether all of it goes to every rank.
        rounds: in which something is written.
    """
    part = payload if is_whole else -(-payload // ranks)
    return rounds * ranks * padded(part)


# --- sums --------------------------------------------------------------------------------------


def one_shot_push(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Write everything to everybody, sum what came. Shapes: x flat, out the same."""
    size = x.numel()
    slots, own = _slots(team, x, size), team.own
    send(slots.window, x, [slots.at(rank, own) for rank in slots.order], size)
    slots.window.barrier()
    total(slots.window, out, [slots.at(own, n) for n in range(team.size)], (), size, is_last=True)


def one_shot_pull(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Lay everything out, sum what lies at all. Shapes: x flat, out the same."""
    size = x.numel()
    slots = _slots(team, x, size)
    send(slots.window, x, [slots.at(team.own, 0)], size)
    slots.window.barrier()
    total(slots.window, out, [slots.at(n, 0) for n in range(team.size)], (), size, is_last=True)


def _part_of(x: torch.Tensor, ranks: int) -> int:
    """Elements that each rank sums, whole vectors of them."""
    vector = ALIGN // x.dtype.itemsize
    return -(-x.numel() // ranks // vector) * vector if x.numel() else 0


def two_shot_push(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Write each rank its part; it writes the sum to all. Shapes: x flat, out the same."""
    part, own = _part_of(x, team.size), team.own
    slots, ranks = _slots(team, x, part, 2), range(team.size)
    send(slots.window, x, [slots.at(rank, own, rank * part) for rank in slots.order], part)
    slots.window.barrier()
    targets = [slots.at(rank, own, second=True) for rank in slots.order]
    total(slots.window, out, [slots.at(own, n) for n in ranks], targets, part, is_last=False)
    slots.window.barrier()
    receive(
        slots.window, out, [slots.at(own, n, n * part, second=True) for n in ranks], part, number=2
    )


def two_shot_pull(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Lay everything out; read one's part of all, then all sums. Shapes: x flat, out the same."""
    part, own = _part_of(x, team.size), team.own
    slots, ranks = _slots(team, x, part, 2), range(team.size)
    send(slots.window, x, [slots.at(own, 0)], team.size * part)
    slots.window.barrier()
    target = [slots.at(own, own, second=True)]
    total(slots.window, out, [slots.at(n, own) for n in ranks], target, part, is_last=False)
    slots.window.barrier()
    parts = [slots.at(n, n, n * part, second=True) for n in slots.order]
    receive(slots.window, out, parts, part, number=2)


def scattered_push(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Write each rank its part, sum one's own. Shapes: x [ranks * n], out [n]."""
    size, own = x.numel() // team.size, team.own
    slots = _slots(team, x, size)
    send(slots.window, x, [slots.at(rank, own, rank * size) for rank in slots.order], size)
    slots.window.barrier()
    total(slots.window, out, [slots.at(own, n) for n in range(team.size)], (), size, is_last=True)


def scattered_pull(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Lay everything out, sum one's part of all. Shapes: x [ranks * n], out [n]."""
    size = x.numel() // team.size
    slots = _slots(team, x, size)
    _lay_out(slots, x, team, size)
    slots.window.barrier()
    sources = [slots.at(n, team.own) for n in range(team.size)]
    total(slots.window, out, sources, (), size, is_last=True)


def _lay_out(slots: _Slots, x: torch.Tensor, team: Team, size: int) -> None:
    """Put all parts into slots of one's own memory."""
    parts = [slots.at(team.own, n, n * size) for n in range(team.size)]
    send(slots.window, x, parts, size)


# --- exchanges ---------------------------------------------------------------------------------


def gathered_push(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Write everything to everybody. Shapes: x [n], out [ranks * n]."""
    size, own = x.numel(), team.own
    slots = _slots(team, x, size)
    send(slots.window, x, [slots.at(rank, own) for rank in slots.order], size)
    slots.window.barrier()
    receive(slots.window, out, [slots.at(own, n, n * size) for n in range(team.size)], size)


def gathered_pull(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Lay everything out, read what lies at all. Shapes: x [n], out [ranks * n]."""
    size = x.numel()
    slots = _slots(team, x, size)
    send(slots.window, x, [slots.at(team.own, 0)], size)
    slots.window.barrier()
    receive(slots.window, out, [slots.at(n, 0, n * size) for n in slots.order], size)


def swapped_push(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Write each rank its part. Shapes: x and out [ranks * n]."""
    size, own = x.numel() // team.size, team.own
    slots = _slots(team, x, size)
    send(slots.window, x, [slots.at(rank, own, rank * size) for rank in slots.order], size)
    slots.window.barrier()
    receive(slots.window, out, [slots.at(own, n, n * size) for n in range(team.size)], size)


def swapped_pull(x: torch.Tensor, out: torch.Tensor, team: Team) -> None:
    """Lay everything out, read one's part of all. Shapes: x and out [ranks * n]."""
    size = x.numel() // team.size
    slots = _slots(team, x, size)
    _lay_out(slots, x, team, size)
    slots.window.barrier()
    receive(slots.window, out, [slots.at(n, team.own, n * size) for n in slots.order], size)


DIRECT: Mapping[str, Mapping[str, Algorithm]] = {
    "all_reduce": {
        "one_shot_push": one_shot_push,
        "one_shot_pull": one_shot_pull,
        "two_shot_push": two_shot_push,
        "two_shot_pull": two_shot_pull,
    },
    "reduce_scatter": {"one_shot_push": scattered_push, "one_shot_pull": scattered_pull},
    "all_gather": {"one_shot_push": gathered_push, "one_shot_pull": gathered_pull},
    "all_to_all": {"one_shot_push": swapped_push, "one_shot_pull": swapped_pull},
}


def islands(x: torch.Tensor, out: torch.Tensor, teams: tuple[Team, Team]) -> None:
    """Sum within islands, then each part across them, then bring the parts together; by pushes.

    Only a part of the data goes over the link between islands, once. The sum is rounded to the
    element type at the border of an island.

    Args:
        x: dense, flat.
        out: the same.
        teams: this rank's island, and the ranks of its place in every island.
    """
    inner, outer = teams
    part = _part_of(x, inner.size)
    whole = torch.nn.functional.pad(x, (0, part * inner.size - x.numel()))
    near, far = x.new_empty(part), x.new_empty(part)
    scattered_push(whole, near, inner)
    one_shot_push(near, far, outer)
    gathered_push(far, whole, inner)
    out.copy_(whole[: x.numel()])
