"""The verifier refuses what no pass may make, naming the op and its line."""

from dataclasses import replace

import pytest

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Choice, Module
from metainfer.ir.parser import parse_graph, parse_module
from metainfer.ir.verify import verify_graph, verify_module

GOOD = """
graph f(%x: f32[T,8], @w: f32[8,8]) {
  %0 = linear(%x, @w) : f32[T,8] loc("models/m.py":7)
  %1 = silu(%0) : f32[T,8]
  return %1
}
"""
STEP = """
module m {
  dim T in [1, 8]
  dim B in [1, 4]
  dim P in [1, 4]
  dim R in [1, 4]
  step
  block layer(%x: f32[T,2,4]) {
    states {
      $kv : pages(k: f32[2,4], v: f32[2,4]) per token page 4
    }
    %0 = kv_write($kv, %x, %x, step.slots) : pages(k: f32[2,4], v: f32[2,4]) per token page 4
    %1 = attention(%x, %0, step.starts, step.lengths, step.pages) : f32[T,2,4]
    return %1 states %0
  }
  main(%x: f32[T,2,4]) {
    %0 = call layer(%x) {prefix = "a."} : f32[T,2,4]
    %1 = call layer(%0) {prefix = "b."} : f32[T,2,4]
    return %1
  }
}
"""


def test_good_graphs_pass() -> None:
    verify_graph(parse_graph(GOOD))
    verify_module(parse_module(STEP))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("= silu(%0) : f32[T,8]", "= silu(%0) : f32[T,4]", "%1 is f32[T,8], declared f32[T,4]"),
        ("%1 = silu(%0) : f32[T,8]", "%1 = silu(%0) : bf16[T,8]", "declared bf16[T,8]"),
        ("@w: f32[8,8]", "@w: f32[8,4]", "inner sizes differ, 8 and 4"),
        ("silu(%0)", "sillu(%0)", "unknown op 'sillu'"),
        ("silu(%0)", "silu(%0) {slope = 2}", "silu has no attribute 'slope'"),
        ("silu(%0)", "silu(%0, %x)", "silu(x) got 2 operands"),
    ],
)  # fmt: skip
def test_wrong_ops_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(TypeMismatch) as caught:
        verify_graph(parse_graph(GOOD.replace(old, new)))
    assert message in str(caught.value)


def test_the_model_line_is_named() -> None:
    with pytest.raises(TypeMismatch, match=r"models/m.py:7"):
        verify_graph(parse_graph(GOOD.replace("@w: f32[8,8]", "@w: f32[8,4]")))


def test_order_and_names() -> None:
    graph = parse_graph(GOOD)
    with pytest.raises(TypeMismatch, match=r"%0 is used before it is defined"):
        verify_graph(replace(graph, ops=graph.ops[::-1]))
    with pytest.raises(TypeMismatch, match=r"%0 is defined twice"):
        verify_graph(replace(graph, ops=(graph.ops[0], *graph.ops)))


def test_a_state_is_a_chain() -> None:
    """Reading the old version after the write would see what an in-place write left there."""
    text = STEP.replace("attention(%x, %0,", "attention(%x, $kv,")
    with pytest.raises(TypeMismatch, match=r"\$kv is read after kv_write wrote over it"):
        verify_module(parse_module(text))


def test_calls_must_fit_their_block() -> None:
    with pytest.raises(TypeMismatch, match="call of 'other', which is no block above"):
        verify_module(parse_module(STEP.replace("%1 = call layer(%0)", "%1 = call other(%0)")))
    with pytest.raises(TypeMismatch, match="takes 1 operands, got 2"):
        verify_module(parse_module(STEP.replace("%1 = call layer(%0)", "%1 = call layer(%0, %x)")))


def test_a_module_without_step_has_no_fields() -> None:
    module = replace(parse_module(STEP), has_step=False)
    with pytest.raises(TypeMismatch, match="is no field of this module's step record"):
        verify_module(module)


def test_kernel_tables_end_in_an_else() -> None:
    graph = parse_graph(GOOD)

    def with_choices(*choices: Choice) -> None:
        op = replace(graph.ops[1], choices=choices)
        verify_graph(replace(graph, ops=(graph.ops[0], op)))

    with_choices(Choice("a", "T", 4), Choice("b", "T", 16), Choice("c"))
    with pytest.raises(TypeMismatch, match="must end in an else"):
        with_choices(Choice("a", "T", 4))
    with pytest.raises(TypeMismatch, match="must ascend"):
        with_choices(Choice("a", "T", 16), Choice("b", "T", 4), Choice("c"))


def test_undeclared_sizes_are_refused() -> None:
    module = parse_module(STEP)
    fewer = Module(module.name, module.symbols[1:], graphs=module.graphs, has_step=True)
    with pytest.raises(TypeMismatch, match="uses undeclared sizes: T"):
        verify_module(fewer)


def test_the_body_of_a_group_must_fit() -> None:
    text = """
graph f(%x: f32[T,8], %r: f32[T,8], @w: f32[8]) {
  %0, %1 = fused[add_rms_norm](%x, %r, @w) : f32[T,8], f32[T,8] body (%x: f32[T,8], %r: f32[T,8], %w: f32[8]) {
    %0 = add(%x, %r) : f32[T,8]
    %1 = rms_norm(%0, %w) {eps = 1e-06} : f32[T,8]
    return %0, %1
  }
  return %1
}
"""  # noqa: E501
    graph = parse_graph(text)
    verify_graph(graph)
    op = graph.ops[0]
    with pytest.raises(TypeMismatch, match="takes 3 operands, got 2"):
        verify_graph(replace(graph, ops=(replace(op, operands=op.operands[:2]),)))
    assert op.body is not None
    fewer = replace(op.body, outputs=op.body.outputs[:1])
    with pytest.raises(TypeMismatch, match="makes 1 results, 2 are named"):
        verify_graph(replace(graph, ops=(replace(op, body=fewer),)))
