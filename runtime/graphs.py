"""CUDA graphs of decode steps: one for each bucket of sizes, captured when it is first met.

A decode step is dozens to hundreds of small launches; replayed as one graph they cost what the
device needs and nothing of the host. Steps are padded up to a bucket, so that few graphs serve all
sizes. A kernel that asks the host in the middle of a step cannot be captured: such a plan runs
launch by launch, and says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from metainfer.ir.errors import CapacityError

# What a capture may raise for code that synchronises; CUDA's own errors are of this class too.
_REFUSALS = (RuntimeError,)
_WARM_UPS = 2  # Triton compiles, libraries choose their workspaces


def bucket(size: int, most: int) -> int:
    """The smallest power of two that holds a size, at most the plan's bound.

    Raises: CapacityError if the bound is exceeded.
    """
    if size > most:
        raise CapacityError(f"a step of {size} does not fit the plan's {most}")
    return min(1 << max(size - 1, 0).bit_length(), most)


@dataclass
class StepGraphs:
    """Captured steps by their sizes.

    Attributes:
        refused: why steps are not captured, "" while they are.
    """

    refused: str = ""
    _graphs: dict[tuple[tuple[str, int], ...], Any] = field(default_factory=dict)
    _pool: Any = None

    def run(self, env: Mapping[str, int], calls: Sequence[Callable[[], object]]) -> None:
        """Replay the step of these sizes, or capture it first.

        Args:
            env: sizes of the step; equal sizes must mean equal calls.
            calls: the step, launch by launch, on buffers that stay where they are.
        """
        if self.refused:
            _run(calls)
            return
        key = tuple(sorted(env.items()))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._captured(calls)
            if graph is None:
                return
            self._graphs[key] = graph
        graph.replay()

    @property
    def num_captured(self) -> int:
        """Graphs held."""
        return len(self._graphs)

    def _captured(self, calls: Sequence[Callable[[], object]]) -> Any:
        """The graph of the calls; None if they cannot be captured, after running them once.

        Running a decode step several times over is harmless: it writes the same keys and values to
        the same places.
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
        except _REFUSALS as error:
            self.refused = str(error).strip().splitlines()[0]
            torch.cuda.synchronize()
            _run(calls)
            return None
        self._pool = self._pool or graph.pool()
        return graph


def _run(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
