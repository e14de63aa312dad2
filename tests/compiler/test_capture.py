"""Capture: blocks, sources, sizes, states, constants, and the errors of what cannot be captured."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import metainfer
from metainfer.compiler import capture
from metainfer.compiler.capture import Captured, capture_language_model, capture_module
from metainfer.ir.errors import MetainferError, Unsupported
from metainfer.ir.verify import verify_module
from metainfer.models.decoder import BuildDecoder, Decoder, decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.smollm2 import config


def tiny_language_model(layers: int = 3) -> Captured:
    small = replace(config.tiny(), layers=layers)
    return capture_language_model(
        "tiny", lambda: Decoder(small), dtype=torch.float32, max_tokens=64, max_sequences=4,
        max_pages=8, kv_dtype="f32",
    )  # fmt: skip


def captured(
    model: nn.Module,
    *shape: int,
    dims: tuple[str, ...] = ("B",),
    dtype: torch.dtype = torch.float32,
) -> Captured:
    example = torch.ones(shape, dtype=dtype)
    symbols = [*dims, *[""] * (len(shape) - len(dims))]
    found = capture_module("m", model, (example,), (symbols,), {s: (1, 64) for s in symbols if s})
    verify_module(found.module)
    return found


def test_equal_layers_become_one_block() -> None:
    module = tiny_language_model().module
    verify_module(module)
    assert [g.name for g in module.graphs] == ["layer", "main"]
    prefixes = [c.attr["prefix"] for c in module.calls()]
    assert prefixes == [f"model.layers.{i}." for i in range(3)]
    (state,) = module.graph("layer").states
    assert state.name == "$self_attn.kv"


def test_every_op_knows_its_model_line() -> None:
    module = tiny_language_model(2).module
    sources = [op.source for g in module.graphs for op in g.ops if not op.is_call]
    files = {s.file for s in sources if s is not None and s.line > 0}
    assert files == {"models/decoder.py", "models/norm.py"}
    assert None not in sources


def test_logits_are_those_of_the_sampled_rows() -> None:
    module = tiny_language_model(2).module
    assert str(module.main.outputs[0].tensor.shape[0]) == "R"
    gathers = [op for op in module.main.ops if op.name == "gather"]
    assert gathers[0].operands[1].name == "step.sample_rows"


def test_tied_weights_have_the_name_that_checkpoints_hold() -> None:
    names = {w.name for w in tiny_language_model(2).module.main.weights}
    assert "@model.embed_tokens.weight" in names
    assert "@lm_head.weight" not in names


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line that the error names
            return x + 1
        return x - 1


class Nonzero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[:, 0].nonzero()[:, 0]
        return x[rows] * 2


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs()


@pytest.mark.parametrize(("model", "line"), [(Branching(), "if x.sum() > 0"), (Nonzero(), "rows")])
def test_control_flow_on_data_is_refused_with_its_line(model: nn.Module, line: str) -> None:
    with pytest.raises(Unsupported) as caught:
        captured(model, 5, 4)
    assert "data" in caught.value.what
    assert "test_capture.py:" in caught.value.origin
    assert line in caught.value.text or "nonzero" in caught.value.text
    assert caught.value.advice


def test_an_unknown_op_is_named_with_its_line() -> None:
    with pytest.raises(MetainferError) as caught:
        captured(Unknown(), 5, 8)
    assert "fft" in str(caught.value) or "complex" in str(caught.value)
    assert "test_capture.py:" in caught.value.origin


class Offsets(nn.Module):
    """A buffer that no checkpoint need hold, a lifted constant, and in-place arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.offset: torch.Tensor
        self.register_buffer("offset", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.offset
        y = y.clone().add_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return y.mean(-1, keepdim=True).expand(-1, 3)


def test_buffers_and_constants_travel_with_the_plan() -> None:
    found = captured(Offsets(), 5, 4)
    assert any(torch.equal(t, torch.arange(4.0)) for t in found.constants.values())
    assert any(torch.equal(t, torch.tensor([1.0, 2, 3, 4])) for t in found.constants.values())


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 : 2 * (x.shape[1] // 2)]


def test_symbolic_slices() -> None:
    found = captured(Halves(), 3, 10, dims=("", "S"))
    assert str(found.module.main.outputs[0].type) == "f32[3,S//2]"


def test_two_inputs_share_a_symbol() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    examples = (torch.ones(5, 4), torch.ones(5, 4))
    found = capture_module("m", Add(), examples, (("B", ""), ("B", "")), {"B": (1, 64)})
    assert [str(v.type) for v in found.module.main.inputs] == ["f32[B,4]", "f32[B,4]"]


# --- kept captures --------------------------------------------------------------------------------


def test_equal_builds_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    trace = capture._trace

    def counting(model: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append(type(model).__name__)
        return trace(model, *args, **kwargs)

    monkeypatch.setattr(capture, "_trace", counting)
    capture._kept.cache_clear()
    config = DecoderConfig(
        hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocab=40,
        max_positions=64,
    )  # fmt: skip

    def compiled(build: Any, **options: Any) -> str:
        spec = replace(decoder_spec("kept", config), build=build)
        return metainfer.compile(spec, "cpu", max_context=64, **options).hash

    first = compiled(BuildDecoder(config))
    assert compiled(BuildDecoder(replace(config))) == first
    assert len(traced) == 1
    # Other sizes, another model, and a build that may give something else each time.
    compiled(BuildDecoder(config), max_tokens=48)
    compiled(BuildDecoder(replace(config, layers=2)))
    assert len(traced) == 3
    for _ in range(2):
        assert compiled(lambda: Decoder(config)) == first
    assert len(traced) == 5
