"""Tables of a placement: every choice reaches a slot that holds its expert, loads fall evenly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.ir.dtypes import BlockArray, parse_dtype, quantize
from metainfer.ir.ops import OPS
from metainfer.passes.placement import EMPTY, Placement, place
from metainfer.passes.placement_tables import route_table, slot_order, table_width

take_rows, route = OPS["take_rows"].reference, OPS["route"].reference


@st.composite
def placed(draw: st.DrawFn) -> tuple[np.ndarray, Placement]:
    experts, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    slots = -(-experts // ranks) + draw(st.integers(0, 3))
    counts = np.array(draw(st.lists(st.integers(0, 99), min_size=experts, max_size=experts)))
    return counts, place(counts, ranks, slots)[0]


@settings(deadline=None)
@given(placed(), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_every_choice_reaches_a_slot_that_holds_its_expert(
    case: tuple[np.ndarray, Placement], tokens: int, seed: int
) -> None:
    counts, placement = case
    table, replicas = route_table(placement, counts)
    order = slot_order(placement)
    ids = np.random.default_rng(seed).integers(-1, placement.num_experts + 1, (tokens, 3))
    slots = route(ids, table, replicas)
    known = (ids >= 0) & (ids < placement.num_experts)
    assert (order[slots[known]] == ids[known]).all()
    assert (slots[~known] == -1).all()
    # An empty slot repeats an expert, but nothing is sent there.
    assert (placement.array().ravel()[slots[known]] != EMPTY).all()


@settings(deadline=None)
@given(placed(), st.integers(1, 40))
def test_a_run_of_tokens_falls_evenly_on_replicas(
    case: tuple[np.ndarray, Placement], tokens: int
) -> None:
    counts, placement = case
    table, replicas = route_table(placement, counts)
    for expert in range(placement.num_experts):
        slots = route(np.full((tokens, 1), expert), table, replicas)
        share = np.unique(slots, return_counts=True)[1]
        assert len(share) == min(tokens, replicas[expert])
        assert share.max() - share.min() <= 1


def test_experts_compute_the_same_wherever_they_lie() -> None:
    """Placed, replicated weights and routed ids give the sums of the plain ones, bit for bit."""
    rng = np.random.default_rng(0)
    num, width, inner, tokens = 6, 8, 16, 9
    x = rng.standard_normal((tokens, width), np.float32)
    shares = rng.random((tokens, 2), np.float32)
    ids = rng.integers(0, num, (tokens, 2))
    shapes = ((num, inner, width), (num, inner, width), (num, width, inner))
    weights = [rng.standard_normal(shape, np.float32) for shape in shapes]
    counts = np.array([90, 4, 3, 2, 2, 1])
    placement = place(counts, 4, 3)[0]
    assert placement.replicas()[0] > 1
    order = slot_order(placement)
    moved = [take_rows(w, order) for w in weights]
    slots = route(ids, *route_table(placement, counts))
    # One token at a time: the order in which products are summed is that of numpy's matmul.
    for t in range(tokens):
        one = slice(t, t + 1)
        plain = OPS["experts"].reference(x[one], ids[one], shares[one], *weights)
        there = OPS["experts"].reference(x[one], slots[one], shares[one], *moved)
        np.testing.assert_allclose(there, plain, rtol=1e-6, atol=1e-6)


def test_first_replicas_of_heavy_experts_lie_on_different_ranks() -> None:
    counts = np.array([100, 100, 100, 100, 1, 1, 1, 1])
    placement = place(counts, 4, 6)[0]
    table, _ = route_table(placement, counts)
    assert len(set((table[:4, 0] // placement.slots_per_rank).tolist())) == 4


def test_tables_of_all_layers_can_be_of_one_width() -> None:
    counts = np.array([[90, 1, 1, 1], [1, 1, 1, 1]])
    placements = place(counts, 4, 2, replicas=3)
    width = table_width(placements)
    tables = [route_table(p, c, width)[0] for p, c in zip(placements, counts, strict=True)]
    assert {t.shape for t in tables} == {(4, width)}
    assert width == max(p.replicas().max() for p in placements)


@pytest.mark.parametrize("name", ["u4/32:f16+f16", "f8e4m3/8x8:f32", "i8/row:f32"])
def test_rows_of_a_block_format_are_taken_exactly(name: str) -> None:
    format_ = parse_dtype(name)
    x = np.random.default_rng(0).standard_normal((4, 16, 32), np.float32)
    whole = quantize(x, format_)  # type: ignore[arg-type]
    index = np.array([2, 0, 2, 3], np.int32)
    taken = take_rows(whole, index)
    assert isinstance(taken, BlockArray)
    assert np.array_equal(taken.dequantize(), whole.dequantize()[index])
