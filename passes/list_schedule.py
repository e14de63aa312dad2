"""List scheduling: in which order, and on which streams, tasks take the least time.

Collectives have a stream of their own, computations the main one; those that may leave it have a
third. Whenever a stream is free it takes, of the tasks that can begin, the one of the highest
priority; several priorities are tried and the shortest simulated time wins.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from metainfer.ir.timeline import Sharing, Task, Timeline, play, simulate

MAIN, MEETING_STREAM, SIDE = 0, 1, 2
_ROUNDS = 400  # simulations that improvement by moves may take


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


def schedule(
    tasks: Sequence[Task], sharing: Sharing, movable: Collection[int] = (), *, improve: bool = True
) -> Schedule:
    """Schedule tasks.

    Args:
        tasks: in an order that respects ``after``; their streams are not looked at.
        sharing: what tasks cost each other.
        movable: computations that may run beside others, on the side stream.
        improve: whether to look for better orders after the lists, which takes longer.
    """
    placed = [replace(t, stream=MEETING_STREAM if t.meets else MAIN) for t in tasks]
    best: Schedule | None = None
    for priority in _priorities(placed):
        for free in dict.fromkeys([frozenset[int](), frozenset(movable)]):
            found = _listed(placed, sharing, priority, free)
            if best is None or found.seconds < best.seconds - 1e-12:
                best = found
    assert best is not None
    return _improved(best, sharing) if improve else best


def _priorities(tasks: Sequence[Task]) -> Iterator[tuple[float, ...]]:
    """Longest way to the end; the same with collectives, or computations, weighing more."""
    for weight_meeting, weight_computing in ((1.0, 1.0), (4.0, 1.0), (1.0, 4.0), (1.0, 0.0)):

        def weigh(task: Task, a: float = weight_meeting, b: float = weight_computing) -> float:
            return task.seconds * (a if task.meets else b)

        yield _ways(tasks, weigh)
    yield tuple(float(-i) for i in range(len(tasks)))


def _ways(tasks: Sequence[Task], weigh: Callable[[Task], float]) -> tuple[float, ...]:
    """Weight of the heaviest way from each task's begin to the end."""
    ways = [0.0] * len(tasks)
    for number in reversed(range(len(tasks))):
        ways[number] += weigh(tasks[number])
        for earlier in tasks[number].after:
            ways[earlier] = max(ways[earlier], ways[number])
    return tuple(ways)


def _listed(
    tasks: Sequence[Task], sharing: Sharing, priority: Sequence[float], movable: Collection[int]
) -> Schedule:
    waiting: dict[int, list[int]] = {MAIN: [], MEETING_STREAM: [], SIDE: []}
    for number in sorted(range(len(tasks)), key=lambda i: (-priority[i], i)):
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


def _improved(best: Schedule, sharing: Sharing) -> Schedule:
    """Move single tasks of a stream forwards while that saves time, for a limited while."""
    rounds, found = 0, True
    while found:
        found = False
        for order in _moves(best):
            rounds += 1
            if rounds > _ROUNDS:
                return best
            tried = _replayed(best, order, sharing)
            if tried.seconds < best.seconds - 1e-12:
                best, found = tried, True
                break
    return best


def _moves(schedule: Schedule) -> Iterator[tuple[int, ...]]:
    """Orders in which one task begins before one of the same stream that began before it."""
    tasks, order = schedule.timeline.tasks, schedule.order
    for stream in dict.fromkeys(tasks[i].stream for i in order):
        own = [i for i in order if tasks[i].stream == stream]
        for later in range(1, len(own)):
            for earlier in range(later - 1, max(later - 4, -1), -1):
                rest = [i for i in order if i != own[later]]
                at = rest.index(own[earlier])
                yield (*rest[:at], own[later], *rest[at:])


def _replayed(schedule: Schedule, order: Sequence[int], sharing: Sharing) -> Schedule:
    """The schedule with its streams in another order, as far as what reads what allows it."""
    order = _respecting(schedule.timeline.tasks, order)
    place = {number: at for at, number in enumerate(order)}
    tasks = [schedule.timeline.tasks[i] for i in order]
    moved = [replace(t, after=tuple(place[a] for a in t.after)) for t in tasks]
    played = simulate(moved, sharing)
    back = [place[i] for i in range(len(order))]
    timeline = Timeline(
        schedule.timeline.tasks,
        tuple(played.starts[i] for i in back),
        tuple(played.ends[i] for i in back),
    )
    return _in_order(timeline)


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
