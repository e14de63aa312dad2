"""Streams of a device: ops of a step issued on them, with the events that the text's waits ask for.

A step begins on the stream that is current when it is run and ends on it, so that a step can be
captured in a graph: side streams are forked from it by events and joined again, as the verifier
demands of the text. On a CPU there are no streams; the order of the text is right there too.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from metainfer.ir.graph import Op
from metainfer.ir.streams import num_streams, roots_of

Call = Callable[[], None]


class Issuer:
    """Puts the calls of a step on streams.

    Args:
        ops: of the flat module, in order.
        device: where they run.
    """

    def __init__(self, ops: Sequence[Op], device: torch.device) -> None:
        self.num_streams = num_streams(ops)
        self.is_active = device.type == "cuda" and self.num_streams > 1
        # Made once: every step and every captured graph runs on the same few streams.
        count = self.num_streams - 1 if self.is_active else 0
        make_stream: Any = torch.cuda.Stream
        make_event: Any = torch.cuda.Event
        self.side_streams = [make_stream(device) for _ in range(count)]
        self._roots = roots_of(ops)
        self._maker = {v.name: op.results[0].name for op in ops for v in op.results}
        names = {self._event_of(name) for op in ops for name in op.after}
        self._events = {name: make_event() for name in names} if self.is_active else {}

    def begin(self) -> Iterable[Call]:
        """What a step starts with: the event of what stands in memory before it."""
        event = self._events.get("")
        return [] if event is None else [lambda: event.record(torch.cuda.current_stream())]

    def issued(self, op: Op, call: Call) -> Call:
        """A call that runs the op on its stream, after what it waits for."""
        if not self.is_active:
            return call
        waits = [self._events[self._event_of(name)] for name in op.after]
        made = self._events.get(op.results[0].name) if op.results else None
        if not op.stream and not waits and made is None:
            return call
        side = self.side_streams[op.stream - 1] if op.stream else None

        def issue() -> None:
            stream = side or torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                for event in waits:
                    stream.wait_event(event)
                call()
                if made is not None:
                    made.record(stream)

        return issue

    def _event_of(self, name: str) -> str:
        """First result of the op that makes a value, "" for what stands before the step."""
        return self._maker.get(self._roots.get(name, name), "")
