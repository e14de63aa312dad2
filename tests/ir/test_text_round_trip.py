"""``parse(print(x)) == x`` for everything that has a text."""

from dataclasses import replace

import pytest
import strategies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import BF16, F32
from metainfer.ir.graph import Choice, Graph, Module, Op, Source, Value
from metainfer.ir.naming import canonical_names
from metainfer.ir.parser import parse_graph, parse_module
from metainfer.ir.printer import print_graph, print_module, print_op, print_op_with_caret
from metainfer.ir.types import Type, tensor

SLOW = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

MODULE = """\
module smollm2 {
  mesh (pp=1, tp=2)
  dim T in [1, 8192]
  step
  load layer {
    weights {
      @self_attn.q_proj.weight : bf16[576,576]
    }
    %0 = quantize(@self_attn.q_proj.weight) {format = "i8/32:f16"} : i8/32:f16[576,576]
    return %0
  }
  block layer(%x: bf16[T,576], %k: bf16[T,3,64] @ (tp=S1)) {
    weights {
      @norm1 : bf16[576]
      @"odd name" : u4/32:f16+f16[576,576] @ (ep=partial, tp=S0) as "cpu.u4g32_n8"
    }
    states {
      $kv : pages(k: bf16[3,64], v: bf16[3,64]) per token page 16
    }
    %0 = rms_norm(%x, @norm1) {eps = 1e-05} : bf16[T,576] loc("models/decoder.py":41)
    %1, %2 = fused[add_rms_norm](%x, %0, @norm1) {eps = 1e-05} : bf16[T,576], bf16[T,576] stream 1 \
by {T <= 16: cpu.a, else: torch.b} body (%a: bf16[T,576], %b: bf16[T,576], @norm1: bf16[576]) {
      %0 = add(%a, %b) : bf16[T,576]
      %1 = rms_norm(%0, @norm1) {eps = 1e-05} : bf16[T,576]
      return %0, %1
    }
    %3 = kv_write($kv, %k, %k, step.slots) : pages(k: bf16[3,64], v: bf16[3,64]) per token page 16
    barrier()
    return %1 states %3
  }
  main(%tokens: i32[T], %k: bf16[T,3,64] @ (tp=S1)) {
    weights {
      @embed : bf16[49152,576]
    }
    %0 = embedding(%tokens, @embed) {pad = dim(2*T+1), scale = -inf} : bf16[T,576]
    %1 = call layer(%0, %k) {bind = (("next_norm", "model.layers.1.norm1"),), prefix = "model."} \
: bf16[T,576]
    return %1
  }
}
"""


@SLOW
@given(strategies.modules())
def test_a_module_is_read_back_equal(module: Module) -> None:
    text = print_module(module)
    again = parse_module(text)
    assert again == module
    # Equality of values takes 1 for 1.0 and for true; equality of text does not.
    assert print_module(again) == text


@SLOW
@given(strategies.graphs())
def test_a_graph_is_read_back_equal(graph: Graph) -> None:
    text = print_graph(graph)
    again = parse_graph(text)
    assert again == graph
    assert print_graph(again) == text


@given(strategies.dims())
def test_a_size_is_read_back_equal(size: Dim) -> None:
    graph = parse_graph(f"graph f(%x: f32[{size}]) {{ return }}")
    assert graph.inputs[0].tensor.shape == (size,)


@given(strategies.types())
def test_the_types_own_text_is_that_of_the_printer_where_names_are_plain(type_: Type) -> None:
    printed = print_graph(Graph("f", inputs=(Value("%x", type_),)))
    assert parse_graph(printed).inputs[0].type == type_
    if '"' not in printed:
        assert printed == f"graph f(%x: {type_}) {{\n  return\n}}\n"


def test_the_text_of_a_module_is_canonical() -> None:
    module = parse_module(MODULE)
    assert print_module(module) == MODULE
    block, main = module.graphs
    assert [v.name for v in block.weights] == ["@norm1", "@odd name"]
    fused = block.ops[1]
    assert fused.attr == {"eps": 1e-05, "kind": "add_rms_norm"}
    assert fused.choices == (Choice("cpu.a", "T", 16), Choice("torch.b"))
    assert fused.body is not None
    assert [v.name for v in fused.body.inputs] == ["%a", "%b", "@norm1"]
    assert fused.body.weights == ()
    assert block.ops[0].source == Source("models/decoder.py", 41)
    assert main.ops[0].attr["pad"] == dim("T") * 2 + 1
    assert main.ops[1].attr["bind"] == (("next_norm", "model.layers.1.norm1"),)
    assert module.has_step
    assert module.mesh.axes == (("pp", 1), ("tp", 2))


def test_space_and_comments_are_free() -> None:
    tight = "graph f(%x:f32[T],@w:i8/32:f16[T,64]){%0=f(%x,@w){a=(1)}:f32[T]return %0}"
    loose = """
      graph f ( %x : f32[ T ] ,   # "a comment"
                @w : i8/32:f16[ T , 64 ] )
      { %0 = f ( %x , @w ) { a = ( 1 , ) }
             : f32[T]
        return %0 } # end"""
    assert parse_graph(tight) == parse_graph(loose)
    assert parse_graph(tight).weights[0].name == "@w"


@pytest.mark.parametrize("name", ["a:b", "a/b:0", "x.y-z:w/v", "f32:f32"])
def test_a_colon_may_stand_in_a_bare_name(name: str) -> None:
    graph = parse_graph(f"graph f(%{name}: f32[4], @{name}:f32[4]) {{ return %{name} }}")
    assert graph.inputs[0].name == f"%{name}"
    assert graph.weights[0].name == f"@{name}"


def test_precedence_of_sizes() -> None:
    t = dim("T")
    texts = {
        "-T//4": (t // 4) * -1,
        "(-T)//4": (t * -1) // 4,
        "2*T//4": (t * 2) // 4,
        "2*(T//4)": (t // 4) * 2,
        "T-1-1": t - 2,
        "T-(1-1)": t,
        "ceildiv(T+1,4)//2": (t + 1).ceildiv(4) // 2,
        "3*(T+1)": t * 3 + 3,
    }
    for text, size in texts.items():
        graph = parse_graph(f"graph f(%x: f32[{text}]) {{ return }}")
        assert graph.inputs[0].tensor.shape == (size,), text


def test_an_op_prints_on_one_line_with_a_caret() -> None:
    fused = parse_module(MODULE).graphs[0].ops[1]
    text = print_op(fused)
    assert "\n" not in text
    assert text.endswith("else: torch.b} body {...}")
    line, carets = print_op_with_caret(fused, 2).split("\n")
    assert line == text
    assert line[carets.index("^") : carets.rindex("^") + 1] == "@norm1"
    assert print_op_with_caret(fused, 0).split("\n")[1].index("^") == text.index("%x")


@SLOW
@given(strategies.graphs(), st.data())
def test_canonical_names_forget_the_names_of_computed_values(
    graph: Graph, data: st.DataObject
) -> None:
    canonical = canonical_names(graph)
    assert canonical_names(canonical) == canonical
    order = data.draw(st.permutations(range(sum(len(op.results) for op in graph.ops))))
    assert canonical_names(_renamed(graph, order)) == canonical
    assert canonical.inputs == graph.inputs
    assert parse_graph(print_graph(canonical)) == canonical


def _renamed(graph: Graph, order: list[int]) -> Graph:
    """Give computed values the names %other0, %other1 ... in some order."""
    new: dict[str, Value] = {}
    for op in graph.ops:
        for value in op.results:
            new[value.name] = Value(f"%other {order[len(new)]}", value.type)

    def swap(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(new.get(v.name, v) for v in values)

    def waits(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new[name].name if name in new else name for name in names)

    ops = tuple(
        replace(
            op, operands=swap(op.operands), results=swap(op.results), after=waits(op.after)
        )
        for op in graph.ops
    )  # fmt: skip
    return replace(
        graph, ops=ops, outputs=swap(graph.outputs), state_outputs=swap(graph.state_outputs)
    )


def test_canonical_names_skip_those_of_inputs_and_enter_bodies() -> None:
    graph = parse_graph("""
      graph f(%1: f32[4]) {
        %y = fused[g](%1) : f32[4] body (%a: f32[4]) { %z = copy(%a) : f32[4] return %z }
        %q = copy(%y) : f32[4]
        return %q, %1
      }""")
    assert print_graph(canonical_names(graph)) == (
        "graph f(%1: f32[4]) {\n"
        "  %0 = fused[g](%1) : f32[4] body (%a: f32[4]) {\n"
        "    %0 = copy(%a) : f32[4]\n"
        "    return %0\n"
        "  }\n"
        "  %2 = copy(%0) : f32[4]\n"
        "  return %2, %1\n"
        "}\n"
    )


@pytest.mark.parametrize("name", ["step", "main", "load", "block", "dim", "mesh", "stream", "by"])
@pytest.mark.parametrize("behind", ["body () { return }", "stream 2", "{w = ()}", ""])
def test_an_op_named_by_a_word_of_the_grammar_is_read_back(name: str, behind: str) -> None:
    # Behind a body, what begins a part of a module could follow, too.
    text = f'graph f(%a: f32[4]) {{ before() {behind} "{name}"() return %a }}'
    graph = parse_graph(text)
    assert graph.ops[1].name == name
    assert parse_graph(print_graph(graph)) == graph


def test_a_thousand_ops_are_read_back() -> None:
    x = Value("%x", tensor(BF16, "T", 576))
    ops = []
    last = x
    for i in range(1000):
        made = Value(f"%{i}", tensor(F32, "T", 576))
        ops.append(Op("add", (last, x), (made,), source=Source("m.py", i + 1)))
        last = made
    graph = Graph("f", (x,), ops=tuple(ops), outputs=(last,))
    assert parse_graph(print_graph(graph)) == graph
