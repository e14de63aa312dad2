"""One measurement, in the process that makes it."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from metainfer.backends.registry import installed
from metainfer.compiler.tuning.sample import Sample, Samples
from metainfer.compiler.tuning.tasks import Task
from metainfer.runtime.timing import captured_us, events_ms, median_us


class Stopwatch:
    """Times tasks one after the other; weights of one group are kept until the next.

    Args:
        threads: of the processor, 0 for all that are given to this process.
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads
        self._samples: Samples | None = None
        self._group = ""

    def __call__(self, task: Task) -> float:
        """Microseconds of one execution. Raises: whatever the kernel or its compiler raises."""
        if self._samples is None:
            self._set_threads()
            self._samples = Samples(task.device, installed())
        if task.group != self._group:
            self._samples.forget()
            self._group = task.group
        kernel = installed().kernels.get(task.kernel)
        env = dict(task.env)
        with torch.no_grad():
            samples = self._samples.of(task.op, kernel, env)
            if task.device.kind != "gpu":
                return median_us(partial(_round_us, samples))
            calls = [call for sample in samples for call in _calls(sample)]
            return _on_gpu(calls) * len(calls) / len(samples)

    def _set_threads(self) -> None:
        from metainfer.backends.cpu.program import set_num_threads

        if self._threads:
            torch.set_num_threads(self._threads)
            set_num_threads(self._threads)


def _round_us(samples: Sequence[Sample]) -> float:
    """Mean time of one of them, without the call that a whole program of kernels shares."""
    traces = [sample.executor.trace(sample.env) for sample in samples]
    return sum(group.duration_us for trace in traces for group in trace) / len(samples)


def _calls(sample: Sample) -> Sequence[Callable[[], None]]:
    return sample.executor.launches(sample.env)


def _on_gpu(calls: Sequence[Callable[[], None]]) -> float:
    """Captured where that can be; a kernel that asks the host runs so in a plan, too."""
    try:
        return captured_us(calls)
    except RuntimeError:
        torch.cuda.synchronize()  # raises again if the device is lost

    def run() -> None:
        for call in calls:
            call()

    return events_ms(run) * 1e3 / len(calls)
