"""How the executor calls a torch kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from metainfer.ir.graph import Op

StateTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TorchCall:
    """One call, all sizes concrete.

    Attributes:
        op: the group; fused ones carry their body.
        inputs: operands: tensors (views unless the kernel requires dense), packed weights as
            their layout's `pack` made them, states as field -> [pages, page_size, ...].
        outputs: preallocated tensors for the results that are no states; states are written in
            place.
        attrs: attributes with defaults filled in and sizes concrete.
    """

    op: Op
    inputs: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True)
class TorchBinder:
    """What a torch kernel's record carries: writes its results into ``call.outputs``."""

    run: Callable[[TorchCall], None]
