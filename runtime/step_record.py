"""The step record on the device: one buffer, filled through a pinned one in a single copy."""

from collections.abc import Mapping

import numpy as np
import torch

TOKENS = "tokens"  # travels with the record: a step's tokens, copied into main's input
_LINE = 16  # fields begin on 64-byte lines: kernels count on aligned pointers


class StepRecord:
    """Fields of the step record, each at a fixed place, so that captured graphs find them.

    Args:
        sizes: field -> most elements.
        device: where kernels read them.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        # The page table is by far the largest: last, so that a copy ends with what is used of it.
        order = sorted(sizes, key=lambda name: sizes[name])
        self._places: dict[str, slice] = {}
        end = 0
        for name in order:
            self._places[name] = slice(end, end + sizes[name])
            end += -(-sizes[name] // _LINE) * _LINE
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        is_gpu = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.int32).pin_memory() if is_gpu else self._device
        self._array = self._host.numpy()

    def write(self, step: Mapping[str, np.ndarray]) -> None:
        """Copy fields in; the rest of each field keeps what it held.

        The copy to a GPU is queued on the current stream. The pinned buffer is written again only
        after the step before has been read back, which every step ends with.
        """
        end = 0
        for name, data in step.items():
            flat = np.asarray(data, dtype=np.int32).reshape(-1)
            start = self._places[name].start
            self._array[start : start + flat.size] = flat
            end = max(end, start + flat.size)
        if self._host is not self._device:
            self._device[:end].copy_(self._host[:end], non_blocking=True)

    def field(self, name: str) -> torch.Tensor:
        """A field's storage, flat."""
        return self._device[self._places[name]]
