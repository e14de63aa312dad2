"""A router's product and choice in one launch: interpreted, for absent cards, on a GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from route_cases import Case, routed
from triton_groups import as_op
from triton_worker import CARDS, applies, check_compiles, check_interpreted, check_on_gpu

from metainfer.backends.triton.router import MOST_TOKENS, split_of
from metainfer.ir.dtypes import BF16
from metainfer.ir.graph import Op
from metainfer.ir.parser import parse_graph

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
NAME = "triton.linear_route"
# Experts that fill no power of two, few of them chosen, shares as the softmax gives them.
PLAIN = """graph g(%x: bf16[T,200], %w: bf16[60,200]) {
  %0 = linear(%x, %w) : bf16[T,60]
  %1 = cast(%0) {dtype = "f32"} : f32[T,60]
  %2 = softmax(%1) : f32[T,60]
  %3, %4 = topk(%2) {k = 4} : f32[T,4], i64[T,4]
  return %3, %4
}"""
PLACED = """graph g(%x: bf16[T,1024], %w: bf16[128,1024], %table: i32[128,5], %replicas: i32[128]) {
  %0 = linear(%x, %w) : bf16[T,128]
  %1 = cast(%0) {dtype = "f32"} : f32[T,128]
  %2 = softmax(%1) : f32[T,128]
  %3, %4 = topk(%2) {k = 8} : f32[T,8], i64[T,8]
  %5 = sum(%3) {dims = (1,), keep = true} : f32[T,1]
  %6 = div(%3, %5) : f32[T,8]
  %7 = route(%4, %table, %replicas) : i64[T,8]
  return %6, %7
}"""


def group(text: str, tokens: int) -> tuple[Op, list[Any]]:
    """A group and its data, scores of small whole numbers: exact in any order, with many ties."""
    op = as_op(parse_graph(text), "linear_route")
    x_value, w_value, *rest = op.operands
    op = replace(op, operands=(x_value, replace(w_value, name="@w"), *rest))
    rng = np.random.default_rng(tokens)
    x, w = (v.tensor.concrete({"T": tokens}) for v in op.operands[:2])
    data = [rng.integers(-1, 2, size=s).astype(BF16.numpy) for s in (x, w)]
    # As much of the inner dim as keeps scores within what bf16 holds exactly.
    data[0][:, 100:] = 0
    data[0][:, -1] = 1
    if len(op.operands) > 2:
        _, (_, *tables) = routed(Case(tokens, 8, 128, 5))
        data += tables
    return op, data


@pytest.mark.parametrize(("text", "tokens"), [(PLAIN, 1), (PLAIN, 19), (PLACED, 3)])
def test_choices_interpreted(text: str, tokens: int) -> None:
    op, data = group(text, tokens)
    check_interpreted(NAME, op, data, {"T": tokens})


def test_it_compiles_for_cards_that_are_not_here() -> None:
    check_compiles(NAME, group(PLACED, 1)[0], {"T": 64})


def test_programs_share_what_is_long() -> None:
    assert [split_of(128, n) for n in (2048, 1024, 64)] == [8, 4, 1]
    assert split_of(512, 7168) == 2


def test_the_weight_is_one_that_no_launch_writes() -> None:
    """Its head is read before the launch in front has ended."""
    op, _ = group(PLAIN, 1)
    made = replace(op, operands=(op.operands[0], replace(op.operands[1], name="%w")))
    (reason,) = applies(NAME, made, CARDS["1xh200"], {"T": (1, 1)})
    assert "operand 1 is a weight" in reason


def test_many_tokens_are_left_to_a_library() -> None:
    op, _ = group(PLAIN, 1)
    card = CARDS["1xh200"]
    assert not applies(NAME, op, card, {"T": (1, MOST_TOKENS)})
    (refusal,) = applies(NAME, op, card, {"T": (1, MOST_TOKENS + 1)})
    assert f"{MOST_TOKENS + 1} tokens" in refusal


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("tokens", [1, 19, 64, 200])
@pytest.mark.parametrize("text", [PLAIN, PLACED])
def test_choices_on_a_gpu(text: str, tokens: int) -> None:
    op, data = group(text, tokens)
    check_on_gpu(NAME, op, data, {"T": tokens})
