"""Measuring a loaded plan: random prompts, prefill and decode counted apart, every run kept."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metainfer.backends.registry import installed
from metainfer.cli.load import Load
from metainfer.cli.tracing import TracingRunner, trace_call
from metainfer.compiler.predict import predict_step
from metainfer.compiler.tuning.choose import measured_of
from metainfer.ir.dtypes import Scalar
from metainfer.ir.errors import CapacityError, MetainferError
from metainfer.runtime.engine import Engine
from metainfer.runtime.load import LoadedModel
from metainfer.runtime.runner import StepRunner
from metainfer.runtime.sampling import SamplingParams
from metainfer.runtime.trace import TraceEvent

Show = Callable[[str], None]


@dataclass(frozen=True)
class Measurement:
    """One phase, measured.

    Units: seconds, each for all steps of one run.

    Attributes:
        phase: "prefill", "decode" or "call".
        what: the workload, in words.
        unit: what is counted: "tokens" or "calls".
        count: how many of them a run does.
        steps: steps of a run.
        seconds: of each run.
        predicted_seconds: what the plan says a run takes.
        roofline_seconds: what no kernel can beat.
    """

    phase: str
    what: str
    unit: str
    count: int
    steps: int
    seconds: tuple[float, ...]
    predicted_seconds: float
    roofline_seconds: float

    @property
    def median_seconds(self) -> float:
        """Of the runs."""
        return statistics.median(self.seconds)

    @property
    def per_second(self) -> float:
        """Units in a second, at the median."""
        return self.count / self.median_seconds


@dataclass
class _Phase:
    """Steps of one phase in one run."""

    sizes: list[dict[str, int]]
    tokens: int = 0
    seconds: float = 0.0


def measure_model(
    model: LoadedModel, load: Load, sizes: dict[str, int], repeat: int,
    show: Show,
) -> list[Measurement]:  # fmt: skip
    """Prefill and decode of a language model, or calls of a module.

    Args:
        model: the model.
        load: what a language model is measured with.
        sizes: of a module, those that vary.
        repeat: runs that count.
        show: is told how far it is.

    Raises: MetainferError for what the plan does not hold, or sizes of a language model.
    """
    if not model.is_language_model:
        return bench_module(model, sizes, repeat, show)
    if sizes:
        raise MetainferError("--size is for modules", advice="give --prompt-tokens")
    return bench_language_model(model, *load, repeat, show)


def bench_language_model(
    model: LoadedModel, prompt_tokens: int, new_tokens: int, batch: int, repeat: int, show: Show
) -> list[Measurement]:
    """Measure prefill and decode of equal sequences.

    Args:
        model: a language model.
        prompt_tokens: of each sequence.
        new_tokens: of each sequence.
        batch: sequences at once.
        repeat: runs that count; one more warms up.
        show: is told how far it is.

    Raises: CapacityError if the plan does not hold the workload.
    """
    most = model.max_sequences * model.plan.layout.dp
    if batch > most:
        raise CapacityError(
            f"a batch of {batch}, the plan holds {most} sequences",
            advice="compile with larger --max-sequences",
        )
    rng = np.random.default_rng()
    runs = []
    for number in range(repeat + 1):
        show(f"run {number} of {repeat}" if number else "warming up")
        prompts = rng.integers(0, model.vocab_size, (batch, prompt_tokens))
        runs.append(_run(model, prompts.tolist(), new_tokens))
    counted = runs[1:]
    prompt = f"{batch} x {prompt_tokens} tokens"
    answer = f"{batch} x {new_tokens} after {prompt_tokens}"
    return [
        _measurement(model, "prefill", prompt, [r["prefill"] for r in counted]),
        _measurement(model, "decode", answer, [r["decode"] for r in counted]),
    ]


def traced_run(
    model: LoadedModel, prompt_tokens: int, new_tokens: int, batch: int, sizes: Mapping[str, int]
) -> list[TraceEvent]:
    """One more run of a workload, every group timed by itself; arguments as of the benches."""
    if not model.is_language_model:
        return trace_call(model, random_inputs(model, _call_sizes(model, sizes)))
    tracer = TracingRunner(model)
    prompts = np.random.default_rng().integers(0, model.vocab_size, (batch, prompt_tokens))
    _run(tracer, prompts.tolist(), new_tokens)
    return tracer.events


def _run(model: StepRunner, prompts: Sequence[list[int]], new_tokens: int) -> dict[str, _Phase]:
    """One run; decode steps while a prompt is still being computed are not counted."""
    engine = Engine(model, end_ids=())
    params = SamplingParams(max_tokens=new_tokens)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    found = {"prefill": _Phase([]), "decode": _Phase([])}
    while engine.has_work:
        before = [r.computed for r in requests]
        is_mixed = any(r.is_prefilling for r in requests)
        begun = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begun
        moved = [(r.computed, r.computed - b) for r, b in zip(requests, before, strict=True)]
        chunks = [(end, count) for end, count in moved if count]
        is_prefill = engine.counters.prefill_steps > len(found["prefill"].sizes)
        if is_mixed and not is_prefill:
            continue
        phase = found["prefill" if is_prefill else "decode"]
        phase.sizes.append(_sizes(chunks, model.page_size))
        phase.tokens += sum(count for _, count in chunks)
        phase.seconds += seconds
    return found


def _sizes(chunks: Sequence[tuple[int, int]], page_size: int) -> dict[str, int]:
    longest = max(end for end, _ in chunks)
    return {
        "T": sum(count for _, count in chunks),
        "B": len(chunks),
        "P": -(-longest // page_size),
        "R": len(chunks),
    }


def _measurement(model: LoadedModel, phase: str, what: str, runs: Sequence[_Phase]) -> Measurement:
    predicted, roofline = _predicted(model, phase, runs[0].sizes)
    seconds = tuple(r.seconds for r in runs)
    first = runs[0]
    return Measurement(
        phase, what, "tokens", first.tokens, len(first.sizes), seconds, predicted, roofline
    )


def _predicted(
    model: LoadedModel, phase: str, steps: Sequence[Mapping[str, int]]
) -> tuple[float, float]:
    """Predicted time of steps, and their roofline: a step passes all stages one after another."""
    cache: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for env in steps:
        key = tuple(env.values())
        if key not in cache:
            cache[key] = _predicted_stages(model, phase, env)
    rows = [row for env in steps for row in cache[tuple(env.values())]]
    return sum(r["seconds"] for r in rows), sum(r["roofline_seconds"] for r in rows)


def _predicted_stages(
    model: LoadedModel, phase: str, env: Mapping[str, int]
) -> list[dict[str, Any]]:
    layout = model.plan.layout
    # Replicas share the sequences, as evenly as they can.
    shared = {name: -(-size // layout.dp) if name != "P" else size for name, size in env.items()}
    return [
        predict_step(
            model.plan.module(phase, stage), model.machine, installed(), shared,
            stage * layout.stage_ranks, measured_of(model.plan),
        )
        for stage in range(layout.pp)
    ]  # fmt: skip


# --- modules -----------------------------------------------------------------------------------


def bench_module(
    model: LoadedModel, sizes: Mapping[str, int], repeat: int, show: Show
) -> list[Measurement]:
    """Measure calls of a module on random inputs.

    Args:
        model: of kind "module".
        sizes: values of sizes that vary; the least that the plan allows if not given.
        repeat: runs that count; one more warms up.
        show: is told how far it is.

    Raises: MetainferError for a size that the module does not have or does not allow.
    """
    env = _call_sizes(model, sizes)
    tensors = random_inputs(model, env)
    seconds = []
    for number in range(repeat + 1):
        show(f"run {number} of {repeat}" if number else "warming up")
        begun = time.perf_counter()
        model(*tensors)
        seconds.append(time.perf_counter() - begun)
    predicted, roofline = _predicted(model, "call", [env])
    what = " ".join(f"{name}={size}" for name, size in env.items()) or "fixed sizes"
    return [Measurement("call", what, "calls", 1, 1, tuple(seconds[1:]), predicted, roofline)]


def _call_sizes(model: LoadedModel, sizes: Mapping[str, int]) -> dict[str, int]:
    symbols = model.executor("call").module.symbols
    known = {s.name for s in symbols}
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise MetainferError(
            f"the module has no size {unknown[0]!r}",
            advice=f"it has: {', '.join(sorted(known)) or 'none that varies'}",
        )
    return {s.name: sizes.get(s.name, s.low) for s in symbols}


def random_inputs(model: LoadedModel, env: Mapping[str, int], seed: int = 0) -> list[torch.Tensor]:
    """Random tensors for a module's inputs: normal floats; integers and flags of 0 and 1."""
    rng = np.random.default_rng(seed)
    tensors = []
    for value in model.executor("call").flat.inputs:
        shape = tuple(size.evaluate(env) for size in value.tensor.shape)
        dtype = value.tensor.dtype
        is_float = isinstance(dtype, Scalar) and dtype.is_float
        numbers = rng.standard_normal(shape) if is_float else rng.integers(0, 2, shape)
        tensors.append(torch.from_numpy(numbers.astype(np.float32 if is_float else np.int64)))
    return tensors
