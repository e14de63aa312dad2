"""A plan of a model's tiny form against the numpy interpreter: the kernels, seen as a whole."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from metainfer.compiler.api import compile as compile_plan
from metainfer.compiler.perplexity import Step, decode_walk, prefill_walk
from metainfer.hardware.machine import Machine
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Module
from metainfer.ir.interpret import StateArrays, interpret
from metainfer.ir.options import Options
from metainfer.ir.plan import Plan
from metainfer.ir.types import StateType
from metainfer.models.spec import ModelSpec
from metainfer.runtime.load import LoadedModel, load
from metainfer.runtime.weights import Provider, state_dict_provider

_TOKENS, _PAGES = 6, 3


def tiny_error(plan: Plan, spec: ModelSpec) -> tuple[float, float]:
    """Greatest difference of logits, and that over the greatest logit.

    The tiny form is compiled with the plan's options for the plan's machine, with random weights;
    pins are left away, for groups of its sizes may have other kernels. A prefill and a decode of
    the same sequence are run by the kernels and by the interpreter.
    """
    assert spec.tiny is not None
    tiny = spec.tiny()
    options = Options.from_dict(dict(plan.meta["options"]))
    options = replace(options, strict=False, pins=(), max_context=0, memory_fraction=1.0)
    compiled = compile_plan(tiny, Machine.from_dict(dict(plan.meta["machine"])), options=options)
    weights = dict(tiny.build().float().state_dict())
    loaded = load(compiled, weights, allow_machine_mismatch=True)
    provider = state_dict_provider(weights, compiled.constants)
    tokens = np.random.default_rng(0).integers(0, loaded.vocab_size, _TOKENS).tolist()
    steps = (
        *prefill_walk(tokens[:-1], loaded.max_tokens, 1),
        list(decode_walk([tokens]))[-1],
    )
    states: Mapping[str, StateArrays] = _states(compiled.module("prefill"))
    worst, greatest = 0.0, 0.0
    for step in steps:
        wanted, states = _reference(compiled, loaded, step, provider, states)
        record = step.record(loaded.page_size, _PAGES)
        found = loaded.run(step.phase, step.tokens, record)
        worst = max(worst, float(np.abs(found - wanted).max()))
        greatest = max(greatest, float(np.abs(wanted).max()))
    return worst, worst / greatest if greatest else worst


def _reference(
    plan: Plan,
    model: LoadedModel,
    step: Step,
    provider: Provider,
    states: Mapping[str, StateArrays],
) -> tuple[np.ndarray, Mapping[str, StateArrays]]:
    record = step.record(model.page_size, _PAGES)
    module = plan.module(step.phase)
    result = interpret(module, [step.tokens], provider, step=record, states=states)
    return result.outputs[0].astype(np.float32), result.states


def _states(module: Module) -> dict[str, StateArrays]:
    """Paged states, all zeros, as a model begins."""
    found: dict[str, StateArrays] = {}
    for name, value in flatten(module).states.items():
        type_ = value.type
        assert isinstance(type_, StateType)
        found[name.removeprefix("$")] = {
            field: np.zeros(
                (_PAGES + 1, type_.page_size, *(size.static for size in entry.shape)),
                entry.dtype.numpy,  # type: ignore[union-attr, unused-ignore]
            )
            for field, entry in type_.fields
        }
    return found
