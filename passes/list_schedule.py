"""List scheduling: in which order, and on which streams, tasks take the least time.

Collectives have a stream of their own, computations the main one; those that may leave it have a
third. Whenever a stream is free it takes, of the tasks that can begin, the one of the highest
priority; several priorities are tried and the shortest simulated time wins.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from metainfer.ir.timeline import Sharing, Task, Timeline, play, simulate

MAIN, MEETING_STREAM, SIDE = 0, 1, 2
_ROUNDS = 300  # moves that improvement may try, fewer where there are many tasks
_SIMULATED = 6000  # tasks in all that it may simulate
_REACH = 6  # places that a move may go forwards
_SAME = 1e-12  # seconds that make no difference

_Rank = tuple[float, int, int]


@dataclass(frozen=True)
class Schedule:
    """Tasks in an order that respects what each is ordered after.

    Attributes:
        order: numbers of the tasks, in order of their begin.
        timeline: tasks with their streams, by number.
    """

    order: tuple[int, ...]
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Simulated time."""
        return self.timeline.seconds

    @property
    def streams(self) -> tuple[int, ...]:
        """Stream of each task, by number."""
        return tuple(t.stream for t in self.timeline.tasks)


def schedule(
    tasks: Sequence[Task], sharing: Sharing, movable: Collection[int] = (),
    turns: Sequence[int] = (), *, improve: bool = True,
) -> Schedule:  # fmt: skip
    """Schedule tasks.

    Args:
        tasks: in an order that respects ``after``; their streams are not looked at.
        sharing: what tasks cost each other.
        movable: computations that may run beside others, on the side stream.
        turns: per task, what goes first among equals (the part of the rows, say); the order of the
            tasks where none are given.
        improve: whether to look for better orders after the lists, which takes longer.
    """
    placed = [replace(t, stream=MEETING_STREAM if t.meets else MAIN) for t in tasks]
    found: dict[tuple[object, ...], Schedule] = {}
    for priority in _priorities(placed, turns or (0,) * len(tasks)):
        for free in dict.fromkeys([frozenset[int](), frozenset(movable)]):
            listed = _listed(placed, sharing, priority, free)
            found.setdefault((listed.order, listed.streams), listed)
    ranked = sorted(found.values(), key=lambda s: s.seconds)
    if not improve:
        return ranked[0]
    budget = _Budget(min(_ROUNDS, _SIMULATED // max(len(tasks), 1)))
    return min(
        (_improved(s, sharing, frozenset(movable), budget) for s in ranked), key=lambda s: s.seconds
    )


def _priorities(tasks: Sequence[Task], turns: Sequence[int]) -> Iterator[list[_Rank]]:
    """Longest way to the end; the same with collectives, or computations, weighing more; turns."""
    for weight_meeting, weight_computing in ((1.0, 1.0), (4.0, 1.0), (1.0, 4.0), (1.0, 0.0)):

        def weigh(task: Task, a: float = weight_meeting, b: float = weight_computing) -> float:
            return task.seconds * (a if task.meets else b)

        # Ways that differ by rounding are alike.
        ways = [round(-way, 12) for way in _ways(tasks, weigh)]
        yield [(way, turn, i) for i, (way, turn) in enumerate(zip(ways, turns, strict=True))]
    yield [(float(turn), i, 0) for i, turn in enumerate(turns)]


def _ways(tasks: Sequence[Task], weigh: Callable[[Task], float]) -> tuple[float, ...]:
    """Weight of the heaviest way from each task's begin to the end."""
    ways = [0.0] * len(tasks)
    for number in reversed(range(len(tasks))):
        ways[number] += weigh(tasks[number])
        for earlier in tasks[number].after:
            ways[earlier] = max(ways[earlier], ways[number])
    return tuple(ways)


def _listed(
    tasks: Sequence[Task], sharing: Sharing, ranks: Sequence[_Rank], movable: Collection[int]
) -> Schedule:
    """Run tasks by their ranks, the lowest first."""
    waiting: dict[int, list[int]] = {MAIN: [], MEETING_STREAM: [], SIDE: []}
    for number in sorted(range(len(tasks)), key=lambda i: ranks[i]):
        waiting[tasks[number].stream].append(number)
        if number in movable:
            waiting[SIDE].append(number)

    def offer(stream: int, taken: int | None) -> Sequence[int]:
        if taken is not None:
            for queue in waiting.values():
                if taken in queue:
                    queue.remove(taken)
        return waiting[stream]

    streams = tuple(s for s, queue in waiting.items() if queue)
    return _in_order(play(tasks, sharing, streams, offer))


def _in_order(timeline: Timeline) -> Schedule:
    """Tasks by their begin; of equal ones those that end earlier, so that order is respected."""
    starts, ends = timeline.starts, timeline.ends
    order = sorted(range(len(starts)), key=lambda i: (starts[i], ends[i], i))
    return Schedule(tuple(order), timeline)


# --- improvement -------------------------------------------------------------------------------


@dataclass
class _Budget:
    """Simulations left."""

    rounds: int


def _improved(
    best: Schedule, sharing: Sharing, movable: Collection[int], budget: _Budget
) -> Schedule:
    """Move single tasks forwards, or to another stream, while that saves time."""
    found = True
    while found:
        found = False
        for order, streams in _moves(best, movable):
            if not budget.rounds:
                return best
            budget.rounds -= 1
            tried = min(
                _replayed(best, order, streams, sharing),
                _relisted(best, order, streams, sharing),
                key=lambda s: s.seconds,
            )
            if tried.seconds < best.seconds - _SAME:
                best, found = tried, True
                break
    return best


def _moves(
    schedule: Schedule, movable: Collection[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Orders in which a task begins before one of its stream that it followed; other streams."""
    order, streams = schedule.order, schedule.streams
    for stream in dict.fromkeys(streams[i] for i in order):
        own = [i for i in order if streams[i] == stream]
        for later in range(1, len(own)):
            for earlier in range(later - 1, max(later - _REACH, 0) - 1, -1):
                rest = [i for i in order if i != own[later]]
                at = rest.index(own[earlier])
                yield (*rest[:at], own[later], *rest[at:]), streams
    for number in sorted(movable):
        other = MAIN if streams[number] == SIDE else SIDE
        yield order, (*streams[:number], other, *streams[number + 1 :])


def _replayed(
    schedule: Schedule, order: Sequence[int], streams: Sequence[int], sharing: Sharing
) -> Schedule:
    """The tasks in another order, as far as what reads what allows it."""
    tasks = schedule.timeline.tasks
    order = _respecting(tasks, order)
    place = {number: at for at, number in enumerate(order)}
    moved = [
        replace(tasks[i], stream=streams[i], after=tuple(place[a] for a in tasks[i].after))
        for i in order
    ]
    played = simulate(moved, sharing)
    back = [place[i] for i in range(len(order))]
    return _in_order(
        Timeline(
            tuple(replace(t, stream=s) for t, s in zip(tasks, streams, strict=True)),
            tuple(played.starts[i] for i in back),
            tuple(played.ends[i] for i in back),
        )
    )


def _relisted(
    schedule: Schedule, order: Sequence[int], streams: Sequence[int], sharing: Sharing
) -> Schedule:
    """The tasks by an order of priority: what is not ready yet lets others pass."""
    tasks = [replace(t, stream=s) for t, s in zip(schedule.timeline.tasks, streams, strict=True)]
    ranks: list[_Rank] = [(0.0, 0, 0)] * len(tasks)
    for place, number in enumerate(order):
        ranks[number] = (float(place), 0, 0)
    return _listed(tasks, sharing, ranks, ())


def _respecting(tasks: Sequence[Task], order: Sequence[int]) -> list[int]:
    """The order with what a task is ordered after pulled before it."""
    made: list[int] = []
    seen: set[int] = set()

    def visit(number: int) -> None:
        if number in seen:
            return
        seen.add(number)
        for earlier in tasks[number].after:
            visit(earlier)
        made.append(number)

    for number in order:
        visit(number)
    return made
