"""Schedules of a plan: what `overlap` decided about blocks, and the predicted step op by op."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metainfer.backends.registry import installed
from metainfer.compiler.predict import group_costs, phase_sizes, step_timeline
from metainfer.compiler.tuning.choose import measured_of
from metainfer.hardware.machine import Machine
from metainfer.ir.flatten import flatten
from metainfer.ir.plan import Plan
from metainfer.ir.strategy import Strategy
from metainfer.passes.overlap_report import STREAM_NAMES
from metainfer.runtime.trace import PredictedEvent, PredictedTrace


@dataclass(frozen=True)
class StreamReport:
    """One stream of a block's schedule. Units: seconds."""

    name: str
    tasks: int
    busy_seconds: float


@dataclass(frozen=True)
class ScheduleReport:
    """How a block runs on several streams.

    Units: seconds for one execution at the sizes that the block was judged at.

    Attributes:
        phase: "prefill", "decode" or "call".
        graph: the block.
        calls: how often a step executes it.
        chosen: streams and parts, in words.
        sizes: values of the size symbols.
        serial_seconds: on one stream.
        seconds: as scheduled.
        meeting_seconds: how long ranks exchange.
        hidden_seconds: how much of that lies beside computation.
        streams: what runs on each.
        critical_path: results of the ops that decide the time, in order.
        source: where the figures for what runs at once come from.
    """

    phase: str
    graph: str
    calls: int
    chosen: str
    sizes: Mapping[str, int]
    serial_seconds: float
    seconds: float
    meeting_seconds: float
    hidden_seconds: float
    streams: tuple[StreamReport, ...]
    critical_path: tuple[str, ...]
    source: str


def is_schedule(data: Mapping[str, Any]) -> bool:
    """Whether a decision's data are those of a schedule."""
    return "critical_path" in data


def schedule_report(
    phase: str, calls: Mapping[str, int], chosen: str, data: Mapping[str, Any]
) -> ScheduleReport:
    """Read what `overlap` decided about a block.

    Args:
        phase: in which.
        calls: executions of each graph in a step.
        chosen: the decision in words.
        data: its data.
    """
    return ScheduleReport(
        phase=phase,
        graph=data["graph"],
        calls=calls.get(data["graph"], 0),
        chosen=chosen,
        sizes=data["sizes"],
        serial_seconds=data["serial_seconds"],
        seconds=data["seconds"],
        meeting_seconds=data["meeting_seconds"],
        hidden_seconds=data["hidden_seconds"],
        streams=tuple(StreamReport(**stream) for stream in data["streams"]),
        critical_path=tuple(step["result"] for step in data["critical_path"]),
        source=data["sharing"]["source"],
    )


def predicted_trace(plan: Plan, phases: Sequence[str], stage: int = 0) -> PredictedTrace:
    """The largest predicted step of each phase, one after the other, op by op on its stream."""
    machine, backends = Machine.from_dict(dict(plan.meta["machine"])), installed()
    events: list[PredictedEvent] = []
    begin = 0.0
    for phase in phases:
        module = plan.module(phase, stage)
        entry = plan.entry(phase, stage)["strategy"]
        strategy = Strategy(
            phase, module.mesh, first_rank=entry["first_rank"],
            typical=tuple((name, size) for name, size in entry["typical"]),
        )  # fmt: skip
        env = phase_sizes(module, strategy, dict(module.limits()).get("T", (1, 1))[1])
        groups = group_costs(module, machine, backends, env, strategy.first_rank, measured_of(plan))
        line = step_timeline(module, machine, groups, env, strategy.first_rank)
        known = {g.item.op.results[0].name: g for g in groups}
        places = {i.op.results[0].name: i for i in flatten(module).ops if i.op.results}
        for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True):
            if end > start:
                group, item = known[task.name], places[task.name]
                kind = str(item.op.attr["kind"]) if item.op.name == "fused" else item.op.name
                events.append(
                    PredictedEvent(
                        kind, f"{phase}, {item.place}", group.kernel, STREAM_NAMES[task.stream],
                        (begin + start) * 1e6, (end - start) * 1e6, task.seconds * 1e6,
                    )
                )  # fmt: skip
        begin += line.seconds
    facts = {"model": plan.meta["model"]["name"], "machine": machine.name, "stage": stage}
    return PredictedTrace(plan.hash, tuple(events), facts)
