"""61 layers of 3 kinds: three blocks, a text that can be read, no weights needed."""

import time

import pytest
import torch

import metainfer
from metainfer.compiler.capture import capture_language_model
from metainfer.ir.printer import print_module
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.spec import ModelSpec

LAYERS = 61


@pytest.fixture(scope="module")
def deep() -> ModelSpec:
    windows = (0, 0, 0, *(32 if i % 2 else 128 for i in range(LAYERS - 3)))
    config = DecoderConfig(
        hidden=64, layers=LAYERS, heads=4, kv_heads=2, head_dim=16, intermediate=96,
        vocab=200, max_positions=256, windows=windows,
    )  # fmt: skip
    return decoder_spec("deep", config)


def test_layers_of_three_kinds_are_three_blocks(deep: ModelSpec) -> None:
    captured = capture_language_model(
        "deep", deep.build, dtype=torch.float32, max_tokens=64, max_sequences=4, max_pages=16,
        kv_dtype="f32",
    )  # fmt: skip
    module = captured.module
    assert [g.name for g in module.graphs] == ["layer", "layer_2", "layer_3", "main"]
    called = [str(c.attr["block"]) for c in module.calls()]
    assert called == ["layer"] * 3 + ["layer_2", "layer_3"] * 29
    # Measured: 191.
    assert len(print_module(module).splitlines()) < 200


def test_compiles_without_weights(deep: ModelSpec) -> None:
    start = time.process_time()
    plan = metainfer.compile(deep, "cpu")
    # Measured: 6 s, of one core whatever else goes on; the limit is what the project promises.
    assert time.process_time() - start < 15
    assert plan.meta["model"]["checkpoint"] == ""
    for phase in ("prefill", "decode"):
        module = plan.module(phase)
        assert len([g for g in module.graphs if g.name != "main"]) == 3
        assert len(list(module.calls())) == LAYERS
        # With fused bodies, load graphs and kernels. Measured: 278.
        assert len(plan.texts[f"stage0.{phase}.mir"].splitlines()) < 300
    decisions = plan.meta["phases"]["decode"]["decisions"]
    assert any("no weights on this machine" in d["reason"] for d in decisions)
