"""Orders: what the leader tells all ranks to do next, as bytes over the control group."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from metainfer.backends.ranks.meeting import meeting
from metainfer.runtime.ranks import Ranks, wait

# Most decode steps fit into one frame, so that they cost one broadcast.
FRAME_BYTES = 1 << 14
_LENGTH_BYTES = 8
_ALIGN = 16

Kind = Literal["step", "replay", "call", "stop"]
Arrays = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Order:
    """One order.

    Attributes:
        kind: "step" of a language model, launch by launch, "replay" of a decode step as a graph,
            "call" of a module, or "stop".
        phase: of the step.
        arrays: what each replica is given, by name: tokens and step fields, or inputs.
    """

    kind: Kind
    phase: str = ""
    arrays: tuple[Arrays, ...] = ()


def encode(order: Order) -> bytes:
    """An order as bytes: a head that names the arrays, then their elements."""
    tensors = [t.detach().cpu().contiguous() for one in order.arrays for t in one.values()]
    fields = [
        [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in one.items()]
        for one in order.arrays
    ]
    head = json.dumps([order.kind, order.phase, fields]).encode()
    parts = [len(head).to_bytes(_LENGTH_BYTES, "little"), head]
    parts[1] += b" " * (-(_LENGTH_BYTES + len(head)) % _ALIGN)
    for tensor in tensors:
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        parts += [raw, bytes(-len(raw) % _ALIGN)]
    return b"".join(parts)


def decode(data: bytearray) -> Order:
    """The order that `encode` wrote; its tensors share the buffer's memory."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    kind, phase, fields = json.loads(data[_LENGTH_BYTES:end])
    at = -(-end // _ALIGN) * _ALIGN
    arrays: list[dict[str, torch.Tensor]] = []
    for one in fields:
        arrays.append({})
        for name, text, shape in one:
            dtype: torch.dtype = getattr(torch, text)
            count = torch.Size(shape).numel()
            size = count * dtype.itemsize
            flat = (
                torch.frombuffer(data, dtype=dtype, count=count, offset=at)
                if count
                else torch.empty(0, dtype=dtype)
            )
            arrays[-1][name] = flat.view(shape)
            at += -(-size // _ALIGN) * _ALIGN
    return Order(kind, phase, tuple(arrays))


def give(ranks: Ranks, order: Order) -> None:
    """The leader's side. Raises: RankError if a rank is gone."""
    data = encode(order)
    whole = bytearray(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    whole += bytes(max(FRAME_BYTES - len(whole), 0))
    with _meeting(f"the order of a {order.kind}", ranks):
        _send(ranks, torch.frombuffer(whole, dtype=torch.uint8, count=FRAME_BYTES))
        if len(whole) > FRAME_BYTES:
            _send(ranks, torch.frombuffer(whole, dtype=torch.uint8, offset=FRAME_BYTES))


def _send(ranks: Ranks, data: torch.Tensor) -> None:
    wait(dist.broadcast(data, src=0, group=ranks.control, async_op=True), ranks.limit_s)


def take(ranks: Ranks) -> Order:
    """Every other rank's side: wait for the next order. Raises: RankError if the leader is gone."""
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    with _meeting("waiting for an order", ranks):
        dist.broadcast(frame, src=0, group=ranks.control)
        found = bytearray(frame.numpy().tobytes())
        length = int.from_bytes(found[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
        if length > FRAME_BYTES:
            rest = torch.empty(length - FRAME_BYTES, dtype=torch.uint8)
            dist.broadcast(rest, src=0, group=ranks.control)
            found += rest.numpy().tobytes()
    return decode(found[_LENGTH_BYTES:length])


def _meeting(what: str, ranks: Ranks) -> AbstractContextManager[None]:
    return meeting(what, ranks.rank, ranks.everybody, ranks.limit_s)
