"""Algorithms of collectives, each written over torch.distributed's transports.

``library`` leaves the algorithm to NCCL or gloo. ``one_shot`` and ``two_shot`` exchange parts and
sum them here, in float32 and rank order, rounded once: the same numbers as the reference, on every
rank, whatever the transport.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from metainfer.backends.ranks.context import current, group_of, number_along
from metainfer.backends.ranks.meeting import meeting
from metainfer.backends.torch.call import TorchCall

Run = Callable[[TorchCall], None]
# What the transport's own sum adds: it rounds to the element type between hops.
LIBRARY_ERROR = 2.0**-9


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


def _sum(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the first dim in its order; narrow floats in float32."""
    wide = parts.float() if parts.is_floating_point() else parts
    total = wide[0].clone()
    for part in wide[1:]:
        total += part
    return total.to(parts.dtype)


def all_reduce_library(call: TorchCall) -> None:
    """The transport's own all-reduce, which may round between hops."""
    call.outputs[0].copy_(call.inputs[0])
    dist.all_reduce(call.outputs[0], group=group_of_call(call))


def all_reduce_one_shot(call: TorchCall) -> None:
    """Everybody gets every part and sums: one round, ranks times the bytes."""
    parts = gather_flat(call.inputs[0], group_of_call(call), int(call.attrs["ranks"]))
    call.outputs[0].view(-1).copy_(_sum(parts))


def two_shot_sum(call: TorchCall) -> torch.Tensor:
    """The sum of all ranks' first operands, of which each rank took one part."""
    x, ranks, group = call.inputs[0], int(call.attrs["ranks"]), group_of_call(call)
    flat = x.contiguous().view(-1)
    size = -(-flat.numel() // ranks)
    padded = torch.nn.functional.pad(flat, (0, size * ranks - flat.numel()))
    own_part = _sum(_exchange_flat(padded, group).view(ranks, size))
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
    call.outputs[0].copy_(_sum(parts_to_sum(call)))


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
    },
    "reduce_scatter": {"one_shot": reduce_scatter_one_shot},
    "all_gather": {"library": all_gather_library},
    "all_to_all": {"library": all_to_all_library},
}
OWN: dict[str, Run] = {"take_shard": take_shard, "local_index": local_index}
