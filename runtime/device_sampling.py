"""Tokens chosen on the GPU that logits lie on: a few words a row go there, one id comes back."""

from collections.abc import Sequence

import numpy as np
import torch

from metainfer.backends.triton.interpreter import prepare
from metainfer.backends.triton.sampling import (
    FAULTS,
    Draw,
    Scratch,
    filters_of,
    launches,
    packed,
    scratch_of,
)
from metainfer.runtime.noise import Noise
from metainfer.runtime.sampling import SamplingParams, check_finite


def draw_of(params: SamplingParams, noise: Noise) -> Draw:
    """A row's draw, taken from its noise; greedy rows take none."""
    if params.is_greedy:
        return Draw()
    return Draw(
        params.temperature, params.top_k, params.top_p, params.min_p, noise.key, noise.take()
    )


class DeviceSampler:
    """Chooses tokens behind the launches of a step; the host waits once, for the ids.

    Args:
        device: where logits lie.
    """

    def __init__(self, device: torch.device) -> None:
        prepare(device.type)
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._rows = self._width = 0
        self._scratch: Scratch | None = None

    def ids(
        self, logits: torch.Tensor, draws: Sequence[Draw], names: Sequence[str] = ()
    ) -> np.ndarray:
        """Choose one token for each row.

        Args:
            logits: of the rows, ready on the current stream.
            draws: of the rows.
            names: of the sequences, for messages.

        Shapes: logits [R, V] -> int64 [R].
        Raises: MetainferError if a row has no finite largest logit.
        """
        rows, width = len(draws), logits.shape[1]
        scratch = self._reserve(rows, width)
        words = torch.from_numpy(packed(draws))
        self._given[: len(words)].copy_(words)
        there, ids = self._there[: len(words)], self._ids[:rows]
        there.copy_(self._given[: len(words)], non_blocking=True)
        for launch in launches(logits, there, ids, scratch, filters_of(draws, width)):
            launch.run()
        self._found[:rows].copy_(ids, non_blocking=True)
        if self._is_gpu:
            torch.cuda.current_stream().synchronize()
        found: np.ndarray = self._found[:rows].numpy().astype(np.int64)
        check_finite(torch.tensor([FAULTS.get(int(n), 0.0) for n in found]), names)
        return found

    def _reserve(self, rows: int, width: int) -> Scratch:
        """Room for rows, in pinned memory and on the device; it grows by doubling."""
        if self._scratch is not None and rows <= self._rows and width == self._width:
            return self._scratch
        self._rows, self._width = 1 << max(rows - 1, 0).bit_length(), width
        words = len(packed([Draw()])) * self._rows

        def held(size: int, pinned: bool) -> torch.Tensor:
            if pinned:
                return torch.empty(size, dtype=torch.int32, pin_memory=self._is_gpu)
            return torch.empty(size, dtype=torch.int32, device=self._device)

        self._given, self._there = held(words, True), held(words, False)
        self._found, self._ids = held(self._rows, True), held(self._rows, False)
        self._scratch = scratch_of(self._rows, width, self._device)
        return self._scratch
