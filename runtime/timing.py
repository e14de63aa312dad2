"""Time of calls: on a GPU captured graphs and CUDA events, on a CPU rounds; medians."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
REPLAYS = 20
# On a CPU: rounds go on until so many, and so long, were had; slow ones end by the time.
_LEAST_ROUNDS, _LEAST_S, _MOST_S = 5, 0.02, 0.4


def captured_us(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Median microseconds of one call, all captured one after the other in one CUDA graph.

    Give calls on different data, more than the cache holds, so that each finds it cold.

    Raises: RuntimeError if they cannot be captured.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return events_ms(graph.replay, replays) * 1e3 / len(calls)


def events_ms(run: Call, repeats: int = REPLAYS) -> float:
    """Median milliseconds by CUDA events."""
    times = []
    for _ in range(repeats):
        begin, end = _event(), _event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]


def median_us(round_us: Callable[[], float]) -> float:
    """Median of what rounds on a processor say, after one that does not count.

    Args:
        round_us: does all calls of a round, and says how long one took.
    """
    round_us()
    times: list[float] = []
    begun = time.perf_counter()
    while True:
        times.append(round_us())
        passed = time.perf_counter() - begun
        is_enough = len(times) >= _LEAST_ROUNDS and passed >= _LEAST_S
        if is_enough or passed >= _MOST_S:
            return statistics.median(times)
