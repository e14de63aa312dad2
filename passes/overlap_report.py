"""What `overlap` says: the schedule that it took with its gain, or why a block stays as it is."""

from collections.abc import Mapping, Sequence
from typing import Any

from metainfer.ir.graph import Graph, Op
from metainfer.ir.timeline import Sharing, Timeline
from metainfer.passes.row_parts import Parts
from metainfer.passes.target import Decision, Target

STREAM_NAMES = ("main", "communication", "side")


def report_kept(
    graph: Graph, target: Target, env: Mapping[str, int], serial: float, best: float
) -> None:
    """Say that a block stays on one stream."""
    reason = (
        f"the best form on several streams takes {_us(best)}, one stream {_us(serial)} at "
        f"{_sizes(env)}: less than 2% gained"
    )
    target.report.add(Decision(f"overlap {graph.name}", graph.name, "one stream", reason))


def report_overlapped(
    graph: Graph, target: Target, env: Mapping[str, int], serial: float, timeline: Timeline,
    cut: Sequence[Op], parts: Parts | None, sharing: Sharing, *, is_apart: bool = False,
) -> None:  # fmt: skip
    """Say how a block was put on streams.

    Args:
        graph: the block.
        target: whose report it goes to.
        env: sizes that it was judged at.
        serial: seconds on one stream.
        timeline: its schedule.
        cut: ops whose rows are in parts.
        parts: which.
        sharing: what tasks cost each other.
        is_apart: whether experts were parted from what is added to their sum.
    """
    streams = sorted({t.stream for t in timeline.tasks})
    chosen = f"{len(streams)} streams"
    if is_apart:
        chosen += ", the expert of all tokens apart from the routed ones' sum"
    if parts is not None:
        span = f"{cut[0].results[0].name} to {cut[-1].results[0].name}"
        chosen += f", rows of {span} in {parts.count} parts"
        chosen += f" from {parts.least_rows} tokens on" if parts.grain > 1 else ""
    meeting, hidden = timeline.meeting_seconds, timeline.hidden_seconds
    reason = (
        f"{_us(serial)} -> {_us(timeline.seconds)} at {_sizes(env)} "
        f"({timeline.seconds / serial - 1:+.0%}); {_us(hidden)} of {_us(meeting)} of "
        f"communication hidden ({timeline.hidden_share:.0%})"
    )
    data: dict[str, Any] = {
        "graph": graph.name,
        "sizes": dict(env),
        "serial_seconds": serial,
        "seconds": timeline.seconds,
        "meeting_seconds": meeting,
        "hidden_seconds": hidden,
        "parts": parts.count if parts is not None else 1,
        "least_rows": parts.least_rows if parts is not None else 0,
        "streams": [_stream(timeline, s) for s in streams],
        "critical_path": [_step(timeline, i) for i in timeline.critical_path()],
        "sharing": {
            "computing": sharing.computing, "meeting": sharing.meeting,
            "wait_seconds": sharing.wait_seconds, "source": sharing.source,
        },
    }  # fmt: skip
    target.report.add(
        Decision(f"overlap {graph.name}", graph.name, chosen, reason, data=tuple(data.items()))
    )


def _stream(timeline: Timeline, stream: int) -> dict[str, Any]:
    own = [i for i, t in enumerate(timeline.tasks) if t.stream == stream]
    return {
        "name": STREAM_NAMES[stream],
        "tasks": len(own),
        "busy_seconds": sum(timeline.ends[i] - timeline.starts[i] for i in own),
    }


def _step(timeline: Timeline, number: int) -> dict[str, Any]:
    task = timeline.tasks[number]
    return {
        "result": task.name,
        "stream": task.stream,
        "start_seconds": timeline.starts[number],
        "end_seconds": timeline.ends[number],
    }


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def _sizes(env: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in env.items()) or "its size"
