"""The step record on the device: one buffer, filled through a pinned one in a single copy."""

from collections.abc import Mapping

import numpy as np
import torch

TOKENS = "tokens"  # travels with the record: a step's tokens, copied into main's input
SOURCES = "sources"  # the same: rows of the step in front whose choices are this one's tokens
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
        self._end = end = 0  # of what was ever written
        for name in order:
            self._places[name] = slice(end, end + sizes[name])
            end += -(-sizes[name] // _LINE) * _LINE
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        self._hosts = [self._device]
        if device.type == "cuda":
            self._hosts = [torch.zeros(end, dtype=torch.int32).pin_memory() for _ in range(2)]

    def write(self, step: Mapping[str, np.ndarray]) -> None:
        """Copy fields in; the rest of each field keeps what it held.

        The copy to a GPU is queued on the current stream, from one of two pinned buffers in turn:
        a buffer is written again when the step before last has been read back, so that one step
        can be laid out while another runs.
        """
        self._hosts = self._hosts[::-1]
        held = self._hosts[0].numpy()
        if len(self._hosts) > 1:
            held[: self._end] = self._hosts[1].numpy()[: self._end]
        end = 0
        for name, data in step.items():
            flat = np.asarray(data, dtype=np.int32).reshape(-1)
            start = self._places[name].start
            held[start : start + flat.size] = flat
            end = max(end, start + flat.size)
        self._end = max(self._end, end)
        if self._hosts[0] is not self._device:
            self._device[:end].copy_(self._hosts[0][:end], non_blocking=True)

    def field(self, name: str) -> torch.Tensor:
        """A field's storage, flat."""
        return self._device[self._places[name]]
