"""What the rewriting passes say of themselves, what they refuse, and how long they take."""

import time
from dataclasses import replace

import pytest
from pass_oracle import as_module, parse_any, target_for

from metainfer.hardware import Policy
from metainfer.ir.dtypes import F32
from metainfer.ir.errors import HardwareError, MetainferError
from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.ops.record import Builder
from metainfer.ir.rules import parse_rule
from metainfer.ir.types import tensor
from metainfer.passes.canonicalize import canonicalize
from metainfer.passes.fuse import fuse
from metainfer.passes.merge_linears import joined_name, merge_linears
from metainfer.passes.raise_ops import raise_ops
from metainfer.passes.rewrite import apply_rules
from metainfer.passes.seam import seam

ADD_NORM = """
graph f(%x: f32[T,64], %r: f32[T,64], @w: f32[64]) {
  %0 = add(%x, %r) : f32[T,64]
  %1 = rms_norm(%0, @w) {eps = 1e-05} : f32[T,64]
  return %0, %1
}"""


def two_linears(first: str, second: str, extra: str = "") -> str:
    return f"""
graph f(%x: f32[T,128], {first}, {second}, @bias: f32[8]) {{
  %0 = linear(%x, @q) : f32[T,8]
  %1 = linear(%x, @k{extra}) : f32[T,8]
  return %0, %1
}}"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            two_linears("@q: i8/32:f16[8,128]", "@k: u4/32:f16+f16[8,128]"),
            "formats of weights differ: i8/32:f16, u4/32:f16+f16",
        ),
        (two_linears("@q: f32[8,128]", "@k: f32[8,128]", ", @bias"), "only some have a bias"),
        (
            two_linears("@q: f8e4m3/16x128:f32[8,128]", "@k: f8e4m3/16x128:f32[8,128]"),
            "concat_rows of f8e4m3/16x128:f32: its blocks span rows",
        ),
        (
            two_linears("@q: f32[8,128]", "%k: f32[8,128]").replace("@k", "%k"),
            "%k is computed in the step",
        ),
        (
            two_linears("@q: f32[8,128]", "@k: f32[8,128]").replace("%x, @k", "%x, @q"),
            "@q is read elsewhere too",
        ),
    ],
)
def test_linears_that_stay_apart_say_why(text: str, reason: str) -> None:
    before, target = parse_any(text), target_for()
    assert merge_linears(before, target) == before
    (decision,) = target.report.decisions
    assert (decision.chosen, decision.reason) == ("kept apart", reason)


def test_merged_linears_say_what_they_save() -> None:
    target = target_for(typical={"T": 4})
    merge_linears(parse_any(two_linears("@q: f32[8,128]", "@k: f32[8,128]")), target)
    (decision,) = target.report.decisions
    # One read of x, [4, 128] floats, is gone.
    assert dict(decision.data) == {"bytes": 4 * 128 * 4, "launches": 1}


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (("@a.q_proj.w", "@a.k_proj.w", "@a.v_proj.w"), "@a.qkv_proj.w"),
        (("@m.gate_proj.weight", "@m.up_proj.weight"), "@m.gate_up_proj.weight"),
        (("@s.query.bias", "@s.key.bias"), "@s.query_key.bias"),
        (("@q", "@k"), "@qk"),
        (("@wi_0", "@wi_1"), "@wi_0_wi_1"),
        (("@a.b.w", "@a.w"), "@a.b.w_a.w"),
    ],
)
def test_joined_names(names: tuple[str, ...], joined: str) -> None:
    assert joined_name(names) == joined


def test_a_fused_group_says_what_it_saves() -> None:
    target = target_for(typical={"T": 10})
    fuse(parse_any(ADD_NORM), target)
    (decision,) = target.report.decisions
    numbers = dict(decision.data)
    # The sum is returned, so that it is written, but not read again.
    assert (numbers["count"], numbers["bytes"], numbers["launches"]) == (1, 10 * 64 * 4, 1)
    bandwidth = target.device.memory_bandwidth.sustained
    floor = target.device.kernel_floor_us or target.device.launch_latency_us
    assert numbers["us"] == pytest.approx(2560 / bandwidth * 1e6 + floor, abs=1e-3)
    assert "2560 bytes and 1 launches fewer a step at T=10" in decision.reason


def test_a_policy_can_forbid_a_rule() -> None:
    before, target = parse_any(ADD_NORM), target_for()
    policy = (Policy("rule", "add_rms_norm", "forbid", "decode", "its kernel is slow here"),)
    forbidding = replace(target, machine=replace(target.machine, policy=policy))
    assert fuse(before, forbidding) == before
    (decision,) = forbidding.report.decisions
    assert decision.subject == "add_rms_norm"
    assert decision.reason == "the machine's policy forbids it: its kernel is slow here"
    prefill = replace(forbidding, strategy=replace(target.strategy, phase="prefill"))
    assert fuse(before, prefill) != before


def test_a_seam_says_how_many_calls_it_joins() -> None:
    text = """
module m {
  dim T in [1, 8]
  block layer(%x: f32[T,4]) {
    weights {
      @norm : f32[4]
    }
    %0 = rms_norm(%x, @norm) {eps = 1e-05} : f32[T,4]
    return %0
  }
  main(%x: f32[T,4]) {
    %0 = call layer(%x) {prefix = "0."} : f32[T,4]
    %1 = call layer(%0) {prefix = "1."} : f32[T,4]
    %2 = call layer(%1) {prefix = "2."} : f32[T,4]
    return %2
  }
}"""
    target = target_for()
    seam(parse_any(text), target)
    found = {d.chosen: dict(d.data)["calls"] for d in target.report.decisions}
    assert found == {"norm of the next call at its end": 2, "norm done by the call before": 1}


def test_an_unknown_need_is_an_error() -> None:
    rule = parse_rule(
        'rule odd why "none" needs warp_drive before (%x: t[*]) { %0 = exp(%x) return %0 }'
        " after (%x: t[*]) { %0 = exp(%x) return %0 }"
    )
    with pytest.raises(HardwareError, match="unknown feature 'warp_drive'"):
        apply_rules(parse_any(ADD_NORM), target_for(), [rule], "test")


def test_rules_that_undo_each_other_are_an_error() -> None:
    def rule(name: str, one: str, other: str) -> str:
        return (
            f'rule {name} why "none" before (%x: t[*]) {{ %0 = {one}(%x) return %0 }}'
            f" after (%x: t[*]) {{ %0 = {other}(%x) return %0 }}"
        )

    rules = [parse_rule(rule("there", "exp", "tanh")), parse_rule(rule("back", "tanh", "exp"))]
    before = parse_any("graph f(%x: f32[T]) { %0 = exp(%x) : f32[T] return %0 }")
    with pytest.raises(MetainferError, match=r"rules go round in circles in main\n.*back, there"):
        apply_rules(before, target_for(), rules, "test")


def _flat_layers(count: int) -> Graph:
    """A decoder of many layers in one graph, each spelled out."""
    builder = Builder()
    weights: list[Value] = []

    def weight(name: str, *shape: int) -> Value:
        weights.append(Value(f"@{name}", tensor(F32, *shape)))
        return weights[-1]

    first = Value("%x", tensor(F32, "T", 64))
    x = first
    for layer in range(count):
        square = builder.emit("mul", x, x)
        mean = builder.emit("mean", square, dims=(1,), keep=True)
        eps = builder.emit("full", shape=(), value=1e-5, dtype="f32")
        scale = builder.emit("rsqrt", builder.emit("add", mean, eps))
        normed = builder.emit("mul", builder.emit("mul", x, scale), weight(f"{layer}.norm", 64))
        gate = builder.emit("linear", normed, weight(f"{layer}.gate", 96, 64))
        up = builder.emit("linear", normed, weight(f"{layer}.up", 96, 64))
        silu = builder.emit("mul", gate, builder.emit("sigmoid", gate))
        middle = builder.emit("mul", silu, up)
        down = builder.emit("linear", middle, weight(f"{layer}.down", 64, 96))
        x = builder.emit("add", x, down)
    return Graph("flat", (first,), tuple(weights), ops=tuple(builder.ops), outputs=(x,))


def test_a_model_without_blocks_is_rewritten_in_good_time() -> None:
    module, target = as_module(_flat_layers(61)), target_for()
    start = time.process_time()
    for step in (raise_ops, canonicalize, merge_linears, seam, fuse):
        module = step(module, target)
    assert time.process_time() - start < 5
    kinds = [_kind(op) for op in module.main.ops]
    assert kinds == ["rms_norm", "linear", "silu_mul_halves", "linear_add"] * 61


def _kind(op: Op) -> str:
    return str(op.attr.get("kind", op.name))
