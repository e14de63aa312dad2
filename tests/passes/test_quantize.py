"""The format of each weight: what is kept, what it takes in memory, and what that is called."""

import pytest

from metainfer.compiler.by_hand import parse_text, run_by_hand
from metainfer.ir.graph import Module
from metainfer.ir.options import Options
from metainfer.passes.target import Decision

PHASES = ("prefill", "decode")
AUTO, SMALLER = Options(), Options(weights="int8")


def linear(stored: str) -> str:
    """A linear by a weight that the checkpoint holds in some format, widened as captured."""
    op = "dequantize" if "/" in stored else "cast"
    return f"""
module m {{
  dim T in [1, 512]
  load main {{
    weights {{
      @w : {stored}[256,512]
    }}
    %0 = {op}(@w) {{dtype = "f32"}} : f32[256,512]
    return %0
  }}
  main(%x: f32[T,512]) {{
    weights {{
      @w : f32[256,512]
    }}
    %0 = linear(%x, @w) : f32[T,256]
    return %0
  }}
}}"""


def table(stored: str) -> str:
    """The same with a table of embeddings."""
    lookup = "%0 = embedding(%x, @w) : f32[T,512]"
    text = linear(stored).replace("%0 = linear(%x, @w) : f32[T,256]", lookup)
    return text.replace("%x: f32[T,512]", "%x: i32[T]")


def chosen(text: str, phase: str = "decode", options: Options = AUTO, hw: str = "cpu") -> Decision:
    module = parse_text(text, "test")
    _, decisions = run_by_hand(module, ["quantize"], hw, phase, options)
    (decision,) = decisions
    return decision


def planned(text: str, phase: str) -> Module:
    return run_by_hand(parse_text(text, "test"), [], "cpu", phase, Options())[0]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("make", [linear, table])
@pytest.mark.parametrize("stored", ["f16", "bf16", "i8/32:f16"])
def test_formats_with_kernels_are_kept_as_they_are(make, stored: str, phase: str) -> None:
    decision = chosen(make(stored), phase)
    assert decision.chosen == stored
    assert decision.reason == "the checkpoint's own format, and the device has kernels for it"


@pytest.mark.parametrize("stored", ["f16", "bf16"])
def test_narrow_floats_have_one_copy_for_both_phases(stored: str) -> None:
    layouts = {planned(linear(stored), p).main.weights[0].tensor.layout for p in PHASES}
    assert layouts == {f"cpu.{stored}_n16"}


@pytest.mark.parametrize("phase", PHASES)
def test_a_linear_that_kernels_widen_says_what_that_takes(phase: str) -> None:
    """Q6_K of GGUF: codes of a byte, a scale for each 16."""
    decision = chosen(linear("i8/16:f32"), phase)
    assert decision.chosen == "i8/16:f32"
    assert decision.reason == (
        "the checkpoint's own format, which torch.linear_dequantized_f32 widens: resident at "
        "524,288 bytes instead of 163,840; --weights int8 would take 139,264, rounding once more"
    )


@pytest.mark.parametrize("phase", PHASES)
def test_a_table_without_kernels_loses_nothing_unasked(phase: str) -> None:
    decision = chosen(table("i8/16:f32"), phase)
    assert decision.chosen == "f32"
    assert decision.reason == (
        "the device has no made kernel for i8/16:f32; no value changes; resident at 524,288 bytes "
        "instead of 163,840"
    )
    assert chosen(table("i8/16:f32"), phase, SMALLER).chosen == "i8/32:f16"


def test_what_is_narrower_than_asked_for_says_that_it_is_widened() -> None:
    decision = chosen(linear("i4/16:f16"), options=SMALLER)
    assert decision.chosen == "i4/16:f16"
    assert "the checkpoint holds i4/16:f16 already" in decision.reason
    assert "torch.linear_dequantized_f32 widens: resident at 524,288 bytes" in decision.reason


def test_on_a_gpu_floats_take_the_activations_type() -> None:
    """f16 in the checkpoint, bf16 between ops: the model as captured rounds the weight."""
    text = linear("f16").replace("f32", "bf16")
    decision = chosen(text, options=Options(activations="bf16"), hw="1xh200")
    assert decision.chosen == "bf16"
    assert "error at most 0.0020" in decision.reason
