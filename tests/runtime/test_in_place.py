"""Residuals that stay where they are: which ones a plan finds, what that costs, that it runs."""

import numpy as np
import pytest
from group_runs import execute
from pass_oracle import example_for, parse_any

from metainfer.backends.registry import installed
from metainfer.compiler.predict import group_costs
from metainfer.hardware import load_machine
from metainfer.ir.flatten import flatten
from metainfer.ir.graph import Module
from metainfer.runtime.in_place import in_place

# Two products, each added to a residual; LEAVE is what the graph returns.
TEXT = """module m {
  dim T in [1, 4096]
  main(%x: TYPE[T,WIDE], @v: TYPE[WIDE,WIDE], @w: TYPE[WIDE,WIDE]) {
    %0 = relu(%x) : TYPE[T,WIDE] by {else: torch.relu}
    %1 = fused[linear_add](%x, @v, FIRST) : TYPE[T,WIDE] by {T <= 16: SMALL, else: LARGE} GROUP
    %2 = fused[linear_add](%x, @w, %1) : TYPE[T,WIDE] by {else: LARGE} GROUP
    return LEAVE
  }
}"""
GROUP = """body (%x: TYPE[T,WIDE], %w: TYPE[WIDE,WIDE], %r: TYPE[T,WIDE]) {
      %0 = linear(%x, %w) : TYPE[T,WIDE]
      %1 = add(%0, %r) : TYPE[T,WIDE]
      return %1
    }"""


def module(
    dtype: str, first: str = "%0", leave: str = "%2", small: str = "", width: int = 4096
) -> Module:
    large = {"f32": "torch.linear_add_f32", "bf16": "cuda.linear_add_bf16"}[dtype]
    text = TEXT.replace("GROUP", GROUP).replace("TYPE", dtype).replace("FIRST", first)
    text = text.replace("SMALL", small or large).replace("LARGE", large)
    return parse_any(text.replace("LEAVE", leave).replace("WIDE", str(width)))


def found(made: Module) -> dict[str, str]:
    return in_place(flatten(made), installed())


def test_a_chain_of_residuals_stays_where_the_first_one_is() -> None:
    assert found(module("f32")) == {"%1": "%0", "%2": "%1"}
    assert found(module("f32", first="%x")) == {"%2": "%1"}  # the caller's
    assert found(module("f32", leave="%2, %1")) == {"%1": "%0"}


def test_every_row_of_a_table_must_allow_it() -> None:
    assert found(module("f32", small="cpu.linear_f32_add")) == {"%1": "%0", "%2": "%1"}
    assert found(module("f32", small="torch.relu")) == {"%2": "%1"}


@pytest.mark.parametrize("leave", ["%2", "%2, %1", "%0, %2"])
def test_numbers_are_those_of_the_interpreter(leave: str) -> None:
    made = module("f32", leave=leave, width=64)
    for tokens in (1, 17):
        example = example_for(made, {"T": tokens})
        wanted, got = example.run(made), execute(made, example, {"T": tokens})
        for a, b in zip(got.outputs, wanted.outputs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_a_residual_that_is_copied_costs_a_launch_and_two_passes() -> None:
    machine, env = load_machine("1xh200"), {"T": 4096}
    device = machine.device(0)

    def last(first: str) -> float:
        made = module("bf16", first=first)
        costs = group_costs(made, machine, installed(), env)
        return costs[1].cost.seconds

    kernel = installed().kernels.get("cuda.linear_add_bf16")
    passes = 2 * 4096 * 4096 * 2 / (device.memory_bandwidth.sustained * kernel.efficiency.memory)
    extra = last("%x") - last("%0")
    assert extra == pytest.approx(passes + device.kernel_floor_us * 1e-6)
