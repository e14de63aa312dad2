"""Algorithms of collectives: over torch.distributed's transports, and over windows.

``library`` leaves the algorithm to NCCL or gloo. ``one_shot`` and ``two_shot`` exchange parts by it
and sum them here, in float32 and rank order, rounded once: the same numbers as the reference, on
every rank, whatever the transport. Those that ``push`` or ``pull`` move data themselves, through
memory that the ranks share (`backends.ranks.direct`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from metainfer.backends.ranks import wire_codes
from metainfer.backends.ranks.context import (
    current,
    group_of,
    island_teams,
    number_along,
    team_of,
)
from metainfer.backends.ranks.direct import DIRECT, Algorithm, islands
from metainfer.backends.ranks.meeting import meeting
from metainfer.backends.ranks.rounds import sum_parts
from metainfer.backends.torch.call import TorchCall

Run = Callable[[TorchCall], None]
# What the transport's own sum adds: it rounds to the element type between hops.
LIBRARY_ERROR = 2.0**-9
COMPRESSED = "two_shot_fp8"
# Half a step of e4m3, which has three bits behind the leading one: of each part, and of the sum.
FP8_ERROR = 2 * 2.0**-4


def group_of_call(call: TorchCall) -> Any:
    """The process group that a call's ranks meet in."""
    return group_of(str(call.attrs["axis"]))


def guarded(name: str, run: Run) -> Run:
    """An algorithm whose failures name the op and the ranks that met."""

    def guard(call: TorchCall) -> None:
        context, axis = current(), str(call.attrs["axis"])
        peers = context.peers.get(axis, ())
        with meeting(f"{name} over {axis}", context.rank, peers, context.limit_s):
            run(call)

    return guard


def gather_flat(x: torch.Tensor, group: Any, ranks: int) -> torch.Tensor:
    """Every rank's tensor, in rank order: [ranks, numel]."""
    flat = x.contiguous().view(-1)
    made = torch.empty(ranks * flat.numel(), dtype=flat.dtype, device=flat.device)
    # NOTE: newer torch renames it; gloo wants flat buffers.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(made, flat, group=group)
    return made.view(ranks, -1)


def _exchange_flat(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Part r of each rank's flat tensor goes to rank r: what was sent here, [ranks, part]."""
    made = torch.empty_like(x)
    dist.all_to_all_single(made, x, group=group)
    return made


def all_reduce_library(call: TorchCall) -> None:
    """The transport's own all-reduce, which may round between hops."""
    call.outputs[0].copy_(call.inputs[0])
    dist.all_reduce(call.outputs[0], group=group_of_call(call))


def all_reduce_one_shot(call: TorchCall) -> None:
    """Everybody gets every part and sums: one round, ranks times the bytes."""
    parts = gather_flat(call.inputs[0], group_of_call(call), int(call.attrs["ranks"]))
    call.outputs[0].view(-1).copy_(sum_parts(tuple(parts)))


def two_shot_sum(call: TorchCall) -> torch.Tensor:
    """The sum of all ranks' first operands, of which each rank took one part."""
    x, ranks, group = call.inputs[0], int(call.attrs["ranks"]), group_of_call(call)
    flat = x.contiguous().view(-1)
    size = -(-flat.numel() // ranks)
    padded = torch.nn.functional.pad(flat, (0, size * ranks - flat.numel()))
    own_part = sum_parts(tuple(_exchange_flat(padded, group).view(ranks, size)))
    return gather_flat(own_part, group, ranks).view(-1)[: flat.numel()].view(x.shape)


def all_reduce_two_shot(call: TorchCall) -> None:
    """Each rank sums one part, then hands it to all: two rounds, twice the bytes."""
    call.outputs[0].copy_(two_shot_sum(call))


def parts_to_sum(call: TorchCall) -> torch.Tensor:
    """This rank's part of every rank's first operand, in rank order: [ranks, ...]."""
    parts = _split(call.inputs[0], int(call.attrs["dim"]), int(call.attrs["ranks"]))
    return _exchange_flat(parts.reshape(-1), group_of_call(call)).view(parts.shape)


def reduce_scatter_one_shot(call: TorchCall) -> None:
    """Each rank gets its part of every rank's tensor and sums."""
    call.outputs[0].copy_(sum_parts(tuple(parts_to_sum(call))))


def all_gather_library(call: TorchCall) -> None:
    """The transport's own all-gather."""
    ranks, dim, x = int(call.attrs["ranks"]), int(call.attrs["dim"]), call.inputs[0]
    parts = gather_flat(x, group_of_call(call), ranks).view(ranks, *x.shape)
    call.outputs[0].copy_(torch.cat(tuple(parts), dim=dim))


def all_to_all_library(call: TorchCall) -> None:
    """The transport's own all-to-all."""
    ranks = int(call.attrs["ranks"])
    source, target = int(call.attrs["source"]), int(call.attrs["target"])
    parts = _split(call.inputs[0], target, ranks)
    got = _exchange_flat(parts.reshape(-1), group_of_call(call)).view(parts.shape)
    call.outputs[0].copy_(torch.cat(tuple(got), dim=source))


def _split(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """Parts of a dim, stacked: [ranks, ...]."""
    return torch.stack(torch.chunk(x, ranks, dim=dim)).contiguous()


def all_reduce_two_shot_fp8(call: TorchCall) -> None:
    """As two_shot, with e4m3 codes and a scale for each 128 values on the wire, both ways.

    What ranks receive are the same codes everywhere, one's own included: all get the same sum.
    """
    x, ranks, group = flat(call.inputs[0]), int(call.attrs["ranks"]), group_of_call(call)
    part = wire_codes.part_of(x.numel(), ranks)
    got = _exchange_flat(wire_codes.encoded(x, ranks).view(-1), group).view(ranks, -1)
    sums = gather_flat(wire_codes.summed(got, part), group, ranks)
    wire_codes.decode(sums, part, call.outputs[0].view(-1))


# --- over windows ------------------------------------------------------------------------------


def flat(x: torch.Tensor) -> torch.Tensor:
    """Elements in one dense row."""
    return x.contiguous().view(-1)


def received(call: TorchCall, algorithm: Algorithm) -> torch.Tensor:
    """What a sum over windows gives this rank, in memory of its own."""
    x, team = call.inputs[0], team_of(str(call.attrs["axis"]))
    if "dim" not in call.attrs:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        algorithm(flat(x), out.view(-1), team)
        return out
    parts = _split(x, int(call.attrs["dim"]), team.size)
    out = torch.empty(parts.shape[1:], dtype=x.dtype, device=x.device)
    algorithm(flat(parts), out.view(-1), team)
    return out


def _into(call: TorchCall, shape: tuple[int, ...]) -> torch.Tensor:
    """Where an algorithm may write at once: the result, if it is dense and of this shape."""
    out = call.outputs[0]
    if out.is_contiguous() and out.numel() == torch.Size(shape).numel():
        return out.view(shape)
    return torch.empty(shape, dtype=out.dtype, device=out.device)


def _direct_sum(algorithm: Algorithm) -> Run:
    def run(call: TorchCall) -> None:
        x, team = call.inputs[0], team_of(str(call.attrs["axis"]))
        dim = int(call.attrs.get("dim", 0))
        out = _into(call, tuple(call.outputs[0].shape))
        algorithm(flat(x if dim == 0 else _split(x, dim, team.size)), out.view(-1), team)
        _hand_over(out, call)

    return run


def _direct_gather(algorithm: Algorithm) -> Run:
    def run(call: TorchCall) -> None:
        x, dim, team = call.inputs[0], int(call.attrs["dim"]), team_of(str(call.attrs["axis"]))
        shape = (team.size, *x.shape)
        out = _into(call, shape) if dim == 0 else x.new_empty(shape)
        algorithm(flat(x), out.view(-1), team)
        _hand_over(out if dim == 0 else torch.cat(tuple(out), dim=dim), call)

    return run


def _direct_exchange(algorithm: Algorithm) -> Run:
    def run(call: TorchCall) -> None:
        team = team_of(str(call.attrs["axis"]))
        source, target = int(call.attrs["source"]), int(call.attrs["target"])
        parts = _split(call.inputs[0], target, team.size)
        out = _into(call, tuple(parts.shape)) if source == 0 else torch.empty_like(parts)
        algorithm(flat(parts), out.view(-1), team)
        _hand_over(out if source == 0 else torch.cat(tuple(out), dim=source), call)

    return run


def _hand_over(made: torch.Tensor, call: TorchCall) -> None:
    out = call.outputs[0]
    if made.data_ptr() != out.data_ptr():
        out.copy_(made.reshape(out.shape))


def all_reduce_islands(call: TorchCall) -> None:
    """Within islands, across them, within again."""
    x = call.inputs[0]
    out = _into(call, tuple(x.shape))
    islands(flat(x), out.view(-1), island_teams(str(call.attrs["axis"])))
    _hand_over(out, call)


_OVER_WINDOWS: dict[str, Callable[[Algorithm], Run]] = {
    "all_reduce": _direct_sum,
    "reduce_scatter": _direct_sum,
    "all_gather": _direct_gather,
    "all_to_all": _direct_exchange,
}


def _direct(name: str) -> dict[str, Run]:
    return {algorithm: _OVER_WINDOWS[name](run) for algorithm, run in DIRECT[name].items()}


def take_shard(call: TorchCall) -> None:
    """The rank's own part of a dim."""
    attrs = call.attrs
    ranks, dim = int(attrs["ranks"]), int(attrs["dim"])
    parts = int(attrs["parts"]) or ranks
    number = number_along(str(attrs["axis"])) * parts // ranks
    size = call.inputs[0].shape[dim] // parts
    call.outputs[0].copy_(call.inputs[0].narrow(dim, number * size, size))


def local_index(call: TorchCall) -> None:
    """Row numbers within the rank's own rows, -1 for all others."""
    ids, count = call.inputs[0], int(call.attrs["count"])
    local = ids - number_along(str(call.attrs["axis"])) * count
    inside = (ids >= 0) & (local >= 0) & (local < count)
    call.outputs[0].copy_(torch.where(inside, local, -1))


ALGORITHMS: dict[str, dict[str, Run]] = {
    "all_reduce": {
        "library": all_reduce_library,
        "one_shot": all_reduce_one_shot,
        "two_shot": all_reduce_two_shot,
        **_direct("all_reduce"),
        "islands": all_reduce_islands,
        COMPRESSED: all_reduce_two_shot_fp8,
    },
    "reduce_scatter": {"one_shot": reduce_scatter_one_shot, **_direct("reduce_scatter")},
    "all_gather": {"library": all_gather_library, **_direct("all_gather")},
    "all_to_all": {"library": all_to_all_library, **_direct("all_to_all")},
}
OWN: dict[str, Run] = {"take_shard": take_shard, "local_index": local_index}
