"""Traces of a plan that runs: every group timed by itself, beside what the plan predicts for it."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import typer

from metainfer.backends.registry import installed
from metainfer.compiler.predict import group_costs
from metainfer.compiler.tuning.choose import measured_of
from metainfer.ir.graph import Module
from metainfer.ir.interpret import unify
from metainfer.runtime.executor import Measured
from metainfer.runtime.load import LoadedModel
from metainfer.runtime.trace import Trace, TraceEvent, summary_table, write_trace

# More show nothing new and make files that no viewer opens.
_DECODE_STEPS = 8


class TracingRunner:
    """A model as a step runner that traces: all steps of prefill, the first few of decode.

    A traced step is slower than the same step run at once: each group is timed by itself.

    Attributes:
        events: of the traced steps.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._begun = time.perf_counter()
        self._decoded = 0
        self.events: list[TraceEvent] = []
        self.max_tokens, self.max_sequences = model.max_tokens, model.max_sequences
        self.max_context, self.page_size = model.max_context, model.page_size
        self.num_pages, self.vocab_size = model.num_pages, model.vocab_size
        self.plan_hash = model.plan_hash

    def run(self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        """Execute one step, traced if it is one of the first. Shapes: as `StepRunner.run`."""
        self._decoded += phase == "decode"
        if self._decoded > _DECODE_STEPS:
            return self._model.run(phase, tokens, step)
        offset = (time.perf_counter() - self._begun) * 1e6
        logits, measured, env = self._model.trace(phase, tokens, step)
        self.events += _events(self._model, phase, measured, env, offset)
        return logits


def trace_call(model: LoadedModel, tensors: Sequence[torch.Tensor]) -> list[TraceEvent]:
    """Trace one call of a module."""
    executor = model.executor("call")
    env: dict[str, int] = {}
    for value, tensor in zip(executor.flat.inputs, tensors, strict=True):
        unify(value, tuple(tensor.shape), env)
    for index, tensor in enumerate(tensors):
        executor.input(index, env).copy_(tensor)
    return _events(model, "call", executor.trace(env), env, 0.0)


def save_trace(model: LoadedModel, events: Sequence[TraceEvent], file: Path) -> None:
    """Write a trace; its sums by op go to stderr."""
    facts = {"model": model.plan.meta["model"]["name"], "machine": model.machine.name}
    trace = Trace(model.plan_hash, tuple(events), metadata=facts)
    write_trace(file, trace)
    typer.echo(summary_table(trace), err=True)
    typer.echo(f"wrote {file}", err=True)


def _events(
    model: LoadedModel,
    phase: str,
    measured: Sequence[Measured],
    env: Mapping[str, int],
    offset_us: float,
) -> list[TraceEvent]:
    module: Module = model.plan.module(phase)
    costs = {
        group.item.op.results[0].name: group.cost
        for group in group_costs(
            module, model.machine, installed(), env, measured=measured_of(model.plan)
        )
    }
    events: list[TraceEvent] = []
    for one in measured:
        cost = costs.get(one.item.op.results[0].name)
        op = one.item.op
        events.append(
            TraceEvent(
                name=str(op.attr["kind"]) if op.name == "fused" else op.name,
                place=f"{phase}, {one.item.place}",
                kernel=one.kernel,
                start_us=offset_us + one.start_us,
                measured_us=one.duration_us,
                predicted_us=cost.seconds * 1e6 if cost else None,
                bytes=cost.bytes if cost else 0,
                flops=cost.flops if cost else 0,
            )
        )
    return events
