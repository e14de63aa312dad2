"""Order across streams: which op is sure to have ended before another begins.

A device runs the ops of one stream in the order of the text. Two ops of different streams may run
at once, unless a wait orders them: ``%9 = add(%7, %8) stream 0 after %7`` begins when the op that
makes %7 has ended. Whatever such an op waited for itself has ended then, too.

Stream 0 is the main one. A graph begins and ends on it: other streams are forked from it by a wait,
and joined by one before the graph returns or calls a block.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.ops.collective import MEETING
from metainfer.ir.ops.record import STATEFUL, op_def
from metainfer.ir.printer import print_op
from metainfer.ir.views import is_view, strided_values

_NEVER = 1 << 60


def num_streams(ops: Iterable[Op]) -> int:
    """How many streams ops run on, the main one included."""
    return max((op.stream for op in ops), default=0) + 1


def roots_of(ops: Sequence[Op]) -> dict[str, str]:
    """View -> the value whose storage it shows, through any number of views."""
    strided = strided_values(ops)
    found: dict[str, str] = {}
    for op in ops:
        if is_view(op, strided):
            source = op.operands[0].name
            found[op.result.name] = found.get(source, source)
    return found


@dataclass(frozen=True)
class Order:
    """What has ended before each op of a list begins. Views run nowhere and have no place in it.

    Attributes:
        streams: stream of each op, -1 for views.
        places: number of each op among those of its stream.
        clocks: per op and stream, how many of the stream's ops have ended.
        inputs: per op, the inputs that are sure to be made.
    """

    streams: tuple[int, ...]
    places: tuple[int, ...]
    clocks: tuple[tuple[int, ...], ...]
    inputs: tuple[frozenset[str], ...]

    def precedes(self, first: int, second: int) -> bool:
        """Whether one op (by number) has ended before another begins."""
        return self.clocks[second][self.streams[first]] > self.places[first]

    def releases(self) -> tuple[int, ...]:
        """Per op, the number from which on every op begins after it has ended.

        Storage that an op reads may be written anew by that op or a later one.
        """
        count = len(self.streams)
        width = max(self.streams, default=0) + 1
        least = [_NEVER] * width
        suffix: list[list[int]] = [[] for _ in range(width)]
        for number in reversed(range(count)):
            if self.streams[number] >= 0:
                clock = self.clocks[number][:width]
                least = [min(a, b) for a, b in zip(least, clock, strict=True)]
            for stream in range(width):
                suffix[stream].append(least[stream])
        for column in suffix:
            column.reverse()
        return tuple(
            number + 1
            if stream < 0
            else max(bisect_right(suffix[stream], self.places[number]), number + 1)
            for number, stream in enumerate(self.streams)
        )


class StreamWalk:
    """What is known to have ended, while ops are put on streams one after the other.

    Args:
        width: number of streams.
        inputs: values that are made on the main stream before the first op.
    """

    def __init__(self, width: int, inputs: Collection[str] = ()) -> None:
        self._ended = [[0] * width for _ in range(width)]
        self._ready = [set(inputs), *(set[str]() for _ in range(width - 1))]
        self._counts = [0] * width
        # Of each value that is made: stream and place of its op, and what was known there.
        self._makers: dict[str, tuple[int, int, tuple[int, ...], frozenset[str]]] = {}

    def knows(self, stream: int, name: str) -> bool:
        """Whether the op that makes a value is sure to have ended for a stream's next op."""
        maker = self._makers.get(name)
        if maker is None:
            return name in self._ready[stream]
        return maker[0] == stream or self._ended[stream][maker[0]] > maker[1]

    def wait(self, stream: int, name: str) -> None:
        """Let a stream's next op wait until a value is made."""
        maker = self._makers.get(name)
        if maker is None:
            self._ready[stream].add(name)
            return
        of, place, ended, ready = maker
        known = self._ended[stream]
        self._ended[stream] = [max(a, b) for a, b in zip(known, ended, strict=True)]
        self._ended[stream][of] = max(self._ended[stream][of], place + 1)
        self._ready[stream] |= ready

    def is_forked(self, stream: int) -> bool:
        """Whether a stream knows of anything on another one."""
        return stream == 0 or bool(self._ready[stream]) or any(self._ended[stream])

    def place(self, op: Op) -> tuple[int, tuple[int, ...], frozenset[str]]:
        """Put an op on its stream: its number there, and what has ended before it begins."""
        stream, place = op.stream, self._counts[op.stream]
        ended, ready = tuple(self._ended[stream]), frozenset(self._ready[stream])
        for value in op.results:
            self._makers[value.name] = (stream, place, ended, ready)
        self._counts[stream] += 1
        self._ended[stream][stream] = place + 1
        return place, ended, ready


def order_of(ops: Sequence[Op], inputs: Collection[str] = ()) -> Order:
    """The order that streams and waits give.

    Args:
        ops: in the order of the text.
        inputs: values that are made on the main stream before it; other streams wait for them.
    """
    roots, walk = roots_of(ops), StreamWalk(num_streams(ops), inputs)
    rows: list[tuple[int, int, tuple[int, ...], frozenset[str]]] = []
    for op in ops:
        if op.results and op.results[0].name in roots:
            rows.append((-1, -1, (), frozenset()))
            continue
        for name in op.after:
            walk.wait(op.stream, roots.get(name, name))
        rows.append((op.stream, *walk.place(op)))
    streams, places, clocks, seen = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Order(streams, places, clocks, seen)


# --- what must hold ----------------------------------------------------------------------------


def verify_streams(graph: Graph) -> None:
    """Check that a graph's waits order all that must not run at once.

    Every read follows its write, every write over a state the reads of its older version; ranks
    meet in one order; side streams are forked from the main one and joined again.

    Raises: TypeMismatch naming the op and the wait that is missing.
    """
    if not any(op.stream or op.after for op in graph.ops):
        return
    for op in graph.ops:
        if op.stream < 0:
            raise _fault(op, graph, f"stream {op.stream} is none", "streams count from 0")
        if (op.is_call or op.name in _VIEWS) and (op.stream or op.after):
            raise _fault(op, graph, f"{op.name} runs on no stream of its own", "leave them away")
    _Checker(graph).run()


class _Checker:
    """One walk over a graph's ops."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops = graph.ops
        self.roots = roots_of(graph.ops)
        self.order = order_of(graph.ops, [v.name for v in graph.inputs])
        self.makers: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.met: int | None = None
        self.begun: set[int] = {0}

    def run(self) -> None:
        for number, op in enumerate(self.ops):
            if self.order.streams[number] < 0:
                continue
            self._check_fork(number, op)
            self._check_reads(number, op)
            self._check_writes(number, op)
            self._check_meeting(number, op)
            if op.is_call:
                self._check_joined(number, op)
            self.makers.update((v.name, number) for v in op.results)
        self._check_end()

    def _check_fork(self, number: int, op: Op) -> None:
        if op.stream in self.begun:
            return
        self.begun.add(op.stream)
        if not self.order.inputs[number] and not any(self.order.clocks[number]):
            raise _fault(
                op, self.graph, f"stream {op.stream} begins without a wait for the main one",
                "its first op waits for an input or for an op of stream 0",
            )  # fmt: skip

    def _check_reads(self, number: int, op: Op) -> None:
        for value in op.operands:
            name = self.roots.get(value.name, value.name)
            maker = self.makers.get(name)
            if maker is not None and not self.order.precedes(maker, number):
                self._missing(op, value.name, f"which stream {self.order.streams[maker]} makes")
            if maker is None and name.startswith("%") and name not in self.order.inputs[number]:
                self._missing(op, value.name, "an input, which the main stream makes")
            self.readers.setdefault(name, []).append(number)

    def _missing(self, op: Op, name: str, what: str) -> None:
        raise _fault(
            op, self.graph, f"{op.name} on stream {op.stream} reads {name}, {what}, with no wait",
            f"add: after {name}",
        )  # fmt: skip

    def _check_writes(self, number: int, op: Op) -> None:
        for state in overwritten(op):
            for reader in self.readers.get(state.name, ()):
                if reader != number and not self.order.precedes(reader, number):
                    raise _fault(
                        op, self.graph,
                        f"{op.name} writes over {state.name} while stream "
                        f"{self.order.streams[reader]} may still read it",
                        f"wait for {self.ops[reader].results[0].name}",
                    )  # fmt: skip

    def _check_meeting(self, number: int, op: Op) -> None:
        if not meets(op):
            return
        if self.met is not None and not self.order.precedes(self.met, number):
            before = self.ops[self.met].results[0].name
            raise _fault(
                op, self.graph,
                f"{op.name} on stream {op.stream} and the collective that makes {before} on stream "
                f"{self.ops[self.met].stream} have no order: ranks may meet in different ones",
                f"put both on one stream, or add: after {before}",
            )  # fmt: skip
        self.met = number

    def _check_joined(self, number: int, op: Op) -> None:
        """A block is entered with everything before it done."""
        for earlier in range(number):
            if self.order.streams[earlier] > 0 and not self.order.precedes(earlier, number):
                raise _fault(
                    op, self.graph, f"stream {self.ops[earlier].stream} is not joined at this call",
                    f"an op of stream 0 waits for {self.ops[earlier].results[0].name}",
                )  # fmt: skip

    def _check_end(self) -> None:
        last = max((n for n, s in enumerate(self.order.streams) if s == 0), default=None)
        for number, op in enumerate(self.ops):
            if self.order.streams[number] <= 0:
                continue
            if last is None or not self.order.precedes(number, last):
                raise _fault(
                    op, self.graph, f"stream {op.stream} is not joined at the end of the graph",
                    f"the last op of stream 0 waits for {op.results[0].name}",
                )  # fmt: skip


_VIEWS = frozenset({"transpose", "broadcast", "slice"})


def meets(op: Op) -> bool:
    """Whether ranks meet in an op, a fused group included."""
    return meeting_of(op) is not None


def meeting_of(op: Op) -> Op | None:
    """The collective that an op is, or that its group holds; None if ranks do not meet in it."""
    inner = op.body.ops if op.body is not None else (op,)
    return next((o for o in inner if o.name in MEETING), None)


def payload_bytes(meeting: Op, env: Mapping[str, int]) -> int:
    """Bytes of a collective in local form: what every rank has in the end, or gives."""
    value = meeting.result if meeting.name in ("all_reduce", "all_gather") else meeting.operands[0]
    return value.tensor.bytes_at(env)


def is_empty(op: Op, env: Mapping[str, int]) -> bool:
    """Whether an op makes nothing at these sizes, and need not run: a part without rows."""
    shapes = [v.tensor.concrete(env) for v in op.results if not v.is_state]
    return len(shapes) == len(op.results) > 0 and all(0 in shape for shape in shapes)


def overwritten(op: Op) -> list[Value]:
    """States that an op writes over."""
    if op.name == "fused":
        inner = {v.name for o in op.body.ops for v in overwritten(o)} if op.body else set()
        names = [p.name for p in op.body.inputs] if op.body else []
        return [v for v, name in zip(op.operands, names, strict=True) if name in inner]
    if op.name == "call" or STATEFUL not in op_def(op.name).traits:
        return []
    return [v for v in op.operands if v.is_state]


def _fault(op: Op, graph: Graph, what: str, advice: str) -> TypeMismatch:
    origin = f"{op.source} in {graph.name}" if op.source else f"graph {graph.name}"
    return TypeMismatch(what, text=print_op(op), origin=origin, advice=advice)
