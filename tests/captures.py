"""Captures of steps on machines without CUDA."""

from collections.abc import Callable

from metainfer.runtime.graphs import Calls


class Recorder:
    """Captures as CUDA does, as far as a CPU can: what is replayed was fixed when it was caught."""

    def __init__(self, error: str | None = None) -> None:
        self.caught: list[int] = []
        self.replays = 0
        self.error = error

    def __call__(self, calls: Calls) -> Callable[[], object]:
        kept = tuple(calls)
        self.caught.append(len(kept))
        if self.error is not None:
            raise RuntimeError(self.error)

        def replay() -> None:
            self.replays += 1
            for call in kept:
                call()

        return replay
