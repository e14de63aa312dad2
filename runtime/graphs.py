"""Graphs of decode steps: one for each bucket of sizes, captured when it is first met.

A decode step is dozens to hundreds of small launches; replayed as one CUDA graph they cost what the
device needs and nothing of the host. Steps are padded up to a bucket, so that few graphs serve all
sizes. A kernel that asks the host in the middle of a step cannot be captured: such a plan runs
launch by launch, and says so. Ranks that meet in a step capture it together, or none does: running
it to warm up is a meeting too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from metainfer.ir.errors import CapacityError

Calls = Sequence[Callable[[], object]]
_WARM_UPS = 2  # Triton compiles, libraries choose their workspaces


def bucket(size: int, most: int) -> int:
    """The smallest power of two that holds a size, at most the plan's bound.

    Raises: CapacityError if the bound is exceeded.
    """
    if size > most:
        raise CapacityError(f"a step of {size} does not fit the plan's {most}")
    return min(1 << max(size - 1, 0).bit_length(), most)


@dataclass(frozen=True)
class Step:
    """A step at fixed sizes.

    Attributes:
        calls: launch by launch, on buffers that stay where they are.
        inputs: where what they read is put before.
        outputs: where the results are after them.
    """

    calls: Calls
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


class CudaCapture:
    """Captures calls as a CUDA graph; all graphs share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, calls: Calls) -> Callable[[], object]:
        """What replays the calls, which ran before.

        Raises: RuntimeError if they cannot be captured.
        """
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may ask for events meanwhile: transports watch theirs so.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                _run(calls)
        finally:
            torch.cuda.synchronize()
        self._pool = self._pool or graph.pool()
        replay: Callable[[], object] = graph.replay
        return replay


def _alone(refused: str) -> str:
    return refused


@dataclass
class StepGraphs:
    """Captured steps by their sizes.

    Attributes:
        capture: makes what replays calls, or raises RuntimeError.
        agree: gets why this rank refuses, "" if it does not, and returns the reason that holds for
            all ranks that meet in a step; called once for each new combination of sizes.
        refused: why steps are not captured, "" while they are.
    """

    capture: Callable[[Calls], Callable[[], object]] = field(default_factory=CudaCapture)
    agree: Callable[[str], str] = _alone
    refused: str = ""
    # NOTE: a graph holds addresses only: its step, and what that made for itself, live as long.
    _steps: dict[tuple[tuple[str, int], ...], Step] = field(default_factory=dict)
    _replays: dict[tuple[tuple[str, int], ...], Callable[[], object]] = field(default_factory=dict)

    def step(self, env: Mapping[str, int], prepare: Callable[[], Step]) -> Step:
        """The step of these sizes, prepared when it is first asked for."""
        key = _key(env)
        if key not in self._steps:
            self._steps[key] = prepare()
        return self._steps[key]

    def run(self, env: Mapping[str, int]) -> None:
        """Replay the step of these sizes, whose inputs are filled; captured when it first runs."""
        key = _key(env)
        if key not in self._replays:
            self._replays[key] = self._replay_of(self._steps[key])
        self._replays[key]()

    def _replay_of(self, step: Step) -> Callable[[], object]:
        if not self.refused:
            # A decode step writes the same keys and values to the same places each time.
            for _ in range(_WARM_UPS):
                _run(step.calls)
            replay, refused = self._captured(step)
            self.refused = self.agree(refused)
            if not self.refused:
                return replay
        return lambda: _run(step.calls)

    def _captured(self, step: Step) -> tuple[Callable[[], object], str]:
        try:
            return self.capture(step.calls), ""
        except RuntimeError as error:  # CUDA's own errors are of this class too
            return _nothing, (str(error).strip().splitlines() or [type(error).__name__])[0]


def _key(env: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(env.items()))


def _nothing() -> None:
    """The replay of what was not captured, which is never called."""


def _run(calls: Calls) -> None:
    for call in calls:
        call()
