"""compile: the one path from a model to a plan."""

import copy
import glob
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metainfer.backends.registry import installed
from metainfer.compiler.assemble import assemble
from metainfer.compiler.attach import (
    Header,
    attach_checkpoint,
    full_weights,
    header_without_weights,
)
from metainfer.compiler.capacity import Capacity, plan_capacity
from metainfer.compiler.capture import Captured, built, capture_language_model, capture_module
from metainfer.compiler.check import pass_checker
from metainfer.compiler.cost import CostModel
from metainfer.compiler.explain import NO_WEIGHTS
from metainfer.compiler.job import Job, Progress, Stage
from metainfer.compiler.layouts import choose_layout
from metainfer.compiler.overrides import check_applied, check_overrides
from metainfer.compiler.sources import known_name, resolve_model
from metainfer.compiler.tuning.choose import with_measured, with_tuned
from metainfer.hardware.load import load_machine
from metainfer.hardware.machine import Machine
from metainfer.ir.dtypes import DType, parse_dtype
from metainfer.ir.errors import CheckpointError, MetainferError, Unsupported
from metainfer.ir.graph import Binding, Module
from metainfer.ir.histogram import RoutingHistogram, layer_of
from metainfer.ir.options import Options
from metainfer.ir.plan import Plan
from metainfer.ir.strategy import Layout, Strategy
from metainfer.ir.types import Symbol
from metainfer.models.spec import ModelSpec
from metainfer.passes.layout import DEFAULT_PAGE
from metainfer.passes.pipeline import PIPELINE, Timing, run_passes
from metainfer.passes.stages import split_stages
from metainfer.passes.target import Decision, Report, Target
from metainfer.runtime.checkpoint import (
    Checkpoint,
    TensorSource,
    absent_shards,
    check_tensors,
    expand,
    open_checkpoint,
)

_TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def compile(
    model: str | Path | ModelSpec | nn.Module,
    hw: str | Machine = "cpu",
    *,
    options: Options | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    example_inputs: Sequence[torch.Tensor] | None = None,
    dynamic: Sequence[Sequence[str]] = (),
    bounds: Mapping[str, tuple[int, int]] | None = None,
    progress: Progress = lambda message: None,
    **fields: Any,
) -> Plan:
    """Compile a model for a machine.

    Args:
        model: a model.py, a known name, a Hugging Face folder, a GGUF file, a ModelSpec, or an
            nn.Module with ``example_inputs``.
        hw: a hardware file, a known machine's name, or a Machine.
        options: what is asked for; single fields may be given as keywords instead.
        out: where to write the plan; nothing is written without it.
        overwrite: whether a plan at ``out`` may be replaced.
        example_inputs: for an nn.Module: tensors that forward takes.
        dynamic: for an nn.Module: per input, names of the dims that vary ("" for fixed ones).
        bounds: for an nn.Module: least and greatest size by such a name; (1, 256) without.
        progress: called with one line as each stage begins.

    Raises: MetainferError with place and remedy for any bad input.
    """
    begun = time.perf_counter()
    chosen = replace(options or Options(), **fields)
    spec = _resolve(model, example_inputs, dynamic, bounds)
    machine = hw if isinstance(hw, Machine) else load_machine(str(hw))
    check_overrides(chosen, installed().kernels)
    argument = _argument(model, spec)
    checkpoint, absent = _open(spec)
    given = Job(
        spec,
        machine,
        chosen,
        installed(),
        checkpoint,
        absent,
        Report(),
        progress,
        argument,
        {},
        _routing(chosen),
    )
    if os.environ.get("METAINFER_VERIFY", "1") == "2":
        given = _checked_on_tiny(given, begun)
    try:
        plan = _compile(given, model if isinstance(model, nn.Module) else None, begun)
    finally:
        if given.checkpoint is not None:
            given.checkpoint.close()
    if out is not None:
        plan.save(Path(out), overwrite=overwrite)
    return plan


def _resolve(
    model: Any, examples: Sequence[torch.Tensor] | None, dynamic: Any, bounds: Any
) -> ModelSpec:
    if isinstance(model, nn.Module):
        if examples is None:
            raise MetainferError(
                "an nn.Module is compiled for example inputs, none are given",
                advice="metainfer.compile(module, example_inputs=(tensor, ...))",
            )
        inputs = tuple(examples)
        rows = tuple(tuple(names) for names in dynamic)
        return resolve_model(model, example_inputs=lambda: inputs, dynamic=rows, bounds=bounds)
    return resolve_model(model)


def _argument(model: Any, spec: ModelSpec) -> str:
    """How the model can be found again: a known name or an absolute path, "" if it cannot."""
    if not isinstance(model, str | Path):
        return ""
    path = spec.source_file
    if path is not None and known_name(Path(path)) == spec.name:
        return spec.name
    text = str(model)
    base, colon, variant = text.rpartition(":")
    for place, rest in ((text, ""), (base, colon + variant)):
        if place and Path(place).expanduser().exists():
            return str(Path(place).expanduser().resolve()) + rest
    return text


def _checked_on_tiny(given: Job, begun: float) -> Job:
    """Compile the tiny form first, interpreting around every pass; a model without one, itself."""
    if given.spec.tiny is None:
        return replace(given, interpreted=True)
    given.progress("interpreting the tiny form around every pass")
    tiny = replace(
        given,
        spec=given.spec.tiny(),
        checkpoint=None,
        absent="random",
        report=Report(),
        interpreted=True,
    )
    options = replace(given.options, max_context=0, strict=False)
    _compile(replace(tiny, options=options, interpreted=True), None, begun)
    return given


def _routing(options: Options) -> RoutingHistogram | None:
    return RoutingHistogram.read(Path(options.routing)) if options.routing else None


def _check_routing(given: Job, module: Module) -> None:
    """Hold the histogram against the model's layers with experts."""
    layers, counts = [], set()
    for call in module.calls():
        for op in module.graph(str(call.attr["block"])).ops:
            if op.name == "experts":
                binding = Binding.of(call)
                layers.append(layer_of([binding.full_name(w.name[1:]) for w in op.operands[3:]]))
                counts.add(op.operands[3].tensor.shape[0].static)
    if given.routing is None:
        return
    if not layers:
        raise MetainferError(
            f"{given.spec.name} has no experts that a histogram could place",
            advice="leave --routing out",
        )
    given.routing.check(given.spec.name, layers, max(counts))


def _open(spec: ModelSpec) -> tuple[Checkpoint | None, str]:
    """The checkpoint; or why there is none: the spec names none, or it is not on this machine."""
    try:
        path = spec.locate_checkpoint()
    except CheckpointError as error:
        return None, error.what
    shards = absent_shards(path)
    if shards:
        return None, f"the index in {path} names {', '.join(shards)}: none of them is there"
    return open_checkpoint(path), ""


def _compile(given: Job, instance: nn.Module | None, begun: float) -> Plan:
    spec = given.spec
    timings: dict[str, float] = {"start": time.perf_counter() - begun}
    given, tuned_groups = with_measured(given)
    strategies = _strategies(given)
    given.progress(f"capturing {spec.name}")
    start = time.perf_counter()
    captured = _settled(given, _capture(given, strategies, instance))
    timings["capture"] = time.perf_counter() - start
    start = time.perf_counter()
    module = _attach(given, captured, strategies)
    timings["attach"] = time.perf_counter() - start
    _check_routing(given, module)
    start = time.perf_counter()
    layout = _layout(given, module, strategies)
    timings["layout"] = time.perf_counter() - start
    stages, page_size = [], given.options.page_size
    for number, part in enumerate(split_stages(module, layout.pp)):
        stage = _compile_stage(given, part, strategies, layout, number, page_size, timings)
        stages.append(stage)
        page_size = stage.page_size
    for stage in stages:
        check_applied(given.options, stage.modules)
    given.progress("memory")
    capacities = _capacities(given, stages)
    stages = [_with_room(s, c) for s, c in zip(stages, capacities, strict=True)]
    timings["total"] = time.perf_counter() - begun
    plan = assemble(given, captured, layout, stages, capacities, timings)
    return with_tuned(plan, given.measured, tuned_groups, given.backends)


def _layout(given: Job, module: Module, strategies: Mapping[str, Strategy]) -> Layout:
    """How many ranks share the model, and how."""
    strategy = list(strategies.values())[-1]
    bounded = _bounded(module, strategy)

    def draft(whole: Module, target: Target) -> Module:
        before = takewhile(lambda p: p.name != "shard", PIPELINE)
        return run_passes(whole, target, tuple(before))[0]

    costs = CostModel(
        given.backends.layouts, compression=given.options.compress_collectives
    )  # fmt: skip
    return choose_layout(
        bounded, strategy, given.options, given.machine, costs,
        given.backends.kernels, given.report, draft,
    )  # fmt: skip


def _compile_stage(
    given: Job, module: Module, strategies: Mapping[str, Strategy], layout: Layout, number: int,
    page_size: int, timings: dict[str, float],
) -> Stage:  # fmt: skip
    """All phases of one stage; the first one chooses the page size of the others."""
    placed = {
        phase: replace(
            strategy, mesh=layout.mesh, experts=layout.experts,
            first_rank=number * layout.stage_ranks,
        )
        for phase, strategy in strategies.items()
    }  # fmt: skip
    modules: dict[str, Module] = {}
    decisions: dict[str, Sequence[Decision]] = {}
    of_stage = f" of stage {number}" if layout.pp > 1 else ""
    for phase, strategy in placed.items():
        given.progress(f"passes for {phase}{of_stage}")
        start = time.perf_counter()
        compiled, steps, report = _run_phase(given, module, replace(strategy, page_size=page_size))
        modules[phase], decisions[phase] = compiled, report.decisions
        page_size = page_size or _page_size(compiled)
        key = f"{phase}{of_stage}"
        timings[f"passes {key}"] = time.perf_counter() - start
        timings.update({f"{key} {t.name}": t.seconds + t.verify_seconds for t in steps})
    return Stage(placed, modules, decisions, page_size)


def _capacities(given: Job, stages: Sequence[Stage]) -> list[Capacity]:
    """The account of every stage; all hold as many pages as the tightest one."""
    context = _max_context(given)

    def planned(stage: Stage, most: int = 0) -> Capacity:
        return plan_capacity(
            stage.modules, given.device, given.backends, given.options, max_context=context,
            most_pages=most,
        )  # fmt: skip

    alone = [planned(stage) for stage in stages]
    least = min(capacity.num_pages for capacity in alone)
    pairs = zip(stages, alone, strict=True)
    return [own if own.num_pages == least else planned(stage, least) for stage, own in pairs]


def _with_room(stage: Stage, capacity: Capacity) -> Stage:
    """The stage with its bounds cut to the pages of the longest sequence."""
    modules = {phase: _with_pages(m, capacity) for phase, m in stage.modules.items()}
    return replace(stage, modules=modules)


# --- strategy ----------------------------------------------------------------------------------


def _strategies(given: Job) -> dict[str, Strategy]:
    options = given.options
    activations = _activations(given)
    base = Strategy(
        "call", activations=activations, fp8_activations=options.activations == "fp8",
        weights=options.weights, kv=options.kv_format(activations),
        exact=options.exact, max_tokens=options.max_tokens, max_sequences=options.max_sequences,
        max_context=_max_context(given), page_size=options.page_size,
    )  # fmt: skip
    if given.spec.kind != "causal_lm":
        return {"call": base}
    pages = max(512 // DEFAULT_PAGE, 1)
    prefill = (("B", 1), ("P", pages), ("R", 1))
    return {
        "prefill": replace(base, phase="prefill", typical=prefill),
        "decode": replace(base, phase="decode", typical=(("P", pages),)),
    }


def _activations(given: Job) -> str:
    asked = given.options.activations
    if asked not in ("auto", "fp8"):
        reason = f"--activations {asked}"
    elif given.device.kind == "gpu" and given.device.has("bf16_mma"):
        asked, reason = given.spec.dtype or "bf16", "the device's matrix units take it"
    else:
        asked, reason = "f32", "the device has no units for narrower floats that our kernels use"
    given.report.add(Decision("strategy", "activations", asked, reason))
    return asked


def _max_context(given: Job) -> int:
    own = given.spec.max_positions
    asked = given.options.max_context
    if asked and own and asked > own:
        raise MetainferError(
            f"max_context = {asked} is more than the {own} positions that {given.spec.name} knows",
            advice=f"ask for at most {own}",
        )
    return asked or own


# --- capture -----------------------------------------------------------------------------------


def _capture(
    given: Job, strategies: Mapping[str, Strategy], instance: nn.Module | None
) -> Captured:
    spec, strategy = given.spec, next(iter(strategies.values()))
    dtype = _TORCH[strategy.activations]
    if spec.kind == "causal_lm":
        return capture_language_model(
            spec.name, spec.build, dtype=dtype, max_tokens=strategy.max_tokens,
            max_sequences=strategy.max_sequences,
            max_pages=max(strategy.max_context // DEFAULT_PAGE, 1), kv_dtype=strategy.kv,
        )  # fmt: skip
    if spec.kind != "module" or spec.example_inputs is None:
        raise Unsupported(
            f"models of kind {spec.kind!r} cannot be compiled yet",
            advice="use kind='causal_lm', or kind='module' with example_inputs",
        )
    model = instance if instance is not None else built(spec.build)
    if strategy.activations != "f32":
        # The caller's module stays as it is.
        model = (copy.deepcopy(model) if instance is not None else model).to(dtype)
    inputs = [_to_dtype(t, dtype) for t in spec.example_inputs()]
    dims = [_dims_of(spec, i, t) for i, t in enumerate(inputs)]
    names = {name for symbols in dims for name in symbols if name}
    bounds = {name: spec.size_bounds(name) for name in sorted(names)}
    return capture_module(spec.name, model, inputs, dims, bounds)


def _to_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _dims_of(spec: ModelSpec, index: int, tensor: torch.Tensor) -> list[str]:
    given = spec.dynamic[index] if index < len(spec.dynamic) else ()
    return [given[i] if i < len(given) else "" for i in range(tensor.ndim)]


def _attach(given: Job, captured: Captured, strategies: Mapping[str, Strategy]) -> Module:
    spec = given.spec
    activations = parse_dtype(next(iter(strategies.values())).activations)
    header: Header
    known = _types_of(captured.constants)
    if given.checkpoint is None:
        assumed = activations if spec.dtype is None else parse_dtype(spec.dtype)
        if spec.checkpoint is not None or spec.kind == "causal_lm":
            reason = (
                "no weights on this machine, the plan is made from the model's shapes: "
                f"{given.absent}"
            )
            given.report.add(Decision(NO_WEIGHTS, "checkpoint", str(assumed), reason))
        known |= _types_of(captured.buffers)
        header = header_without_weights(captured.module, assumed)
    else:
        wanted = {
            spec.checkpoint_name(name): tuple(n.static for n in value.tensor.shape)
            for name, value in full_weights(captured.module)
            if name not in known
        }
        unread = [glob.escape(spec.checkpoint_name(name)) for name in captured.unread]
        check_tensors(given.checkpoint, expand(wanted), ignore=(*spec.ignore, *unread))
        source = TensorSource(given.checkpoint)

        def stored(name: str) -> tuple[tuple[int, ...], DType] | None:
            return source.find(spec.checkpoint_name(name))

        header = stored

    def with_known(name: str) -> tuple[tuple[int, ...], DType] | None:
        return known.get(name) or header(name)

    return attach_checkpoint(captured.module, with_known, spec.unpermute_heads)


def _settled(given: Job, captured: Captured) -> Captured:
    """Buffers that the checkpoint lacks are the model's own constants after all."""
    if given.checkpoint is None:
        return captured
    held = given.checkpoint.tensors
    lacking = {
        name: tensor
        for name, tensor in captured.buffers.items()
        if given.spec.checkpoint_name(name) not in held
    }
    kept = {name: t for name, t in captured.buffers.items() if name not in lacking}
    return replace(captured, constants={**captured.constants, **lacking}, buffers=kept)


def _types_of(
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, tuple[tuple[int, ...], DType]]:
    return {name: (tuple(t.shape), _dtype_of(t)) for name, t in tensors.items()}


def _dtype_of(tensor: torch.Tensor) -> DType:
    from metainfer.compiler.lowering import scalar_name

    return parse_dtype(scalar_name(tensor.dtype))


# --- passes ------------------------------------------------------------------------------------


def _run_phase(
    given: Job, module: Module, strategy: Strategy
) -> tuple[Module, tuple[Timing, ...], Report]:
    report = Report(list(given.report.decisions))
    target = Target(
        given.machine,
        strategy,
        given.options,
        given.backends.kernels,
        CostModel(
            given.backends.layouts,
            given.machine,
            strategy.mesh,
            strategy.first_rank,
            given.options.compress_collectives,
            given.measured,
        ),
        report,
        given.routing,
        given.constants,
    )
    bounded = _bounded(module, strategy)
    check = pass_checker(bounded, strategy, given.constants) if given.interpreted else None
    compiled, timings = run_passes(bounded, target, check=check)
    return compiled, timings, report


def _bounded(module: Module, strategy: Strategy) -> Module:
    """The module with the phase's bounds: a decode step has one token of each sequence."""
    if strategy.phase != "decode":
        return module
    most = strategy.max_sequences
    symbols = tuple(replace(s, high=most) if s.name == "T" else s for s in module.symbols)
    return replace(module, symbols=symbols)


def _page_size(module: Module) -> int:
    sizes = {s.state.page_size for g in module.graphs for s in g.states}
    return max(sizes, default=0)


def _with_pages(module: Module, capacity: Capacity) -> Module:
    """The module with P bounded by the pages of the longest sequence."""
    if not capacity.page_size:
        return module
    most = max(-(-capacity.max_context // capacity.page_size), 1)
    symbols = tuple(Symbol("P", 1, most) if s.name == "P" else s for s in module.symbols)
    return replace(module, symbols=symbols)
