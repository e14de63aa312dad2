"""Where a plan's choices of experts stand in memory, and how they are counted."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from metainfer.ir.errors import HistogramError, PlanError, Unsupported
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Value
from metainfer.ir.parser import parse_module
from metainfer.runtime.executor import Observer
from metainfer.runtime.record import RecordingRunner, RoutedLayer, routed_layers

HEAD = """
module f {
  dim T in [1, 8]
  block layer(%x: f32[T,4]) {
    weights {
      @mlp.gate.weight : f32[6,4]
      @mlp.experts.*.gate_proj.weight : f32[ROWS,8,4]
      @mlp.experts.*.up_proj.weight : f32[ROWS,8,4]
      @mlp.experts.*.down_proj.weight : f32[ROWS,4,8]
      @mlp.experts.table : i32[6,2]
      @mlp.experts.replicas : i32[6]
    }
    %0 = linear(%x, @mlp.gate.weight) : f32[T,6]
    %1, %2 = topk(%0) {k = 2} : f32[T,2], i64[T,2]
"""
EXPERTS = """experts(%x, IDS, %1, @mlp.experts.*.gate_proj.weight,
      @mlp.experts.*.up_proj.weight, @mlp.experts.*.down_proj.weight) : f32[T,4]
"""
TAIL = """
    return RESULT
  }
  main(%x: f32[T,4]) {
    %0 = call layer(%x) {prefix = "model.layers.0."} : f32[T,4]
    %1 = call layer(%0) {prefix = "model.layers.1."} : f32[T,4]
    return %1
  }
}
"""
ROUTED = """
    %3 = route(%2, @mlp.experts.table, @mlp.experts.replicas) : i64[T,2]
    %4 = """


def found(body: str, ids: str, result: str, rows: int = 6) -> tuple[RoutedLayer, ...]:
    text = HEAD.replace("ROWS", str(rows)) + body.replace("IDS", ids) + TAIL
    return routed_layers(flatten(parse_module(text.replace("RESULT", result))))


NAMES = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def test_choices_are_read_where_the_experts_read_them() -> None:
    layers = found("    %3 = " + EXPERTS, "%2", "%3")
    assert [layer.name for layer in layers] == NAMES
    assert [layer.num_experts for layer in layers] == [6, 6]
    # Flat names: linear %0, topk %1 %2, experts %3; the second call goes on from there.
    assert [(layer.reader, layer.ids.name) for layer in layers] == [("%3", "%2"), ("%7", "%6")]


def test_choices_are_read_before_a_placement_renumbers_them() -> None:
    layers = found(ROUTED + EXPERTS, "%3", "%4", rows=8)
    assert [layer.name for layer in layers] == NAMES
    assert [layer.num_experts for layer in layers] == [6, 6]
    assert [(layer.reader, layer.ids.name) for layer in layers] == [("%3", "%2"), ("%8", "%7")]


def test_experts_inside_a_group_read_its_operand() -> None:
    group = """    %3 = fused[experts_add](%x, %2, %1, @mlp.experts.*.gate_proj.weight,
      @mlp.experts.*.up_proj.weight, @mlp.experts.*.down_proj.weight) : f32[T,4]
      body (%a: f32[T,4], %i: i64[T,2], %w: f32[T,2], @g: f32[6,8,4], @u: f32[6,8,4],
        @d: f32[6,4,8]) {
        %0 = experts(%a, %i, %w, @g, @u, @d) : f32[T,4]
        %1 = add(%0, %a) : f32[T,4]
        return %1
      }
"""
    layers = found(group, "", "%3")
    assert [layer.name for layer in layers] == NAMES
    assert [(layer.reader, layer.ids.name) for layer in layers] == [("%3", "%2"), ("%7", "%6")]


def test_choices_that_never_leave_a_group_are_refused() -> None:
    group = """    %3 = fused[route_experts](%x, %0, %1, @mlp.experts.*.gate_proj.weight,
      @mlp.experts.*.up_proj.weight, @mlp.experts.*.down_proj.weight) : f32[T,4]
      body (%a: f32[T,4], %s: f32[T,6], %w: f32[T,2], @g: f32[6,8,4], @u: f32[6,8,4],
        @d: f32[6,4,8]) {
        %0, %1 = topk(%s) {k = 2} : f32[T,2], i64[T,2]
        %2 = experts(%a, %1, %w, @g, @u, @d) : f32[T,4]
        return %2
      }
"""
    with pytest.raises(Unsupported, match=r"choices of model.layers.0.mlp.experts never leave"):
        found(group, "", "%3")


def test_choices_that_leave_a_group_as_slots_are_refused() -> None:
    group = """    %3 = linear(%x, @mlp.gate.weight) : f32[T,6]
    %4, %5 = fused[route_experts](%3, @mlp.experts.table, @mlp.experts.replicas)
      : f32[T,2], i64[T,2]
      body (%s: f32[T,6], %t: i32[6,2], %n: i32[6]) {
        %0, %1 = topk(%s) {k = 2} : f32[T,2], i64[T,2]
        %2 = route(%1, %t, %n) : i64[T,2]
        return %0, %2
      }
    %6 = """
    with pytest.raises(Unsupported, match="leave a fused group as slots"):
        found(group + EXPERTS, "%5", "%6", rows=8)


class Fake:
    """Shows the choices it is given, one row a token, before every reader."""

    max_tokens, max_sequences, max_context = 8, 2, 16
    page_size, num_pages, vocab_size, plan_hash = 4, 9, 3, "hash"

    def __init__(self, ids: list[list[int]]) -> None:
        self.ids = torch.tensor(ids)

    def observe(
        self,
        phase: str,
        tokens: np.ndarray,
        step: Mapping[str, np.ndarray],
        watched: Mapping[str, Value],
        seen: Observer,
    ) -> np.ndarray:
        for reader in watched:
            seen(reader, self.ids)
        return np.zeros((1, 3), np.float32)


def step(valid: int) -> dict[str, Any]:
    return {"num_valid": np.array([valid, 1], np.int32)}


def test_choices_are_counted_without_padding_and_missing_experts() -> None:
    layers = found("    %3 = " + EXPERTS, "%2", "%3")
    runner = RecordingRunner(Fake([[0, 5], [5, -1], [5, 6], [1, 1]]), {"prefill": layers})
    runner.run("prefill", np.zeros(4, np.int32), step(3))
    runner.run("prefill", np.zeros(4, np.int32), step(1))
    histogram = runner.histogram("m")
    assert runner.num_tokens == 4
    assert histogram.layers == tuple(NAMES)
    assert histogram.counts == ((2, 0, 0, 0, 0, 4),) * 2


def test_nothing_recorded_is_no_histogram() -> None:
    runner = RecordingRunner(Fake([]), {"decode": found("    %3 = " + EXPERTS, "%2", "%3")})
    with pytest.raises(HistogramError, match="has no counts at all"):
        runner.histogram("m")


def test_plans_without_experts_are_refused() -> None:
    with pytest.raises(PlanError, match="no layers with experts"):
        RecordingRunner(Fake([]), {"prefill": (), "decode": ()})
