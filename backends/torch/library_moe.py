"""Experts on a CPU as library products, one expert after the other."""

import torch

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.codes import Codes
from metainfer.backends.torch.plain_moe import activated

Stack = torch.Tensor | Codes


def experts(call: TorchCall) -> None:
    """Each expert's gated MLP over the tokens that chose it, weights plain or in narrow codes.

    Codes of an expert are widened when a token chose it, all of the expert's at once.

    Shapes: x [T, D], ids i32 [T, K], shares [T, K], gate and up [E, F, D], down [E, D, F] ->
        [T, D].
    """
    x, ids, shares, *stacks = call.inputs
    activation = str(call.attrs["activation"])
    y = torch.zeros_like(x)
    # Those that no token chose cost nothing; -1 marks a choice that adds nothing.
    for expert in torch.unique(ids).tolist():
        if expert < 0:
            continue
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        gate, up, down = (_matrix(stack, expert) for stack in stacks)
        rows = x[tokens]
        hidden = activated(rows @ gate.t(), activation) * (rows @ up.t())
        y.index_add_(0, tokens, shares[tokens, slots, None] * (hidden @ down.t()))
    call.outputs[0].copy_(y)


def _matrix(stack: Stack, index: int) -> torch.Tensor:
    if isinstance(stack, torch.Tensor):
        return stack[index]
    part = stack.part(index)
    return part.rows(0, part.shape[0])
