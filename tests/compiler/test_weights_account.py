"""The weights of a plan in bytes: what is shared is counted once, second copies are named."""

import pytest

from metainfer.backends.kernel import Efficiency, Kernel
from metainfer.backends.registry import installed
from metainfer.compiler.by_hand import parse_text, run_by_hand
from metainfer.compiler.capacity import Term, plan_capacity
from metainfer.compiler.cost import CostModel
from metainfer.hardware.load import load_machine
from metainfer.ir.flatten import flatten, parts_of, recipe_of
from metainfer.ir.graph import Module
from metainfer.ir.options import Options

TIED = """
module m {
  dim T in [1, 16]
  main(%x: i32[T]) {
    weights {
      @w : bf16[256,64]
    }
    %0 = embedding(%x, @w) : f32[T,64]
    %1 = linear(%0, @w) : f32[T,256]
    return %1
  }
}"""
TABLE = 256 * 64 * 2


def planned(text: str, phase: str = "decode") -> Module:
    return run_by_hand(parse_text(text, "test"), [], "cpu", phase, Options())[0]


def weights_of(modules: dict[str, Module]) -> Term:
    device = load_machine("cpu").device(0)
    capacity = plan_capacity(modules, device, installed(), Options(), max_context=16)
    return next(t for t in capacity.terms if t.name == "weights")


def test_a_tied_table_in_two_packings_is_two_copies() -> None:
    term = weights_of({"decode": planned(TIED)})
    assert term.bytes == 2 * TABLE
    assert (
        term.detail == f"2 tensors, packed; {TABLE:,} bytes of it second copies, packed otherwise"
    )


def test_phases_share_what_is_made_alike() -> None:
    modules = {phase: planned(TIED, phase) for phase in ("prefill", "decode")}
    assert weights_of(modules).bytes == 2 * TABLE


SPLIT = """
module m {
  dim T in [1, 16]
  load main {
    weights {
      @w : f32[32,64]
    }
    %0 = slice(@w) {dim = 0, start = 0, stop = 16} : f32[16,64]
    %1 = slice(@w) {dim = 0, start = 16, stop = 32} : f32[16,64]
    %2 = cast(%1) {dtype = "bf16"} : bf16[16,64]
    return %0, %1, %2
  }
  main(%x: f32[T,64]) {
    weights {
      @a : f32[16,64]
      @b : f32[16,64]
      @c : bf16[16,64]
    }
    %0 = linear(%x, @a) : f32[T,16]
    %1 = linear(%x, @b) : f32[T,16]
    %2 = linear(%x, @c) : f32[T,16]
    return %0, %1, %2
  }
}"""


@pytest.mark.parametrize(("one", "other", "same"), [("@a", "@b", False), ("@b", "@c", True)])
def test_slices_are_parts_of_their_own(one: str, other: str, same: bool) -> None:
    module = parse_text(SPLIT, "test")
    flat = flatten(module)
    recipes = [recipe_of(module, flat.weights[name]) for name in (one, other)]
    assert recipes[0] != recipes[1]
    assert (parts_of(recipes[0]) == parts_of(recipes[1])) == same


@pytest.mark.parametrize(
    ("rate", "basis"), [("", "analytic"), ("f32", "analytic"), ("f8e4m3", "analytic, by the rate")]
)
def test_a_rate_that_stands_in_for_another_is_named(rate: str, basis: str) -> None:
    device = load_machine("cpu").device(0)
    op = parse_text(TIED, "test").main.ops[1]
    kernel = Kernel("test.linear", "linear", "torch", efficiency=Efficiency(rate=rate))
    cost = CostModel(installed().layouts).kernel(kernel, op, device, {"T": 4})
    assert cost.basis.startswith(basis)
    if rate == "f8e4m3":
        assert cost.basis == f"analytic, by the rate of {device.rate(rate).dtype}"
