"""assemble: stages and decisions become a plan."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import metainfer
from metainfer.backends.registry import Backends
from metainfer.compiler.capacity import Capacity
from metainfer.compiler.capture import Captured
from metainfer.compiler.job import Job, Stage
from metainfer.compiler.predict import predict
from metainfer.ir.errors import CheckpointError
from metainfer.ir.graph import Module
from metainfer.ir.plan import SCHEMA, Plan
from metainfer.ir.printer import print_module
from metainfer.ir.strategy import Layout


def assemble(
    given: Job, captured: Captured, layout: Layout, stages: Sequence[Stage],
    capacities: Sequence[Capacity], timings: Mapping[str, float],
) -> Plan:  # fmt: skip
    """The plan of a compiled model: texts of all stages and phases, and what was decided."""
    texts: dict[str, str] = {}
    entries = []
    for number, stage in enumerate(stages):
        files = {phase: f"stage{number}.{phase}.mir" for phase in stage.modules}
        texts.update({files[p]: print_module(m) for p, m in stage.modules.items()})
        entries.append(_stage_meta(given, stage, files))
    first, memory = entries[0], [_plain(capacity.to_dict()) for capacity in capacities]
    phases = {p: {**e, "later": [s[p] for s in entries[1:]]} for p, e in first.items()}
    meta = {
        "schema": SCHEMA,
        "version": metainfer.__version__,
        "model": _model_meta(given, captured),
        "machine": given.machine.to_dict(),
        "options": _plain(given.options.to_dict()),
        "ranks": {**asdict(layout), "count": layout.num_ranks},
        "phases": phases,
        "capacity": {**memory[0], "later": memory[1:]},
        "kernel_sources": kernel_fingerprints(
            [m for stage in stages for m in stage.modules.values()], given.backends
        ),
        "timings": dict(timings),
    }
    constants = {n: t.detach().cpu().numpy() for n, t in captured.constants.items()}
    constants.update(given.constants)
    return Plan(json.loads(json.dumps(meta)), texts, constants)


def _stage_meta(given: Job, stage: Stage, files: Mapping[str, str]) -> dict[str, Any]:
    """Phase -> file, strategy, decisions and predicted steps of one stage."""
    machine, backends = given.machine, given.backends
    return {
        phase: {
            "file": files[phase],
            "strategy": _plain(stage.strategies[phase].to_dict()),
            "decisions": [_plain(asdict(d)) for d in stage.decisions[phase]],
            "predicted": predict(
                module, machine, backends, stage.strategies[phase], given.measured
            ),
        }
        for phase, module in stage.modules.items()
    }


def _model_meta(given: Job, captured: Captured) -> dict[str, Any]:
    spec = given.spec
    return {
        "name": spec.name,
        "kind": spec.kind,
        "argument": given.argument,
        "checkpoint": _location(spec.locate_checkpoint),
        "checkpoint_hash": given.checkpoint.content_hash() if given.checkpoint else "",
        "tokenizer": _location(spec.locate_tokenizer),
        "renames": dict(spec.renames),
        "inputs": list(captured.input_names),
        "max_positions": spec.max_positions,
    }


def _location(locate: Callable[[], Path]) -> str:
    try:
        return str(locate().resolve())
    except CheckpointError:
        return ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def kernel_fingerprints(modules: Iterable[Module], backends: Backends) -> dict[str, str]:
    """Hash of the sources of each backend whose kernels the modules name."""
    from metainfer.backends.sources import fingerprint

    used = {
        backends.kernels.get(c.kernel).backend
        for module in modules
        for graph in module.graphs
        for op in graph.ops
        for c in op.choices
    }
    return {backend: fingerprint(backend) for backend in sorted(used)}
