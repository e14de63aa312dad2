"""Order across streams: which op is sure to have ended before another begins.

A device runs the ops of one stream in the order of the text. Two ops of different streams may run
at once, unless a wait orders them: ``%9 = add(%7, %8) stream 0 after %7`` begins when the op that
makes %7 has ended. Whatever such an op waited for itself has ended then, too.

Stream 0 is the main one. A graph begins and ends on it: other streams are forked from it by a wait,
and joined by one before the graph returns or calls a block.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
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


def order_of(ops: Sequence[Op], inputs: Collection[str] = ()) -> Order:
    """The order that streams and waits give.

    Args:
        ops: in the order of the text.
        inputs: values that are made on the main stream before it; other streams wait for them.
    """
    roots, makers = roots_of(ops), dict[str, int]()
    width = num_streams(ops)
    known = [[0] * width for _ in range(width)]
    ready: list[frozenset[str]] = [frozenset(inputs), *[frozenset[str]()] * (width - 1)]
    streams, places, clocks, seen = list[int](), list[int](), list[tuple[int, ...]](), []
    counts = [0] * width
    for number, op in enumerate(ops):
        if op.results and roots.get(op.results[0].name) is not None:
            streams.append(-1)
            places.append(-1)
            clocks.append(())
            seen.append(frozenset[str]())
            continue
        stream = op.stream
        known[stream][stream] = counts[stream]
        for name in op.after:
            name = roots.get(name, name)
            maker = makers.get(name)
            if maker is None:
                ready[stream] |= {name}
                continue
            passed = [*clocks[maker]]
            passed[streams[maker]] = places[maker] + 1
            known[stream] = [max(a, b) for a, b in zip(known[stream], passed, strict=True)]
            ready[stream] |= seen[maker]
        streams.append(stream)
        places.append(counts[stream])
        clocks.append(tuple(known[stream]))
        seen.append(ready[stream])
        counts[stream] += 1
        makers.update((v.name, number) for v in op.results)
    return Order(tuple(streams), tuple(places), tuple(clocks), tuple(seen))


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
    inner = op.body.ops if op.body is not None else (op,)
    return any(o.name in MEETING for o in inner)


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

