"""From a schedule to text: ops in order of their begin, with the waits that the order needs."""

from collections.abc import Sequence
from dataclasses import replace

from metainfer.ir.graph import Graph, Op
from metainfer.ir.streams import StreamWalk, meets, num_streams, overwritten, roots_of
from metainfer.passes.list_schedule import Schedule


def on_streams(graph: Graph, ops: Sequence[Op], numbers: Sequence[int], found: Schedule) -> Graph:
    """The graph with ops on the streams that a schedule gives them.

    Args:
        graph: whose inputs and outputs they serve.
        ops: in any order that respects what they read.
        numbers: of each op's task, -1 for views.
        found: the schedule of the tasks.
    """
    task_op = {number: op for op, number in zip(ops, numbers, strict=True) if number >= 0}
    tasks = found.timeline.tasks
    ordered = [replace(task_op[i], stream=tasks[i].stream) for i in found.order]
    if ordered and ordered[-1].stream:
        # A graph ends on the main stream.
        ordered[-1] = replace(ordered[-1], stream=0)
    roots = roots_of(ops)
    waiting = _Waits(graph, num_streams(ordered), roots)
    made = [waiting.add(op, is_last=op is ordered[-1]) for op in ordered]
    views = [op for op, number in zip(ops, numbers, strict=True) if number < 0]
    return replace(graph, ops=tuple(_with_views(made, views)))


class _Waits:
    """Adds to each op the waits without which it might begin too early."""

    def __init__(self, graph: Graph, width: int, roots: dict[str, str]) -> None:
        self._walk = StreamWalk(width, [v.name for v in graph.inputs])
        self._inputs = [v.name for v in graph.inputs]
        self._roots = roots
        self._readers: dict[str, list[str]] = {}
        self._issued: dict[str, int] = {}
        self._met = ""
        self._lasts: dict[int, str] = {}

    def add(self, op: Op, *, is_last: bool) -> Op:
        """The op with its waits."""
        needed = [self._roots.get(v.name, v.name) for v in op.operands]
        needed = [name for name in needed if name.startswith("%")]
        for state in overwritten(op):
            needed += self._readers.get(state.name, ())
        if meets(op) and self._met:
            needed.append(self._met)
        if is_last:
            needed += [name for stream, name in self._lasts.items() if stream != op.stream]
        after = self._missing(op.stream, needed)
        if not after and not self._walk.is_forked(op.stream):
            # A stream begins when the graph does, even if its first op reads nothing of it.
            after = self._missing(op.stream, [*self._inputs[:1], *self._lasts.values()])
        self._walk.place(op)
        self._note(op)
        return replace(op, after=after)

    def _missing(self, stream: int, needed: Sequence[str]) -> tuple[str, ...]:
        """The fewest waits that make all needed values known; later ones tell of earlier ones."""
        after: list[str] = []
        for name in sorted(dict.fromkeys(needed), key=lambda n: -self._issued.get(n, -1)):
            if not self._walk.knows(stream, name):
                self._walk.wait(stream, name)
                after.append(name)
        return tuple(reversed(after))

    def _note(self, op: Op) -> None:
        name = op.results[0].name
        self._issued.update((v.name, len(self._issued)) for v in op.results)
        for value in op.operands:
            self._readers.setdefault(value.name, []).append(name)
        self._lasts[op.stream] = name
        if meets(op):
            self._met = name


def _with_views(ops: Sequence[Op], views: Sequence[Op]) -> list[Op]:
    """Views right behind what they show; those of inputs and weights first."""
    waiting = list(views)
    made = {v.name for op in (*ops, *views) for v in op.results}
    found: list[Op] = []

    def show() -> None:
        """Take every view whose source stands."""
        again = True
        while again:
            again = False
            for view in [v for v in waiting if v.operands[0].name not in made]:
                waiting.remove(view)
                found.append(view)
                made.discard(view.result.name)
                again = True

    show()
    for op in ops:
        found.append(op)
        made.difference_update(v.name for v in op.results)
        show()
    return found
