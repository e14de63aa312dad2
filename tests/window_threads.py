"""Ranks as threads over windows of one process, the rounds as launches that Triton interprets.

Imported by tests and run in the process that interprets; holds no tests.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from metainfer.backends.ranks import direct, rounds
from metainfer.backends.ranks.context import Team
from metainfer.backends.ranks.windows import Window
from metainfer.backends.torch.tensors import to_torch
from metainfer.backends.triton.interpreter import prepare
from metainfer.backends.triton.launch import Launch

_HALF = 1 << 16


def run_launched(
    name: str, algorithm: str, data: Sequence[Sequence[np.ndarray]], size: int
) -> list[list[np.ndarray]]:
    """What each rank gets of each call, one after the other over one window.

    Args:
        name: of the collective.
        algorithm: of `backends.ranks.direct`.
        data: per call, what each rank gives, flat.
        size: elements that each gets.
    """
    prepare("cpu")
    ranks = len(data[0])
    memory = [torch.full((2 * _HALF,), 0xAB, dtype=torch.uint8) for _ in range(ranks)]
    barrier, lock = threading.Barrier(ranks), threading.Lock()
    windows = [
        Window(tuple(memory), r, _HALF, barrier.wait, torch.zeros(4, dtype=torch.int32), True)
        for r in range(ranks)
    ]
    direct.window_of = lambda team, num_bytes, device: windows[team.own]  # type: ignore[assignment]
    rounds._run = _locked(lock)  # type: ignore[assignment]
    run = direct.DIRECT[name][algorithm]
    found: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    errors: list[BaseException] = []

    def rank(own: int) -> None:
        try:
            for parts in data:
                x = to_torch(parts[own])
                out = torch.full((size,), 77, dtype=x.dtype)
                run(x, out, Team("tp", None, tuple(range(ranks)), own))
                found[own].append(out.view(torch.int8).numpy().view(parts[own].dtype))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=rank, args=(own,)) for own in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [list(calls) for calls in zip(*found, strict=True)]


def _locked(lock: threading.Lock) -> Callable[..., None]:
    """Launches one at a time: the interpreter keeps the place in the grid in globals."""

    def run(
        function: str, like: torch.Tensor, size: int, arguments: dict[str, Any],
        parts: Sequence[rounds.Part], **constants: Any,
    ) -> None:  # fmt: skip
        from metainfer.backends.triton.templates import peers

        made: Launch = rounds.launch_of(
            getattr(peers, function), like, size, arguments, parts, constants
        )
        with lock:
            made.run()

    return run
