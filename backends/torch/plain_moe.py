"""Plain PyTorch form of the experts: one after the other, float32 inside."""

from collections.abc import Callable

import torch
from torch.nn import functional

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.plain_shape import as_index
from metainfer.backends.torch.tensors import BlockTensors, PlainWeight, dense_values, widen
from metainfer.ir.ops.moe import BEST_OF_GROUP, NO_SHARE

Run = Callable[[TorchCall], None]


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of an expert's gate by name."""
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return functional.silu(x)


def _experts(call: TorchCall) -> None:
    x, ids, shares = dense_values(call.inputs[0]), call.inputs[1], widen(call.inputs[2])
    activation = str(call.attrs["activation"])
    y = torch.zeros_like(x)
    for e in range(call.inputs[3].shape[0]):
        tokens, slots = torch.nonzero(ids == e, as_tuple=True)
        if not tokens.numel():
            continue
        gate, up, down = (_expert(w, e).to(x.dtype) for w in call.inputs[3:])
        rows = x[tokens]
        hidden = activated(rows @ gate.t(), activation) * (rows @ up.t())
        share = shares[tokens, slots, None].to(x.dtype)
        y.index_add_(0, tokens, share * (hidden @ down.t()))
    call.outputs[0].copy_(y)


def _expert(weight: PlainWeight, index: int) -> torch.Tensor:
    part = weight.part(index) if isinstance(weight, BlockTensors) else weight[index]
    return dense_values(part)


def _route(call: TorchCall) -> None:
    ids, table, replicas = (as_index(x) for x in call.inputs)
    known = (ids >= 0) & (ids < table.shape[0])
    expert = torch.where(known, ids, 0).long()
    turn = torch.arange(ids.shape[0], device=ids.device)[:, None] % replicas[expert]
    call.outputs[0].copy_(torch.where(known, table[expert, turn], -1))


def _choose_experts(call: TorchCall) -> None:
    scores = widen(call.inputs[0]).sigmoid()
    choice, groups = scores + widen(call.inputs[1]), int(call.attrs["groups"])
    if groups > 1:
        of_groups = choice.view(len(choice), groups, -1)
        best = of_groups.sort(-1, descending=True).values[..., :BEST_OF_GROUP].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, first_of(best, int(call.attrs["chosen_groups"])), True)
        choice = of_groups.masked_fill(~kept[..., None], float("-inf")).view(choice.shape)
    ids = first_of(choice, int(call.attrs["k"]))
    shares = scores.gather(1, ids)
    if call.attrs["renormalise"]:
        shares = shares / (shares.sum(-1, keepdim=True) + NO_SHARE)
    call.outputs[0].copy_(shares * call.attrs["scaling"])
    call.outputs[1].copy_(ids)


def first_of(x: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the largest numbers of each row, ties by the lower place."""
    return torch.sort(-x, dim=-1, stable=True).indices[..., :count]


PLAIN_MOE: dict[str, Run] = {
    "experts": _experts,
    "route": _route,
    "choose_experts": _choose_experts,
}
