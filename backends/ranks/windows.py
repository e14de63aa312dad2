"""Windows: memory of a team of one host that every rank of it reaches, its own and its peers'.

On GPUs it is symmetric memory, written and read through the fabric; between processes of CPUs a
shared mapping without a name, gone when the last process is. A window is made when a size is first
met, by all ranks together, and kept.

A window has two halves, used in turn, and one barrier stands between writing and reading. So no
rank overwrites what a slow peer still reads: when it writes to a half again it has passed the
barrier of the use in between, which that peer entered only after it had read.
"""

import mmap
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from metainfer.backends.ranks.context import Team, current
from metainfer.ir.errors import Unsupported

# Smaller calls share one window.
LEAST_BYTES = 1 << 20
ALIGN = 16  # bytes that one thread of a GPU moves at once
_TURNS = 4  # rounds of a call, one more than any algorithm has
# What turns peer access off for the transport, turns it off here.
_NO_PEERS = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}


@dataclass(frozen=True)
class Place:
    """Where in a window: a rank's memory, and bytes from the begin of the half in use."""

    rank: int
    offset: int


@dataclass
class Window:
    """One window, as one rank of its team sees it.

    Attributes:
        parts: memory of each rank, u8 [2 * half_bytes].
        own: this rank's place among them.
        half_bytes: size of a half.
        barrier: returns, or lets later work of this stream begin, when all have reached it and
            see what was written before it.
        turns: on GPUs, how often the window was used, as each round of a call reads it; on the
            device, so that a captured graph finds the next half each time that it is replayed.
        is_launched: whether rounds are launches of a GPU; copies by the host else.
        used: how often it was used, for copies by the host.
        held: what must live as long as the window.
        addresses: tables of addresses by their places, made once.
    """

    parts: tuple[torch.Tensor, ...]
    own: int
    half_bytes: int
    barrier: Callable[[], object]
    turns: torch.Tensor
    is_launched: bool = False
    used: int = 0
    held: Any = None
    addresses: dict[object, torch.Tensor] = field(default_factory=dict[object, torch.Tensor])

    @property
    def size(self) -> int:
        """Ranks of the team."""
        return len(self.parts)

    def view(self, place: Place, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Elements at a place of the half in use, by the host's account of turns."""
        begin = self.used % 2 * self.half_bytes + place.offset
        part = self.parts[place.rank]
        return part[begin : begin + count * dtype.itemsize].view(dtype)

    def table(self, places: Sequence[Place], starts: Sequence[int]) -> torch.Tensor:
        """Addresses of places in the first half, and a number with each: i64 [2, places]."""
        key = (tuple(places), tuple(starts))
        if key not in self.addresses:
            rows = [[self.parts[p.rank].data_ptr() + p.offset for p in places], list(starts)]
            device = self.parts[self.own].device
            self.addresses[key] = torch.tensor(rows, dtype=torch.int64, device=device)
        return self.addresses[key]


def padded(num_bytes: int) -> int:
    """Bytes rounded up to whole vectors, so that what lies behind begins on one."""
    return -(-num_bytes // ALIGN) * ALIGN


def bucket_bytes(num_bytes: int) -> int:
    """Size of the half that holds so many bytes: a power of two."""
    return max(1 << max(num_bytes - 1, 0).bit_length(), LEAST_BYTES)


def window_of(team: Team, num_bytes: int, device: torch.device) -> Window:
    """The team's window of at least so many bytes a half; all ranks ask for it in one order.

    Raises: Unsupported, on all ranks of the team alike, if they do not reach each other's memory.
    """
    windows, half = current().windows, bucket_bytes(num_bytes)
    key = (team.name, half)
    if key not in windows:
        make = _symmetric if device.type == "cuda" else _mapped
        windows[key] = make(team, half, device)
    found: Window = windows[key]
    return found


# --- between processes of CPUs -----------------------------------------------------------------


def _mapped(team: Team, half: int, device: torch.device) -> Window:
    """A shared mapping. Its file has no name: nobody has to remove it, whoever is killed."""
    size = 2 * half
    _agree(team, _strangers(team))
    descriptor, place = -1, [""]
    if team.own == 0 and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("window")
        os.ftruncate(descriptor, size * team.size)
        place = [f"/proc/{os.getpid()}/fd/{descriptor}"]
    dist.broadcast_object_list(place, src=team.peers[0], group=team.group)
    mapping, said = None, ""
    try:
        mapping = _map(place[0], size * team.size)
    except OSError as error:
        said = f"rank {team.peers[team.own]} cannot map the memory of rank {team.peers[0]}: {error}"
    try:
        _agree(team, said)  # all have mapped it, or all give up
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    assert mapping is not None
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    parts = tuple(whole[rank * size : (rank + 1) * size] for rank in range(team.size))
    turns = torch.zeros(_TURNS, dtype=torch.int32)
    return Window(parts, team.own, half, lambda: dist.barrier(group=team.group), turns)


def _map(path: str, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


# --- between GPUs ------------------------------------------------------------------------------


def _symmetric(team: Team, half: int, device: torch.device) -> Window:
    # Multicast is not used here, and setting it up is not without danger on shared hosts.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    # NOTE: rendezvous hangs on the ranks that can, where others cannot: all must know before.
    said = [_strangers(team), _unreachable(team, device)]
    _agree(team, next(filter(None, said), ""))
    made = symmetric.empty(2 * half, dtype=torch.uint8, device=device)
    handle: Any = symmetric.rendezvous(made, team.group)
    parts = tuple(handle.get_buffer(r, (2 * half,), torch.uint8) for r in range(team.size))
    turns = torch.zeros(_TURNS, dtype=torch.int32, device=device)
    return Window(parts, team.own, half, handle.barrier, turns, True, held=(made, handle))


def _unreachable(team: Team, device: torch.device) -> str:
    """The first device whose memory this rank does not reach, "" if it reaches all."""
    own = device.index or 0
    indices = _gathered(team, own)
    for name, values in _NO_PEERS.items():
        if os.environ.get(name, "") in values:
            return f"{name}={os.environ[name]} turns peer access off"
    for rank, other in zip(team.peers, indices, strict=True):
        if other == own or other >= torch.cuda.device_count():
            continue
        if not torch.cuda.can_device_access_peer(own, other):
            return (
                f"devices {own} and {other} (ranks {team.peers[team.own]} and {rank}) have no "
                "peer access"
            )
    return ""


# --- agreement ---------------------------------------------------------------------------------


def _gathered(team: Team, own: Any) -> list[Any]:
    found: list[Any] = [None] * team.size
    dist.all_gather_object(found, own, group=team.group)
    return found


def _strangers(team: Team) -> str:
    """Why ranks share no memory: they are on several hosts; "" if they are on one."""
    hosts = _gathered(team, socket.gethostname())
    other = next((i for i, host in enumerate(hosts) if host != hosts[0]), None)
    if other is None:
        return ""
    return f"ranks {team.peers[0]} and {team.peers[other]} are on {hosts[0]} and {hosts[other]}"


def _agree(team: Team, said: str) -> None:
    """Give up on all ranks if one has to.

    Raises: Unsupported with what the first such rank says.
    """
    found = [one for one in _gathered(team, said) if one]
    if found:
        raise Unsupported(
            f"the ranks along {team.name} share no memory: {found[0]}",
            advice="another algorithm stands in; or compile for the machine as it is: p2p = false "
            "in its file where devices do not reach each other",
        )
