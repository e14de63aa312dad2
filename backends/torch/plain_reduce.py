"""Plain PyTorch forms of reductions, softmax, scans, top-k and norms: float32 inside."""

from collections.abc import Callable

import torch

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.tensors import widen

Run = Callable[[TorchCall], None]


def _reduction(function: Callable[..., torch.Tensor]) -> Run:
    def run(call: TorchCall) -> None:
        x, out, dims = widen(call.inputs[0]), call.outputs[0], tuple(call.attrs["dims"])
        if not dims:
            # Torch reads no dims as all dims.
            out.copy_(x)
            return
        out.copy_(function(x, dim=dims, keepdim=call.attrs["keep"]))

    return run


def _argmax(call: TorchCall) -> None:
    # Torch documents the first maximal index, which is the reference's rule for ties.
    call.outputs[0].copy_(torch.argmax(widen(call.inputs[0]), dim=call.attrs["dim"]))


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax whose rows of -inf give zeros, as masked attention needs."""
    top = x.amax(dim=dim, keepdim=True)
    return torch.softmax(x, dim=dim).masked_fill(torch.isneginf(top), 0.0)


def _softmax(call: TorchCall) -> None:
    call.outputs[0].copy_(softmax(widen(call.inputs[0]), call.attrs["dim"]))


def _cumsum(call: TorchCall) -> None:
    call.outputs[0].copy_(torch.cumsum(widen(call.inputs[0]), dim=call.attrs["dim"]))


def _topk(call: TorchCall) -> None:
    x, count = call.inputs[0], call.attrs["k"]
    # A stable sort of the negated numbers: torch.topk leaves the order of ties open.
    order = torch.sort(widen(x).neg(), dim=-1, stable=True).indices[..., :count]
    call.outputs[0].copy_(x.gather(-1, order))
    call.outputs[1].copy_(order)


def _rms_norm(call: TorchCall) -> None:
    x, weight = widen(call.inputs[0]), widen(call.inputs[1])
    mean_square = x.square().mean(dim=-1, keepdim=True)
    call.outputs[0].copy_(x / torch.sqrt(mean_square + call.attrs["eps"]) * weight)


def _layer_norm(call: TorchCall) -> None:
    x = widen(call.inputs[0])
    centred = x - x.mean(dim=-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + call.attrs["eps"])
    if len(call.inputs) > 1:
        y = y * widen(call.inputs[1])
    if len(call.inputs) > 2:
        y = y + widen(call.inputs[2])
    call.outputs[0].copy_(y)


PLAIN_REDUCE: dict[str, Run] = {
    "sum": _reduction(torch.sum),
    "mean": _reduction(torch.mean),
    "max": _reduction(torch.amax),
    "min": _reduction(torch.amin),
    "argmax": _argmax,
    "softmax": _softmax,
    "cumsum": _cumsum,
    "topk": _topk,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
}
