"""Plain PyTorch forms of the ops that move, repeat or make numbers, and the views."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.tensors import BlockTensors

Run = Callable[[TorchCall], None]
View = Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]


def _slice(x: torch.Tensor, attrs: Mapping[str, Any]) -> torch.Tensor:
    index = [slice(None)] * x.dim()
    index[attrs["dim"]] = slice(attrs["start"], attrs["stop"], attrs["step"])
    return x[tuple(index)]


# Views of a tensor's numbers; a reshape of a tensor with gaps copies.
VIEWS: dict[str, View] = {
    "reshape": lambda x, attrs: x.reshape(attrs["shape"]),
    "transpose": lambda x, attrs: x.permute(attrs["perm"]),
    "broadcast": lambda x, attrs: x.expand(attrs["shape"]),
    "slice": _slice,
}


def _copied(view: View) -> Run:
    def run(call: TorchCall) -> None:
        call.outputs[0].copy_(view(call.inputs[0], call.attrs))

    return run


def _concat(call: TorchCall) -> None:
    torch.cat(call.inputs, dim=call.attrs["dim"], out=call.outputs[0])


def _pad(call: TorchCall) -> None:
    x, out = call.inputs[0], call.outputs[0]
    axis = call.attrs["dim"] % x.dim()
    out.fill_(call.attrs["value"])
    out.narrow(axis, call.attrs["before"], x.shape[axis]).copy_(x)


def as_index(index: torch.Tensor) -> torch.Tensor:
    """Indices in a type that torch indexes with."""
    return index if index.dtype in (torch.int32, torch.int64) else index.long()


def zero_missing(index: torch.Tensor, out: torch.Tensor) -> None:
    """Make rows of negative numbers zero: padded tokens, and rows that another rank holds.

    Shapes: index [I...], out [I..., D].
    """
    if index.dtype.is_signed:
        out.masked_fill_((index < 0).unsqueeze(-1), 0)


def take_rows(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows of the first dim.

    Shapes: x [N, ...], index [I...], out [I..., ...] of any type.
    """
    flat = as_index(index).reshape(-1)
    if out.dtype == x.dtype and out.is_contiguous():
        torch.index_select(x, 0, flat, out=out.view(-1, *x.shape[1:]))
        return
    out.copy_(x.index_select(0, flat).view(*index.shape, *x.shape[1:]))


def _gather(call: TorchCall) -> None:
    take_rows(call.inputs[0], call.inputs[1], call.outputs[0])


def _embedding(call: TorchCall) -> None:
    index, table = call.inputs
    known = index.clamp(min=0) if index.dtype.is_signed else index
    if isinstance(table, BlockTensors):
        call.outputs[0].copy_(table.rows(as_index(known)))
    else:
        take_rows(table, known, call.outputs[0])
    zero_missing(index, call.outputs[0])


def _full(call: TorchCall) -> None:
    call.outputs[0].fill_(call.attrs["value"])


def _iota(call: TorchCall) -> None:
    out, start, step = call.outputs[0], call.attrs["start"], call.attrs["step"]
    out.copy_(torch.arange(call.attrs["size"], device=out.device) * step + start)


def _constant(call: TorchCall) -> None:
    out = call.outputs[0]
    out.copy_(torch.tensor(call.attrs["values"]).reshape(out.shape))


PLAIN_SHAPE: dict[str, Run] = {
    **{name: _copied(view) for name, view in VIEWS.items()},
    "concat": _concat,
    "pad": _pad,
    "gather": _gather,
    "embedding": _embedding,
    "full": _full,
    "iota": _iota,
    "constant": _constant,
}
