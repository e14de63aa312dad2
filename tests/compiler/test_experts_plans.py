"""Plans of models with experts on the CPU: made kernels only, one format for all three weights."""

import re
from dataclasses import replace

import pytest

import metainfer
from metainfer.ir.plan import Plan
from metainfer.models.decoder import decoder_spec
from metainfer.models.experts_config import ExpertsConfig
from metainfer.models.qwen3_moe import config_tiny


def decisions(plan: Plan, place: str, subject: str) -> dict[str, tuple[str, str]]:
    """(chosen, reason) by subject, of one kind of decision of the decode phase."""
    return {
        d["subject"]: (d["chosen"], d["reason"])
        for d in plan.meta["phases"]["decode"]["decisions"]
        if d["place"].startswith(place) and re.search(rf"(?<!_){re.escape(subject)}", d["subject"])
    }


@pytest.mark.parametrize(
    ("weights", "format", "kernel"),
    [
        ("auto", "bf16", "cpu.experts_bf16"),
        ("int8", "i8/32:f16", "cpu.experts_w8"),
        ("int4", "u4/32:f16+f16", "cpu.experts_w4"),
        ("f32", "f32", "cpu.experts_f32"),
    ],
)
def test_no_generic_kernel_is_needed(weights: str, format: str, kernel: str) -> None:
    plan = metainfer.compile("qwen3_moe:tiny", "cpu", weights=weights, strict=True)
    chosen = decisions(plan, "quantize", "mlp.experts.*")
    assert [c for c, _ in chosen.values()] == [format] * 3
    (found,) = decisions(plan, "select layer", "experts %").values()
    assert found[0] == kernel
    (found,) = decisions(plan, "select layer", "route_experts %").values()
    assert found[0] == "cpu.route_experts"


def test_an_expert_of_all_tokens_needs_no_generic_kernel() -> None:
    plan = metainfer.compile("qwen2_moe:tiny", "cpu", strict=True)
    (found,) = decisions(plan, "select layer", "route_experts %").values()
    # Its rows are dense: the router is no part of a wider product there.
    assert found[0] == "cpu.route_experts"


def test_a_width_that_cuts_blocks_keeps_all_weights_of_the_experts() -> None:
    config = replace(config_tiny, experts=ExpertsConfig(num=4, chosen=2, intermediate=40))
    plan = metainfer.compile(decoder_spec("odd", config, dtype="bf16"), "cpu", weights="int8")
    for chosen, reason in decisions(plan, "quantize", "mlp.experts.*").values():
        assert chosen == "bf16"
        assert reason == "--weights int8, but rows of 40 cut blocks of 32"
    (found,) = decisions(plan, "select layer", "experts %").values()
    assert found[0] == "cpu.experts_bf16"
