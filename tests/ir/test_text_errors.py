"""Malformed text: always a ParseError, at the right place, with the remedy."""

import string
from collections.abc import Callable

import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.ir.errors import ParseError
from metainfer.ir.graph import Graph
from metainfer.ir.parser import parse_graph, parse_module
from metainfer.ir.printer import print_graph, print_module
from metainfer.ir.rules import parse_rule

MODULE = """\
module m {
  mesh (tp=2)
  dim T in [1, 8192]
  step
  load b { weights { @w : bf16[576] } return @w }
  block b(%x: bf16[T,576] @ (tp=S1)) {
    weights { @w : i8/32:f16[576] as "packed" }
    states { $kv : pages(k: bf16[3,64]) per token page 16 }
    %0, %1 = fused[g](%x, @w) {a = (1, -2.5, "s"), d = dim(2*T+1), e = true} : bf16[T,576], f32[] \
loc("m.py":3) stream 1 by {T <= 16: cpu.a, else: b} body (%a: bf16[T,576], @w: bf16[576]) {
      return %a, @w
    }
    %2 = kv_write($kv, %x, step.slots) : pages(k: bf16[3,64]) per token page 16
    return %0 states %2
  }
  main(%x: bf16[T,576]) {
    %0 = call b(%x) {prefix = "l."} : bf16[T,576]
    return %0
  }
}
"""
RULE = """\
rule add_norm
  why "less" needs cpu, avx2 phase decode priority 3
  where D % 32 == 0 and not (D * 4 > device.smem or -$eps < 1e-3)
  before (%x: t[T,D], @w: u[D], $kv: state) {
    %0 = norm(%x, @w, $kv) {eps = $eps, n = (dim(2*D), 1)} : t[..., D]
    return %0
  }
  after (%x: t[T,D], @w: u[D], $kv: state) {
    %0 = fused[g](%x, @w, $kv) {eps = $eps}
    return %0
  }
"""
# « marks where the error points.
OPS = [
    ("%0 = f(«%y) : f32[T] return %0", "%y is used but not defined", "known: %x"),
    ("%0 = f(%x) : f32[T] return «%1", "%1 is used but not defined", "known: %x, %0"),
    ("%eps = f(%x) : f32[T] return «%esp", "%esp is used but", "did you mean %eps?"),
    ("return «@x", "@x is used but not defined", "define it before it is used"),
    ("«%x = f() : f32[T] return", "%x is defined twice", "rename it"),
    ("%0 = f(%x) : «f33[T] return", "unknown element type 'f33'", "known: bool"),
    ("%0 = f(%x) : «f32/0:f16[T] return", "a block of extent 0", "/row"),
    ("%0 = f(%x) : f32«[T*T] return", "size (T)*(T) is not affine", ""),
    ("%0 = f(%x) : f32«[T//0] return", "the divisor must be positive", ""),
    ("%0 = f(%x) : f32[T+«] return", "unexpected ']'", "a size symbol"),
    ("%0 = f(%x) : f32[«~] return", "unexpected character '~'", "a size symbol"),
    ("%0 = f(%x) : f32[T] @ (tp=«S1) return", "bad sharding S1", "counted from 0"),
    ("%0 = f(%x) : f32[T] @ (tp=«R) return", "bad sharding R", "S0, S1, ... (a dim) or partial"),
    ("%0 = f(%x) : f32[T] @ (a=S0, «a=S0) return", "mesh axis a stands twice", ""),
    ("«%0 = f(%x) return", "f: 1 results but 0 result types", "one type per result"),
    ("«f(%x) : f32[T] return", "f: 0 results but 1 result types", "one type per result"),
    ("«@0 = f(%x) : f32[T] return", "@0 cannot be a result", "%name"),
    ("f(«step.slot) return", "no field 'slot'", "it has: positions"),
    ("f(%x) {a = 1, «a = 2} return", "attribute a is given twice", ""),
    ("f(%x) {a = «$n} return", "$n is no value of an attribute", "only in rules"),
    ("f(%x) {a = «dim(T*T)} return", "is not affine", ""),
    ("fused[«a](%x) {kind = 1} return", "fused: kind is given twice", ""),
    ("«f(%x) stream 1 {a = 1} return", "f: attrs stands after stream", "the order is: attrs"),
    ("«f(%x) stream 1 stream 1 return", "f: stream stands twice", "the order is"),
    ("f(%x) by {else: «a, T <= 1: b} return", "rows after `else`", ""),
    ("%0 = f() : «state return", "state is no type", "pages(k:"),
    ("%0 = f() : «page(k: f32[1]) per token return", "unknown kind of state", "pages"),
    ("%0 = f() : slot(k: f32[]) per «step return", "not per 'step'", ""),
    ("%0 = f() : slot(k: f32[], «k: f32[]) per token return", "state field k stands twice", ""),
    ('f() {a = «"\\q"} return', "bad escape in a string", ""),
    ('f(«@"\\q") return', "bad escape in a name", ""),
    ("f(%x «return", "unexpected 'return'", "expected `)` or `,`"),
    ("f(%x) retrun «", "unexpected '}'", "expected `(`"),
    ("return «~", "unexpected character '~'", ""),
]


@pytest.mark.parametrize(("marked", "what", "advice"), OPS)
def test_an_error_in_a_graph_names_place_and_remedy(marked: str, what: str, advice: str) -> None:
    text = f"# first line\ngraph f(%x: f32[T]) {{ {marked}}}"
    column = text.split("\n")[1].index("«") + 1
    text = text.replace("«", "")
    with pytest.raises(ParseError) as caught:
        parse_graph(text, origin="a.mir")
    error = caught.value
    assert what in error.what
    assert (error.line, error.column) == (2, column)
    assert advice in error.advice
    line, carets = error.text.split("\n")
    assert line == text.split("\n")[1]
    assert carets.index("^") == column - 1
    assert f"from a.mir: line 2, column {column}" in str(error)


MODULES = [
    ("dim T in [1, 8192]", "dim N in [1, 2]", "T is not declared", "bf16[T,576] @", "add: dim T"),
    ("  step", "  dim T in [1, 2] step", "size T is declared twice", "T in [1, 2]", ""),
    ("dim T in", "dim x-y in", "x-y is no name of a size", "x-y", "letters"),
    ("  step\n", "  step step\n", "`step` stands twice", "step\n", "one is enough"),
    ("(tp=2)", "(tp=2, tp=3)", "mesh axis tp is declared twice", "tp=3", ""),
    ("(tp=2)", "(tp=2) mesh (ep=2)", "`mesh` stands twice", "mesh (ep", "all axes in one"),
    ("  main(", "  block b(", "graph b is defined twice", "b(%x: bf16[T,576]) {", "rename"),
    ("block b(", "load b { return } block b(", "load graph b is defined", "b { return", "rename"),
    ("T <= 16", "B <= 16", "size symbol B is not declared", "B <= 16", "known: T"),
    ("dim(2*T+1)", "dim(2*B+1)", "size symbol B is not declared", "dim(2*B", "add: dim B"),
    ("@w : i8/32", "%w : i8/32", "%w cannot be declared here", "%w : i8", "use @name"),
    ("$kv : pages", "@kv : pages", "@kv cannot be declared here", "@kv", "use $name"),
    ("%a: bf16", "step.a: bf16", "step.a cannot be declared here", "step.a", "%name"),
    ("return %0\n  }\n}", "return %0\n  }\n", "unexpected end of the text", "\n", "`}`"),
    ("module m", "modul m", "unexpected", "modul", "expected `module`"),
    ('.py":3)', f'.py":{"3" * 5000})', "a number of 5000 digits is too long", "333", ""),
]


@pytest.mark.parametrize(("old", "new", "what", "place", "advice"), MODULES)
def test_an_error_in_a_module_names_place_and_remedy(
    old: str, new: str, what: str, place: str, advice: str
) -> None:
    assert old in MODULE
    text = MODULE.replace(old, new, 1)
    with pytest.raises(ParseError) as caught:
        parse_module(text)
    error = caught.value
    assert what in error.what
    assert text.split("\n", error.line - 1)[-1][error.column - 1 :].startswith(place)
    assert advice in error.advice
    shown, carets = error.text.split("\n")
    assert len(shown) <= 160
    assert place == "\n" or shown[carets.index("^") :].startswith(place[:3])


def test_the_whole_message() -> None:
    with pytest.raises(ParseError) as caught:
        parse_graph("graph f(%x: f32[4]) {\n\t%0 = add(%x, %xx) : f32[4]\n}", origin="a.mir")
    with pytest.raises(ParseError) as undefined:
        parse_graph("graph f(%x: f32[4]) {\n\t%0 = add(%x, %xx) : f32[4] return }")
    assert str(caught.value).startswith(
        "unexpected '}'\n  }\n  ^\n  from a.mir: line 3, column 1\n"
    )
    assert str(undefined.value) == (
        "%xx is used but not defined\n"
        "  \t%0 = add(%x, %xx) : f32[4] return }\n"
        "  \t             ^^^\n"
        "  from line 2, column 15\n"
        "  did you mean %x?"
    )


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000,
        "graph f() { f() {a = " + "(" * 5000 + ")" * 5000 + "} return }",
        "graph f(%x: f32[" + "(" * 3000 + "T" + "//2+T)" * 3000 + "]) { return }",
        "graph f() { f() {a = dim(" + "(" * 3000 + "T" + "//2+T)" * 3000 + ")} return }",
        "graph f() {" + "fused[a]() body () {" * 2000 + "return }" * 2000 + "return }",
        f"graph f() {{ f() {{a = dim({'9' * 5000})}} return }}",
        f"graph f(%x: i8/{'9' * 5000}:f16[4]) {{ return }}",
    ],
)
def test_what_is_too_deep_or_too_long_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_graph(text)


@pytest.mark.parametrize("deep", ["D" + " + 1" * 3000 + " == 1", "not " * 3000 + "D"])
def test_a_deep_condition_is_refused(deep: str) -> None:
    with pytest.raises(ParseError, match="too deeply"):
        parse_rule(RULE.replace("D % 32 == 0", deep))


def test_parentheses_alone_are_no_depth() -> None:
    parse_rule(RULE.replace("D % 32", "(" * 3000 + "D % 32" + ")" * 3000))


Parse = Callable[[str], object]
STARTS: list[tuple[Parse, str]] = [
    (parse_module, MODULE),
    (
        parse_graph,
        MODULE[MODULE.index("block b(") :].replace("block b(", "graph b(").split("  main")[0],
    ),
    (parse_rule, RULE),
]


def _parses_or_points(parse: Parse, text: str) -> None:
    """Whatever the text: a value, or a ParseError at a place inside the text."""
    error = _error(parse, text)
    if error is None:
        return
    lines = text.split("\n")
    assert 1 <= error.line <= len(lines)
    assert 1 <= error.column <= len(lines[error.line - 1]) + 1


def _error(parse: Parse, text: str) -> ParseError | None:
    try:
        parse(text)
    except ParseError as error:
        return error
    return None


@pytest.mark.parametrize(("parse", "text"), STARTS)
def test_the_texts_that_are_mutated_are_good(parse: Parse, text: str) -> None:
    assert parse(text) is not None


@pytest.mark.parametrize(("parse", "text"), STARTS)
@given(noise=st.text(max_size=40))
def test_any_text_parses_or_is_refused(parse: Parse, text: str, noise: str) -> None:
    _parses_or_points(parse, noise)
    head = text.split("{")[0] + "{"
    _parses_or_points(parse, head + noise)


WORDS = """%0 @w $kv step.slots f32[T] return body dim by T 1 1e5 state else t[*] and é \x00"""
PIECES = st.sampled_from([*string.punctuation, "\n", " ", *WORDS.split(" ")])


@pytest.mark.parametrize(("parse", "text"), STARTS)
@settings(deadline=None)
@given(data=st.data())
def test_a_mutated_text_parses_or_is_refused(parse: Parse, text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.sampled_from([0, 0, 1, 1, 2, 5, 20]))
        text = text[:start] + data.draw(PIECES | st.just("")) + text[end:]
    _parses_or_points(parse, text)


@pytest.mark.parametrize(("parse", "text"), STARTS)
@settings(deadline=None)
@given(data=st.data())
def test_shuffled_words_parse_or_are_refused(parse: Parse, text: str, data: st.DataObject) -> None:
    words = text.split(" ")
    one, two = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    words[one], words[two] = words[two], words[one]
    _parses_or_points(parse, " ".join(words))


@settings(deadline=None)
@given(strategies.graphs(), st.data())
def test_a_cut_text_is_refused(graph: Graph, data: st.DataObject) -> None:
    text = print_graph(graph).rstrip()
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(ParseError):
        parse_graph(text[:cut])


def test_what_was_refused_parses_again_after_an_error() -> None:
    good = print_module(parse_module(MODULE))
    with pytest.raises(ParseError):
        parse_module(MODULE[:-3])
    assert print_module(parse_module(good)) == good
