"""Ops as tasks of a simulated step: how long each takes, and what it is ordered after."""

from collections.abc import Callable, Mapping, Sequence

from metainfer.ir.graph import Op
from metainfer.ir.streams import is_empty, meets, overwritten, roots_of
from metainfer.ir.timeline import Task

# Seconds of an op alone, and the part of the device that it keeps busy then.
Price = Callable[[Op], tuple[float, float]]


def tasks_of(
    ops: Sequence[Op], price: Price, env: Mapping[str, int]
) -> tuple[list[Task], list[int]]:
    """Tasks of a list of ops, and the number of each op's task (-1 for views, which take no time).

    A task is ordered after those that make what it reads, after the readers of a state that it
    writes over, and after what its op waits for.
    """
    roots = roots_of(ops)
    tasks: list[Task] = []
    numbers: list[int] = []
    makers: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for op in ops:
        if op.results and op.results[0].name in roots:
            numbers.append(-1)
            continue
        number = len(tasks)
        read = [roots.get(v.name, v.name) for v in op.operands]
        waits = [roots.get(name, name) for name in op.after]
        after = {makers[name] for name in (*read, *waits) if name in makers}
        for state in overwritten(op):
            after |= set(readers.get(state.name, ()))
        for name in read:
            readers.setdefault(name, []).append(number)
        seconds, load = (0.0, 1.0) if is_empty(op, env) else price(op)
        name = op.results[0].name if op.results else op.name
        ordered = tuple(sorted(after - {number}))
        tasks.append(Task(name, seconds, op.stream, ordered, meets(op), load))
        makers.update((v.name, number) for v in op.results)
        numbers.append(number)
    return tasks, numbers
