"""fp8 activations through the whole path: tokens of the kernels are those of the interpreter."""

from dataclasses import replace

import numpy as np
import pytest
from lm_steps import run_chunked

import metainfer
from metainfer.compiler.explain import summarize
from metainfer.compiler.interpreted import tiny_error
from metainfer.hardware import load_machine
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import StrictError
from metainfer.ir.options import Options
from metainfer.ir.plan import Plan
from metainfer.models.decoder import Decoder, decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.spec import ModelSpec
from metainfer.runtime.load import load

# Whole groups of 128 numbers in the residual, two of them in the MLP.
CONFIG = DecoderConfig(
    hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocab=96,
    max_positions=64,
)  # fmt: skip
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
FP8 = Options(weights="fp8", activations="fp8", max_context=64)


def spec_of(config: DecoderConfig = CONFIG) -> ModelSpec:
    """A model that is its own tiny form."""
    spec = decoder_spec("small", config)
    return replace(spec, tiny=lambda: spec)


def with_units() -> Machine:
    """A CPU that says of itself that it multiplies fp8: plain PyTorch computes it."""
    machine = load_machine("cpu")
    (place,) = machine.devices
    kind = replace(place.device, features=place.device.features | {"fp8_mma"})
    return replace(machine, devices=(replace(place, device=kind),))


def formats_of(plan: Plan) -> set[str]:
    module = plan.module("prefill")
    ops = [op for graph in module.graphs for op in graph.ops]
    return {str(op.attr["format"]) for op in ops if op.name == "quantize"}


@pytest.mark.parametrize("hidden", [128, 96], ids=["groups", "rows"])
def test_kernels_make_what_the_interpreter_makes(
    hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hidden == CONFIG.hidden:
        monkeypatch.setenv("METAINFER_VERIFY", "2")
    spec = spec_of(replace(CONFIG, hidden=hidden))
    plan = metainfer.compile(spec, with_units(), options=FP8)
    # Weights of widths that 128 does not divide have a scale a row, and then activations, too.
    assert formats_of(plan) == {"f8e4m3/row:f32" if hidden % 128 else "f8e4m3/128:f32"}
    _, relative = tiny_error(plan, spec)
    # Codes are the interpreter's own: sums in another order are all that may differ.
    assert relative < 1e-5


def test_greedy_tokens_are_nearly_those_of_plain_activations() -> None:
    """Rounding shifts logits by one or two hundredths of the largest."""
    spec, machine = spec_of(), with_units()
    weights = dict(Decoder(CONFIG).float().state_dict())
    found = []
    for options in (FP8, replace(FP8, activations="auto")):
        plan = metainfer.compile(spec, machine, options=options)
        model = load(plan, weights, allow_machine_mismatch=True)
        found.append(run_chunked(model, TOKENS, 5))
    rounded, plain = found
    difference = np.abs(rounded - plain).max() / np.abs(plain).max()
    assert 1e-3 < difference < 0.05


def test_a_device_without_units_says_so() -> None:
    plan = metainfer.compile(spec_of(), "cpu", options=FP8)
    assert formats_of(plan) == set()
    decisions = plan.entry("prefill", 0)["decisions"]
    (line,) = {d["reason"] for d in decisions if d["place"] == "quantize_activations"}
    assert "lacks fp8_mma" in line
    with pytest.raises(StrictError, match="1 request for fp8 activations"):
        metainfer.compile(spec_of(), "cpu", options=replace(FP8, strict=True))


def test_cards_take_made_kernels_only() -> None:
    plan = metainfer.compile(spec_of(), "1xh200", options=replace(FP8, strict=True))
    kernels = {c.kernel for g in plan.module("prefill").graphs for op in g.ops for c in op.choices}
    assert any("_fp8_" in name for name in kernels)
    summary = summarize(plan)
    assert summary.formats["activations"] == "bf16, f8e4m3/128:f32 in products"
    assert {"triton.rms_norm_quantize", "triton.quantize"} & kernels


def test_simulated_ranks_compute_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass is run on all ranks before and after; a sum, its norm and codes are one group."""
    monkeypatch.setenv("METAINFER_VERIFY", "2")
    plan = metainfer.compile(spec_of(), "2xh200", options=replace(FP8, tp=2))
    kinds = {str(op.attr.get("kind")) for g in plan.module("decode").graphs for op in g.ops}
    assert "all_reduce_add_rms_norm_quantize" in kinds


def test_experts_read_codes_and_their_router_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAINFER_VERIFY", "2")
    plan = metainfer.compile("qwen3_moe:tiny", "1xh200", options=FP8)
    ops = [op for g in plan.module("prefill").graphs for op in g.ops]
    kinds = {str(op.attr.get("kind", op.name)): op for op in ops}
    read = {str(op.operands[0].tensor.dtype) for k, op in kinds.items() if k.startswith("experts")}
    assert read == {"f8e4m3/row:f32"}
    kernels = {c.kernel for op in ops for c in op.choices}
    assert any(name.startswith("triton.experts") and name.endswith("_fp8") for name in kernels)
