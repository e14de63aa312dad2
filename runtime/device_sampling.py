"""Tokens chosen on the GPU that logits lie on: a few words a row go there, one id comes back."""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Room:
    """Where the draws and the choices of one step lie.

    Attributes:
        given: words of the draws, pinned.
        there: the same on the device.
        ids: tokens on the device.
        found: the same, pinned.
    """

    given: torch.Tensor
    there: torch.Tensor
    ids: torch.Tensor
    found: torch.Tensor


class Chosen:
    """Tokens on their way to the host.

    Args:
        room: where they come to.
        rows: how many.
        names: of the sequences, for messages.
    """

    def __init__(self, room: _Room, rows: int, names: Sequence[str]) -> None:
        self.on_device = room.ids[:rows]
        self._found = room.found[:rows]
        self._names = tuple(names)
        self._done = torch.cuda.current_stream().record_event() if room.ids.is_cuda else None

    def wait(self) -> None:
        """Wait until the step and its choices are done."""
        if self._done is not None:
            self._done.synchronize()

    def ids(self) -> np.ndarray:
        """The tokens; waits for them.

        Shapes: int64 [R].
        Raises: MetainferError if a row had no finite largest logit.
        """
        self.wait()
        found: np.ndarray = self._found.numpy().astype(np.int64)
        check_finite(torch.tensor([FAULTS.get(int(n), 0.0) for n in found]), self._names)
        return found


class DeviceSampler:
    """Chooses tokens behind the launches of a step; the host waits once, for the ids.

    Two steps may be on their way: the choices of one are the next one's tokens before they are
    known to the host.

    Args:
        device: where logits lie.
    """

    def __init__(self, device: torch.device) -> None:
        prepare(device.type)
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._rows = self._width = 0
        self._scratch: Scratch | None = None
        self._rooms: tuple[_Room, ...] = ()
        self._last: Chosen | None = None

    def start(
        self, logits: torch.Tensor, draws: Sequence[Draw], names: Sequence[str] = ()
    ) -> Chosen:
        """Choose one token for each row; they may be read before the step after next starts.

        Args:
            logits: of the rows, ready on the current stream.
            draws: of the rows.
            names: of the sequences, for messages.

        Shapes: logits [R, V].
        """
        rows, width = len(draws), logits.shape[1]
        scratch = self._reserve(rows, width)
        self._rooms = self._rooms[::-1]
        room = self._rooms[0]
        words = torch.from_numpy(packed(draws))
        room.given[: len(words)].copy_(words)
        there, ids = room.there[: len(words)], room.ids[:rows]
        there.copy_(room.given[: len(words)], non_blocking=True)
        for launch in launches(logits, there, ids, scratch, filters_of(draws, width)):
            launch.run()
        room.found[:rows].copy_(ids, non_blocking=True)
        self._last = Chosen(room, rows, names)
        return self._last

    def feed(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        """Make the choices of the last step the tokens of the next one.

        Args:
            sources: whose choice each token is, rows of the last step, on the device.
            tokens: where they go; the choice of a row that had none becomes token 0.

        Shapes: i32 [T] -> i32 [T].
        """
        assert self._last is not None
        torch.index_select(self._last.on_device, 0, sources, out=tokens)
        tokens.clamp_(min=0)

    def _reserve(self, rows: int, width: int) -> Scratch:
        """Room for rows, in pinned memory and on the device; it grows by doubling."""
        if self._scratch is not None and rows <= self._rows and width == self._width:
            return self._scratch
        self._rows, self._width = 1 << max(rows - 1, 0).bit_length(), width
        words = len(packed([Draw()])) * self._rows

        def held(size: int, *, pinned: bool) -> torch.Tensor:
            if pinned:
                return torch.empty(size, dtype=torch.int32, pin_memory=self._is_gpu)
            return torch.empty(size, dtype=torch.int32, device=self._device)

        def room() -> _Room:
            return _Room(
                held(words, pinned=True), held(words, pinned=False),
                held(self._rows, pinned=False), held(self._rows, pinned=True),
            )  # fmt: skip

        self._rooms = (room(), room())
        self._scratch = scratch_of(self._rows, width, self._device)
        return self._scratch
