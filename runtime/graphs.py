"""Graphs of decode steps: one for each bucket of sizes, captured when it is first met.

A decode step is dozens to hundreds of small launches; replayed as one CUDA graph they cost what the
device needs and nothing of the host. Steps are padded up to a bucket, so that few graphs serve all
sizes. A kernel that asks the host in the middle of a step cannot be captured: such a plan runs
launch by launch, and says so.
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
        output: where the result is after them.
    """

    calls: Calls
    output: torch.Tensor


class CudaCapture:
    """Captures calls as a CUDA graph; all graphs share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, calls: Calls) -> Callable[[], object]:
        """What replays the calls.

        They run a few times before: a decode step writes the same keys and values to the same
        places each time.

        Raises: RuntimeError if they cannot be captured.
        """
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                _run(calls)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                _run(calls)
        finally:
            torch.cuda.synchronize()
        self._pool = self._pool or graph.pool()
        replay: Callable[[], object] = graph.replay
        return replay


@dataclass
class StepGraphs:
    """Captured steps by their sizes.

    Attributes:
        capture: makes what replays calls, or raises RuntimeError.
        refused: why steps are not captured, "" while they are.
    """

    capture: Callable[[Calls], Callable[[], object]] = field(default_factory=CudaCapture)
    refused: str = ""
    # NOTE: a graph holds addresses only: its step, and what that made for itself, live as long.
    _held: dict[tuple[tuple[str, int], ...], tuple[Step, Callable[[], object]]] = field(
        default_factory=dict
    )

    def run(self, env: Mapping[str, int], prepare: Callable[[], Step]) -> torch.Tensor:
        """Replay the step of these sizes, which is prepared and captured when first met.

        Args:
            env: sizes of the step.
            prepare: makes the step of these sizes.

        Returns: the step's output, valid until the next step.
        """
        key = tuple(sorted(env.items()))
        if key not in self._held:
            step = prepare()
            self._held[key] = step, self._replay_of(step)
        step, replay = self._held[key]
        replay()
        return step.output

    def _replay_of(self, step: Step) -> Callable[[], object]:
        if not self.refused:
            try:
                return self.capture(step.calls)
            except RuntimeError as error:  # CUDA's own errors are of this class too
                self.refused = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return lambda: _run(step.calls)


def _run(calls: Calls) -> None:
    for call in calls:
        call()
