"""Traces: what each group took beside what the plan predicted, for Perfetto and as a table."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metainfer.ir.errors import MetainferError
from metainfer.ir.whole_file import write_file

_MEASURED, _PREDICTED = "measured", "predicted"


@dataclass(frozen=True)
class TraceEvent:
    """One execution of a group. Units: microseconds from the trace's begin.

    Attributes:
        name: kind of the op or group ("linear").
        place: layer that it belongs to ("layer model.layers.3.").
        kernel: kernel that ran.
        start_us: when it began.
        measured_us: how long it took.
        predicted_us: how long the plan says that it takes; None if the plan says nothing.
        bytes: moved, as the cost model counts them.
        flops: done, as the cost model counts them.
        track: who ran it; events of one track do not overlap.

    Raises: MetainferError if a number is negative or not finite.
    """

    name: str
    place: str
    kernel: str
    start_us: float
    measured_us: float
    predicted_us: float | None
    bytes: int
    flops: int
    track: str = "rank 0"

    def __post_init__(self) -> None:
        """Check the numbers."""
        for what in ("start_us", "measured_us", "predicted_us", "bytes", "flops"):
            value = getattr(self, what)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise MetainferError(
                    f"{what} of {self.name!r} is {value}", origin=f"{self.place}, {self.kernel}"
                )


@dataclass(frozen=True)
class TraceCounter:
    """The value of a counter from a moment on (pages in use, retries of the allocator).

    Units: microseconds from the trace's begin.
    """

    name: str
    at_us: float
    value: float
    track: str = "rank 0"


@dataclass(frozen=True)
class Trace:
    """Everything that one trace file holds.

    Attributes:
        plan_hash: of the plan that ran.
        events: in any order.
        counters: in any order.
        metadata: further facts, such as machine and versions; plain data.
    """

    plan_hash: str
    events: tuple[TraceEvent, ...]
    counters: tuple[TraceCounter, ...] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class PredictedEvent:
    """One execution of a group in a simulated step. Units: microseconds.

    Attributes:
        name: kind of the op or group.
        place: phase and layer that it belongs to.
        kernel: kernel that would run.
        stream: what runs one after the other ("main", "communication", "side").
        start_us: when it begins.
        duration_us: how long it takes, slowed by what runs beside it.
        alone_us: how long it takes alone.
    """

    name: str
    place: str
    kernel: str
    stream: str
    start_us: float
    duration_us: float
    alone_us: float


@dataclass(frozen=True)
class PredictedTrace:
    """A simulated step: what a trace file of a schedule holds."""

    plan_hash: str
    events: tuple[PredictedEvent, ...]
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class SummaryRow:
    """All events of one name.

    Attributes:
        name: kind of op or group.
        count: number of events.
        measured_us: sum of their times.
        share: of the time of all events.
        compared_us: measured time of those events that have a prediction.
        predicted_us: sum of the predictions.
        bytes: sum.
        flops: sum.
    """

    name: str
    count: int
    measured_us: float
    share: float
    compared_us: float
    predicted_us: float
    bytes: int
    flops: int

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time of the events with a prediction; None without one."""
        return self.compared_us / self.predicted_us if self.predicted_us else None

    @property
    def gbps(self) -> float:
        """Bytes moved per time. Units: 10^9 bytes a second."""
        return self.bytes / self.measured_us / 1e3 if self.measured_us else 0.0

    @property
    def gflops(self) -> float:
        """Arithmetic per time. Units: 10^9 operations a second."""
        return self.flops / self.measured_us / 1e3 if self.measured_us else 0.0


def chrome_json(trace: Trace) -> dict[str, object]:
    """Lay a trace out in the Trace Event Format, which Perfetto and Chrome open.

    Each track is a process of two threads: the events as measured, and below them the same events
    as long as predicted, each at its measured begin or after the one before.

    Raises: MetainferError if the metadata names a plan hash of its own.
    Source: "Trace Event Format", Google 2016.
    """
    if "plan_hash" in trace.metadata:
        raise MetainferError("the trace's metadata has a plan_hash besides the trace's own")
    names = sorted({e.track for e in trace.events} | {c.track for c in trace.counters})
    numbers = {track: number for number, track in enumerate(names)}
    rows: list[dict[str, object]] = []
    for track, number in numbers.items():
        rows += _headings(track, number)
    free_at = dict.fromkeys(names, 0.0)
    for event in sorted(trace.events, key=lambda e: (e.start_us, e.track)):
        number = numbers[event.track]
        rows.append(_slice(event, number, 0, event.start_us, event.measured_us))
        if event.predicted_us is not None:
            start = max(event.start_us, free_at[event.track])
            free_at[event.track] = start + event.predicted_us
            rows.append(_slice(event, number, 1, start, event.predicted_us))
    for counter in sorted(trace.counters, key=lambda c: c.at_us):
        rows.append(
            {
                "ph": "C",
                "name": counter.name,
                "pid": numbers[counter.track],
                "ts": counter.at_us,
                "args": {"value": counter.value},
            }
        )
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {"plan_hash": trace.plan_hash, **trace.metadata},
    }


def predicted_json(trace: PredictedTrace) -> dict[str, object]:
    """Lay a simulated step out in the Trace Event Format: a thread for each stream."""
    streams = list(dict.fromkeys(e.stream for e in trace.events))
    rows: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": _PREDICTED}}
    ]
    for thread, name in enumerate(streams):
        where = {"pid": 0, "tid": thread}
        rows.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
    for event in trace.events:
        rows.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": _PREDICTED,
                "pid": 0,
                "tid": streams.index(event.stream),
                "ts": event.start_us,
                "dur": event.duration_us,
                "args": {
                    "place": event.place, "kernel": event.kernel, "alone_us": event.alone_us,
                },
            }
        )  # fmt: skip
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {**trace.metadata, "plan_hash": trace.plan_hash},
    }


def write_trace(path: str | Path, trace: Trace | PredictedTrace) -> Path:
    """Write a trace file, whole or not at all.

    Raises: MetainferError if it cannot be written or holds what JSON cannot express.
    """
    place = Path(path)
    try:
        laid_out = chrome_json(trace) if isinstance(trace, Trace) else predicted_json(trace)
        text = json.dumps(laid_out, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MetainferError(
            f"the trace is not plain data: {error}",
            advice="counters must be finite, metadata texts, numbers, lists and maps",
        ) from error
    try:
        write_file(place, text.encode())
    except OSError as error:
        raise MetainferError(
            f"the trace cannot be written: {error.strerror or error}",
            origin=str(place),
            advice="give a file in a folder that exists and can be written to",
        ) from error
    return place


def summarize(events: Iterable[TraceEvent]) -> tuple[SummaryRow, ...]:
    """Sum events by name, longest first."""
    groups: dict[str, list[TraceEvent]] = {}
    for event in events:
        groups.setdefault(event.name, []).append(event)
    total = sum(e.measured_us for group in groups.values() for e in group)
    rows = [_row(name, group, total) for name, group in groups.items()]
    return tuple(sorted(rows, key=lambda r: (-r.measured_us, r.name)))


def summary_table(trace: Trace) -> str:
    """Return the sums by name as text, with the plan hash above and the whole below."""
    head = ("op", "count", "measured us", "share", "predicted us", "ratio", "GB/s", "GFLOP/s")
    rows = summarize(trace.events)
    total = sum(e.measured_us for e in trace.events)
    whole = _row("total", list(trace.events), total)
    lines = [head, *(_cells(r) for r in rows), _cells(whole)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [f"plan {trace.plan_hash}"]
    for line in lines:
        numbers = (cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))
        text.append("  ".join([line[0].ljust(widths[0]), *numbers]))
    return "\n".join(text)


def _headings(track: str, number: int) -> list[dict[str, object]]:
    heads: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": track}}
    ]
    for thread, name in enumerate((_MEASURED, _PREDICTED)):
        where = {"pid": number, "tid": thread}
        heads.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
        heads.append(
            {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread}}
        )
    return heads


def _slice(
    event: TraceEvent, process: int, thread: int, start_us: float, duration_us: float
) -> dict[str, object]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": _PREDICTED if thread else _MEASURED,
        "pid": process,
        "tid": thread,
        "ts": start_us,
        "dur": duration_us,
        "args": {
            "place": event.place,
            "kernel": event.kernel,
            "measured_us": event.measured_us,
            "predicted_us": event.predicted_us,
            "bytes": event.bytes,
            "flops": event.flops,
        },
    }


def _row(name: str, events: list[TraceEvent], total_us: float) -> SummaryRow:
    measured = sum(e.measured_us for e in events)
    known = [(e.measured_us, e.predicted_us) for e in events if e.predicted_us is not None]
    return SummaryRow(
        name=name,
        count=len(events),
        measured_us=measured,
        share=measured / total_us if total_us else 0.0,
        compared_us=sum(m for m, _ in known),
        predicted_us=sum(p for _, p in known),
        bytes=sum(e.bytes for e in events),
        flops=sum(e.flops for e in events),
    )


def _cells(row: SummaryRow) -> tuple[str, ...]:
    known = row.ratio is not None
    return (
        row.name,
        str(row.count),
        f"{row.measured_us:.1f}",
        f"{row.share:.1%}",
        f"{row.predicted_us:.1f}" if known else "-",
        f"{row.ratio:.2f}" if known else "-",
        f"{row.gbps:.2f}",
        f"{row.gflops:.2f}",
    )
