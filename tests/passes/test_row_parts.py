"""Rows in parts: which ops may be cut, and that a cut graph computes what the whole one does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pass_oracle import assert_same_numbers, parse_any
from ranks import ManyRanks, OneRank, as_ranks, rank_target

from metainfer.ir.dims import dim
from metainfer.ir.errors import Unsupported
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Choice, Module
from metainfer.ir.verify import verify_module
from metainfer.passes.row_parts import Parts, is_row_op, row_ops, split
from metainfer.runtime.record import routed_layers

MLP = """
graph f(%x: f32[T,16], @norm: f32[16], @gate: f32[24,16], @up: f32[24,16], @down: f32[16,24]) {
  %0 = rms_norm(%x, @norm) {eps = 1e-6} : f32[T,16]
  %1 = linear(%0, @gate) : f32[T,24]
  %2 = linear(%0, @up) : f32[T,24]
  %3 = silu(%1) : f32[T,24]
  %4 = mul(%3, %2) : f32[T,24]
  %5 = linear(%4, @down) : f32[T,16]
  %6 = add(%5, %x) : f32[T,16]
  return %6
}
"""
MOE = """
graph f(%x: f32[T,16], @router: f32[8,16], @gate: f32[8,12,16], @up: f32[8,12,16],
        @down: f32[8,16,12]) {
  %0 = linear(%x, @router) : f32[T,8]
  %1 = softmax(%0) {dim = 1} : f32[T,8]
  %2, %3 = topk(%1) {k = 3} : f32[T,3], i64[T,3]
  %4 = experts(%x, %3, %2, @gate, @up, @down) : f32[T,16]
  %5 = add(%x, %4) : f32[T,16]
  return %5
}
"""
TP, EP = ((("tp", 4),), ()), ((("dp", 4),), ("dp",))
CASES = [(MLP, *TP), (MOE, *TP), (MOE, *EP)]


@given(parts=st.integers(1, 4), grain=st.integers(1, 5), rows=st.integers(0, 60))
def test_parts_hold_every_row_once(parts: int, grain: int, rows: int) -> None:
    cut, env = Parts("T", parts, grain), {"T": rows}
    at = 0
    for part in range(parts):
        assert cut.start(part).evaluate(env) == at
        size = cut.size(part).evaluate(env)
        assert size >= 0
        assert part == 0 or size % grain == 0
        at += size
    assert at == rows
    assert sum((cut.size(p) for p in range(parts)), start=dim(0)) == dim("T")
    if rows < cut.least_rows:
        assert cut.size(0).evaluate(env) == rows


@given(parts=st.integers(2, 4), grain=st.integers(1, 6), limit=st.integers(1, 40))
def test_a_kernels_limit_is_asked_of_the_step(parts: int, grain: int, limit: int) -> None:
    cut = Parts("T", parts, grain)
    for part in range(1, parts):
        most = cut.limit(part, limit)
        assert cut.size(part).evaluate({"T": most}) <= limit
        assert cut.size(part).evaluate({"T": most + 1}) > limit


@pytest.mark.parametrize(("text", "mesh", "experts"), CASES)
@given(
    parts=st.integers(2, 3), grain=st.integers(1, 2), rows=st.integers(1, 7), seed=st.integers(0, 9)
)
def test_ranks_compute_the_same_in_parts(
    text: str, mesh: tuple[tuple[str, int], ...], experts: tuple[str, ...], parts: int, grain: int,
    rows: int, seed: int,
) -> None:  # fmt: skip
    module = parse_any(text)
    local = as_ranks(module, rank_target(mesh, experts))
    graph, cut = local.main, Parts("T", parts, grain)
    region = row_ops(graph, "T")
    assert len(region) >= len(graph.ops) - 1
    ops = split(graph, region, cut, copied=bool(seed % 2))
    assert ops is not None
    made = local.with_graph(replace(graph, ops=ops))
    verify_module(made)
    rng = np.random.default_rng(seed)
    shapes = {w.name[1:]: w.tensor.concrete({}) for w in module.main.weights}
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    replicas = dict(mesh).get("dp", 1)
    inputs = [rng.standard_normal((rows, 16)).astype(np.float32) for _ in range(replicas)]
    one = OneRank(module, weights.__getitem__, 1, 4)
    got = ManyRanks(made, weights.__getitem__, 1, 4).run([(x, {}) for x in inputs])
    for x, result in zip(inputs, got, strict=True):
        np.testing.assert_allclose(result, one.run(x, {}), atol=1e-4, rtol=1e-4)


ALONE = [
    ("%0 = linear(%x, @w) : f32[T,8]", True),
    ("%0 = softmax(%x) {dim = 1} : f32[T,8]", True),
    ("%0 = softmax(%x) {dim = 0} : f32[T,8]", False),
    ("%0 = cumsum(%x) {dim = 0} : f32[T,8]", False),
    ("%0 = sum(%x) {dims = (1,), keep = true} : f32[T,1]", True),
    ("%0 = sum(%x) {dims = (0,)} : f32[8]", False),
    ("%0 = reshape(%x) {shape = (dim(T), 2, 4)} : f32[T,2,4]", True),
    ("%0 = reshape(%x) {shape = (dim(8*T),)} : f32[8*T]", True),
    ("%0 = transpose(%x) {perm = (1, 0)} : f32[8,T]", False),
    ("%0 = concat(%x, %x) {dim = 1} : f32[T,16]", True),
    ("%0 = concat(%x, %x) {dim = 0} : f32[2*T,8]", False),
    ("%0 = matmul(%x, %x) {transpose_b = true} : f32[T,T]", False),
    ("%0 = slice(%x) {dim = 1, start = 2, stop = 4} : f32[T,2]", True),
    ("%0 = slice(%x) {dim = 0, start = 0, stop = 1} : f32[1,8]", False),
    ("%0 = gather(%x, %r) : f32[T,8]", False),
    ("%0 = all_reduce(%x) {axis = \"tp\", ranks = 2} : f32[T,8]", True),
    ("%0 = all_gather(%x) {axis = \"tp\", dim = 1, ranks = 2} : f32[T,16]", True),
    ("%0 = all_to_all(%x) {axis = \"tp\", ranks = 2, source = 0, target = 1} : f32[2*T,4]", False),
    ("%0 = take_shard(%x) {axis = \"tp\", dim = 1, ranks = 2} : f32[T,4]", True),
    ("%0 = iota() {dtype = \"i32\", size = dim(T)} : i32[T]", False),
]  # fmt: skip


@pytest.mark.parametrize(("line", "wanted"), ALONE)
def test_which_ops_may_be_cut(line: str, wanted: bool) -> None:
    text = f"graph f(%x: f32[T,8], %r: i32[T], @w: f32[8,8]) {{\n  {line}\n  return %0\n}}"
    module = parse_any(text)
    verify_module(module)
    assert is_row_op(module.main.ops[0], "T") == wanted


def test_a_fused_group_is_cut_if_all_of_it_may_be() -> None:
    text = """
    graph f(%x: f32[T,8], @w: f32[8]) {
      %0 = fused[a](%x, @w) : f32[T,8] body (%x: f32[T,8], %w: f32[8]) {
        %0 = add(%x, %x) : f32[T,8]
        %1 = NORM(%0, %w) {eps = 1e-6} : f32[T,8]
        return %1
      }
      return %0
    }
    """
    good = parse_any(text.replace("NORM", "rms_norm"))
    assert is_row_op(good.main.ops[0], "T")
    bad = parse_any(text.replace("NORM(%0, %w) {eps = 1e-6}", "cumsum(%0) {dim = 0}"))
    assert not is_row_op(bad.main.ops[0], "T")


def cut_of(module: Module, region: set[int], **rest: int) -> tuple[str, ...] | None:
    ops = split(module.main, region, Parts("T", 2, rest.get("grain", 1)), copied=False)
    return None if ops is None else tuple(f"{op.results[0].name} {op.name}" for op in ops)


def test_parts_are_joined_where_something_reads_the_whole() -> None:
    module = parse_any(MLP)
    assert cut_of(module, {5}) == (
        "%0 rms_norm", "%1 linear", "%2 linear", "%3 silu", "%4 mul",
        "%4/0 slice", "%4/1 slice", "%5/0 linear", "%5/1 linear", "%5 concat", "%6 add",
    )  # fmt: skip


def test_rows_that_ranks_gathered_stay_within_the_region() -> None:
    local = as_ranks(parse_any(MOE), rank_target(*EP))
    gathers = {i for i, op in enumerate(local.main.ops) if op.name == "all_gather"}
    assert gathers
    # Parts of gathered rows lie in another order than the rows gathered whole.
    assert cut_of(local, gathers) is None
    assert cut_of(local, set(row_ops(local.main, "T"))) is not None


def test_routing_is_not_recorded_from_parts() -> None:
    text = MOE
    for name in ("gate", "up", "down"):
        text = text.replace(f"@{name}", f"@layers.0.mlp.experts.*.{name}_proj.weight")
    module = parse_any(text)
    assert len(routed_layers(flatten(module))) == 1
    ops = split(module.main, row_ops(module.main, "T"), Parts("T", 2, 1), copied=False)
    assert ops is not None
    cut = module.with_graph(replace(module.main, ops=ops))
    with pytest.raises(Unsupported, match="cut into parts") as caught:
        routed_layers(flatten(cut))
    assert "--no-overlap" in caught.value.advice


def test_tables_of_kernels_are_cut_with_the_rows() -> None:
    module = parse_any(MLP)
    table = (Choice("a", "T", 16), Choice("b", "T", 24), Choice("c"))
    ops = [*module.main.ops]
    ops[5] = replace(ops[5], choices=table)
    graph = replace(module.main, ops=tuple(ops))
    made = split(graph, {5}, Parts("T", 2, 16), copied=False)
    assert made is not None
    tables = [op.choices for op in made if op.name == "linear" and op.choices]
    # 16 rows are in the second part from 32 on, 32 rows from 64 on.
    assert tables == [(Choice("a", "T", 63), Choice("c"))] * 2


ROUNDED = """
graph f(%x: f32[T,128], @up: f8e4m3/128x128:f32[128,128]) {
  %0 = silu(%x) : f32[T,128]
  %1 = quantize(%0) {format = "f8e4m3/128:f32"} : f8e4m3/128:f32[T,128]
  %2 = linear(%1, @up) {dtype = "f32"} : f32[T,128]
  return %2
}
"""


def test_codes_do_not_cross_the_border_of_a_region() -> None:
    """Codes and scales lie apart, so a cut runs before the rounding or after the product."""
    graph = parse_any(ROUNDED).main
    parts = Parts("T", 2, 4)
    assert row_ops(graph, "T") == {0, 1, 2}
    assert split(graph, {0, 1}, parts, copied=False) is None
    assert split(graph, {2}, parts, copied=False) is None
    cut = split(graph, {1, 2}, parts, copied=False)
    assert cut is not None
    module = parse_any(ROUNDED)
    after = module.with_graph(replace(graph, ops=cut))
    verify_module(after)
    assert_same_numbers(module, after)
