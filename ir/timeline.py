"""Simulation of streams: when each task of a step begins and ends, and what runs beside it.

Tasks of one stream run one after the other, those of several at once, each slower than alone:

- a computation beside a collective runs at ``Sharing.computing`` of its speed, the collective at
  ``Sharing.meeting`` of its own;
- computations beside each other share the device by their loads: a load is the part of the device
  that a task alone keeps busy, and loads beyond 1 in sum slow all of them down alike.

Units: seconds throughout.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from metainfer.ir.errors import TypeMismatch

_TINY = 1e-13  # below any time that a machine tells apart


@dataclass(frozen=True)
class Task:
    """One op of a step.

    Attributes:
        name: for people.
        seconds: what it takes alone.
        stream: where it runs.
        after: numbers of the tasks that end before it begins.
        meets: whether ranks meet in it: it keeps the fabric busy, not the device.
        load: part of the device that it keeps busy where it runs alone.
    """

    name: str
    seconds: float
    stream: int = 0
    after: tuple[int, ...] = ()
    meets: bool = False
    load: float = 1.0


@dataclass(frozen=True)
class Sharing:
    """What tasks cost each other.

    Attributes:
        computing: speed of a computation beside a collective, of its own.
        meeting: speed of a collective beside a computation, of its own.
        wait_seconds: from the end of a task to the begin of one that waits on another stream.
        source: where the figures come from.
    """

    computing: float = 1.0
    meeting: float = 1.0
    wait_seconds: float = 0.0
    source: str = "nothing is shared"


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        tasks: as given, with the streams that they ran on.
        starts: when each begins.
        ends: when each ends.
    """

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """From the first begin to the last end."""
        return max(self.ends, default=0.0)

    @property
    def serial_seconds(self) -> float:
        """What the tasks take one after the other."""
        return sum(t.seconds for t in self.tasks)

    @property
    def meeting_seconds(self) -> float:
        """How long ranks exchange."""
        return _length(self._spans(meets=True))

    @property
    def hidden_seconds(self) -> float:
        """How long ranks exchange while the device computes."""
        meeting, computing = self._spans(meets=True), self._spans(meets=False)
        return _length(meeting) + _length(computing) - _length(_union([*meeting, *computing]))

    @property
    def hidden_share(self) -> float:
        """Part of the exchange that computation hides, 0 where there is none."""
        return self.hidden_seconds / self.meeting_seconds if self.meeting_seconds else 0.0

    def critical_path(self) -> tuple[int, ...]:
        """Tasks that begin when the one before ends, up to the last end: what decides the time."""
        if not self.tasks:
            return ()
        before = self._before()
        path = [max(range(len(self.ends)), key=lambda i: (self.ends[i], i))]
        while before[path[-1]]:
            path.append(max(before[path[-1]], key=lambda i: (self.ends[i], i)))
        return tuple(reversed(path))

    def _before(self) -> list[list[int]]:
        """What each task had to wait for: what it is ordered after, and its stream's last task."""
        found = [list(t.after) for t in self.tasks]
        for stream in {t.stream for t in self.tasks}:
            own = [i for i, t in enumerate(self.tasks) if t.stream == stream]
            own.sort(key=lambda i: (self.starts[i], self.ends[i], i))
            for earlier, later in pairwise(own):
                found[later].append(earlier)
        return found

    def _spans(self, *, meets: bool) -> list[tuple[float, float]]:
        return _union(
            (s, e)
            for t, s, e in zip(self.tasks, self.starts, self.ends, strict=True)
            if t.meets == meets and e > s
        )


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that overlap, joined."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def simulate(tasks: Sequence[Task], sharing: Sharing) -> Timeline:
    """Run tasks, those of a stream in the order given.

    Raises: TypeMismatch if tasks wait for each other in a circle.
    """
    queues: dict[int, list[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, []).append(number)
    heads = dict.fromkeys(queues, 0)

    def next_of(stream: int, last: int | None) -> Sequence[int]:
        if last is not None:
            heads[stream] += 1
        at = heads[stream]
        return queues[stream][at : at + 1]

    return play(tasks, sharing, tuple(queues), next_of)


# (a stream, the task that it has just been given or None) -> what it may take next, best first; a
# list that is kept up to date where streams take from each other's.
Offer = Callable[[int, int | None], Sequence[int]]


def play(tasks: Sequence[Task], sharing: Sharing, streams: Sequence[int], offer: Offer) -> Timeline:
    """Run tasks on streams that take whatever they are offered first and may begin.

    Raises: TypeMismatch if nothing runs and nothing can begin.
    """
    run = _Run(tasks, sharing)
    offers = {stream: offer(stream, None) for stream in streams}
    while len(run.ended) < len(tasks):
        wake = float("inf")
        for stream in streams:
            if stream in run.running:
                continue
            taken = next((t for t in offers[stream] if run.ready_at[t] <= run.time + _TINY), None)
            if taken is not None:
                run.start(taken, stream)
                offers[stream] = offer(stream, taken)
            else:
                wake = min([wake, *(run.ready_at[t] for t in offers[stream])])
        run.advance(wake)
    return run.timeline()


class _Run:
    """Tasks that run, and what is left of them."""

    def __init__(self, tasks: Sequence[Task], sharing: Sharing) -> None:
        self.time = 0.0
        self.running: dict[int, int] = {}
        self.ended: set[int] = set()
        self._tasks, self._sharing = tasks, sharing
        self._left = [t.seconds for t in tasks]
        self._missing = [len(set(t.after)) for t in tasks]
        self._readers: dict[int, list[int]] = {}
        for number, task in enumerate(tasks):
            for earlier in set(task.after):
                self._readers.setdefault(earlier, []).append(number)
        self.ready_at = [0.0 if n == 0 else float("inf") for n in self._missing]
        self._starts = [0.0] * len(tasks)
        self._ends = [0.0] * len(tasks)
        self._streams = [t.stream for t in tasks]

    def start(self, task: int, stream: int) -> None:
        self._starts[task], self._streams[task] = self.time, stream
        self.running[stream] = task

    def advance(self, wake: float) -> None:
        """Go on to the next end of a task, or to the moment of waking."""
        if not self.running and wake == float("inf"):
            names = [t.name for i, t in enumerate(self._tasks) if i not in self.ended]
            raise TypeMismatch(f"none of these can begin: {', '.join(names[:6])}")
        speeds = self._speeds()
        step = min([self._left[t] / speeds[s] for s, t in self.running.items()], default=0.0)
        step = min(step, wake - self.time) if self.running else wake - self.time
        self.time += step
        for stream, task in list(self.running.items()):
            self._left[task] -= step * speeds[stream]
            if self._left[task] <= _TINY:
                self._end(stream, task)

    def _speeds(self) -> dict[int, float]:
        if len(self.running) == 1:
            (stream,) = self.running
            return {stream: 1.0}
        running = [self._tasks[t] for t in self.running.values()]
        meeting = any(t.meets for t in running)
        computing = not all(t.meets for t in running)
        loads = sum(t.load for t in running if not t.meets)
        share = (self._sharing.computing if meeting else 1.0) / max(loads, 1.0)
        exchange = self._sharing.meeting if computing else 1.0
        return {s: exchange if self._tasks[t].meets else share for s, t in self.running.items()}

    def _end(self, stream: int, task: int) -> None:
        del self.running[stream]
        self.ended.add(task)
        self._ends[task] = self.time
        for reader in self._readers.get(task, ()):
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self.ready_at[reader] = self._ready(reader)

    def _ready(self, task: int) -> float:
        """When the last event that a task waits for is seen by its stream."""
        own = self._tasks[task].stream
        return max(
            self._ends[t] + (0.0 if self._streams[t] == own else self._sharing.wait_seconds)
            for t in self._tasks[task].after
        )

    def timeline(self) -> Timeline:
        tasks = (
            Task(t.name, t.seconds, s, t.after, t.meets, t.load)
            for t, s in zip(self._tasks, self._streams, strict=True)
        )
        return Timeline(tuple(tasks), tuple(self._starts), tuple(self._ends))
