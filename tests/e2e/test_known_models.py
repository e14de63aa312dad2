"""Every model known by name: its tiny form is captured, compiled for a CPU and equal to itself.

A new line in ``MODELS`` needs no new test.
"""

from importlib import import_module

import numpy as np
import pytest
import torch
from lm_steps import EXACT, Sequences, error, load_plan, run_chunked
from torch import nn

import metainfer
from metainfer.models import MODELS
from metainfer.models.spec import ModelSpec

BOUND = 1e-4  # of the greatest result
LENGTH, CHUNK = 21, 8


def tiny_of(name: str) -> ModelSpec:
    """The tiny form; a module without one is small enough itself."""
    spec = import_module(MODELS[name]).spec
    assert isinstance(spec, ModelSpec)
    if spec.tiny is None:
        assert spec.kind == "module", f"{name} needs ModelSpec(tiny=...): it is a {spec.kind}"
        return spec
    tiny = spec.tiny()
    assert tiny.kind == spec.kind
    return tiny


def module_of(spec: ModelSpec) -> nn.Module:
    torch.manual_seed(0)
    return spec.build().float().eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_known_model_is_its_own_eager_form(name: str) -> None:
    spec = tiny_of(name)
    if spec.kind == "causal_lm":
        check_language_model(spec)
    else:
        check_module(spec)


def check_language_model(spec: ModelSpec) -> None:
    """Prefill in chunks, and decode after the first one."""
    module = module_of(spec)
    model = load_plan(metainfer.compile(spec, "cpu", **EXACT), weights=module.state_dict())
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, LENGTH).tolist()
    ids = torch.tensor(tokens, dtype=torch.int32)
    with torch.no_grad():
        wanted = module(ids, torch.arange(LENGTH, dtype=torch.int32)).numpy()
    greatest = float(np.abs(wanted).max())
    assert greatest > 0.1
    assert error(run_chunked(model, tokens, CHUNK), wanted) < BOUND * greatest
    sequences = Sequences(model, seed=1)
    sequences.run("prefill", {0: tokens[:CHUNK]})
    for at in range(CHUNK, LENGTH):
        found = sequences.run("decode", {0: tokens[at : at + 1]})
        assert error(found, wanted[at : at + 1]) < BOUND * greatest, f"token {at}"


def check_module(spec: ModelSpec) -> None:
    """One call on the example inputs."""
    module = module_of(spec)
    model = load_plan(metainfer.compile(spec, "cpu", exact=True), weights=module.state_dict())
    assert spec.example_inputs is not None
    inputs = spec.example_inputs()
    with torch.no_grad():
        wanted = module(*inputs)
    for a, b in zip(_many(model(*inputs)), _many(wanted), strict=True):
        torch.testing.assert_close(a, b, atol=BOUND, rtol=BOUND)


def _many(made: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
