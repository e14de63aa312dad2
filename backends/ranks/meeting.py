"""Meetings of ranks that fail: what a transport raises becomes an error naming rank and remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

from metainfer.ir.errors import RankError

# What transports say when they gave up waiting, and when a peer is gone.
_WAITED = ("timed out", "timeout")
_GONE = ("closed by peer", "reset by peer", "broken pipe", "connection", "remote process", "socket")

# The last meeting that this rank began, for whoever watches the time from another thread.
_last = ""


def last_meeting() -> str:
    """The last meeting that this rank began, "" if there was none."""
    return _last


@contextmanager
def meeting(what: str, rank: int, peers: tuple[int, ...], limit_s: float) -> Iterator[None]:
    """Name rank, op and remedy where a meeting fails.

    Args:
        what: the op, as the error names it.
        rank: this one.
        peers: who meets.
        limit_s: seconds that the transport waits.

    Raises: RankError if the others did not come in time, or are gone.
    """
    global _last
    _last = what
    try:
        yield
    except RuntimeError as error:
        line = (str(error).splitlines() or [""])[0]
        said = line.lower()
        others = ", ".join(str(p) for p in peers if p != rank)
        if any(word in said for word in _WAITED):
            raise overdue(f"{what} with {others}", rank, limit_s) from error
        if not any(word in said for word in _GONE):
            raise
        raise RankError(
            f"rank {rank} lost a peer in {what}: one of {others} is gone",
            text=line[:200],
            is_echo=True,
        ) from error


def overdue(what: str, rank: int, limit_s: float) -> RankError:
    """The error of a meeting that did not end in time."""
    return RankError(
        f"rank {rank}: {what} did not end within {limit_s:g} s",
        text="a peer hangs or is slower than the limit, or the way between the devices is broken",
        advice="GPUs: try NCCL_P2P_DISABLE=1, and look for ACS or IOMMU redirecting peer traffic; "
        "slow ranks: a larger --time-limit",
    )
