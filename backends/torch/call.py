"""How the executor calls a torch kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from metainfer.ir.graph import Op

StateTensors = Mapping[str, torch.Tensor]
# Rotary attributes and rotated width -> cosines and sines, f32 [positions, width / 2].
RopeTables = Callable[[Mapping[str, Any], int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class TorchCall:
    """One call, all sizes concrete.

    Attributes:
        op: the group; fused ones carry their body.
        inputs: operands: tensors (views unless the kernel requires dense), packed weights as
            their layout's `pack` made them, states as field -> [pages, page_size, ...].
        outputs: preallocated tensors for the results that are no states, `BlockTensors` for those
            of a block format; states are written in place.
        attrs: attributes with defaults filled in and sizes concrete.
        workspace: scratch bytes, u8, at least as many as the kernel asks for; None if none is.
        rope: tables of cosines and sines that live as long as the plan.
        sizes: values of the step's size symbols; of a part of the rows no shape tells them.
        rooms: bytes that each output has to itself from where it begins, where it has more than it
            fills: what lies behind its last number may be anything, and be written.
    """

    op: Op
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    attrs: Mapping[str, Any]
    workspace: torch.Tensor | None = None
    rope: RopeTables | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    rooms: tuple[int, ...] = ()

    def room(self, number: int) -> int:
        """Bytes behind an output's beginning that a kernel may write; 0 if nobody says."""
        return self.rooms[number] if self.rooms else 0


@dataclass(frozen=True)
class TorchBinder:
    """What a torch kernel's record carries: writes its results into ``call.outputs``."""

    run: Callable[[TorchCall], None]
