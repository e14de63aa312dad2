"""Rules as text: round trip, conditions, errors."""

import itertools
from typing import Any

import pytest
import strategies
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import F32
from metainfer.ir.errors import ParseError, TypeMismatch
from metainfer.ir.patterns import (
    AnyPattern,
    AttrVar,
    DTypeVar,
    Param,
    Pattern,
    PatternAttr,
    PatternOp,
    StatePattern,
    TypePattern,
)
from metainfer.ir.rules import PHASES, Rule, evaluate_where, parse_rule, print_rule
from metainfer.ir.where import Binary, Logical, Name, Number, Unary, Where, names_of, print_where

RULE = """\
rule add_rms_norm
  why "one read and one write of the residual fewer"
  needs cpu, avx2
  phase decode
  priority 10
  where D % 32 == 0 and D * 4 <= device.smem_per_block_bytes
  before (%x: t[T,D], %r: t[T,D], @w: u[D]) {
    %0 = add(%x, %r)
    %1 = rms_norm(%0, @w) {eps = $eps}
    return %0, %1
  }
  after (%x: t[T,D], %r: t[T,D], @w: u[D]) {
    %0, %1 = fused[add_rms_norm](%x, %r, @w) {eps = $eps}
    return %0, %1
  }
"""
SHORT = """
rule r why "w" before (%x: t[*], %y: f32[..., 2*D], $kv: state, %z: i8/32:f16[ ... ]) {
  %0 = f(%x, $kv, step.slots) {axes = (1, $n, dim(2*D)), k = "s"} : t[*] %1 = g(%y, %z)
  return %0 states %1 }
after (%x: t[*]) { %0 = f(%x) %1 = g(%x) return %0 states %1 }
"""

SIZES = ("T", "D", "H_2")
ATTRS = ("eps", "n", "odd name")


def test_a_rule_is_read() -> None:
    rule = parse_rule(RULE, "add_rms_norm.rule")
    assert print_rule(rule) == RULE
    assert (rule.name, rule.needs, rule.phase) == ("add_rms_norm", ("cpu", "avx2"), "decode")
    assert (rule.priority, rule.source_path) == (10, "add_rms_norm.rule")
    assert rule.before.params[2] == Param("@w", TypePattern(DTypeVar("u"), (dim("D"),)))
    assert rule.before.ops[1] == PatternOp(
        "rms_norm", ("%0", "@w"), ("%1",), (("eps", AttrVar("eps")),)
    )
    assert rule.after.outputs == ("%0", "%1")
    assert rule.fused is not None
    assert dict(rule.fused.attrs)["kind"] == "add_rms_norm"
    assert rule.before.size_variables() == {"T", "D"}
    assert rule.before.dtype_variables() == {"t", "u"}
    assert rule.before.attr_variables() == {"eps"}


def test_what_may_be_left_out_is() -> None:
    rule = parse_rule(SHORT)
    assert (rule.needs, rule.phase, rule.priority, rule.where) == ((), "", 0, None)
    assert rule.fused is None
    assert evaluate_where(rule.where, {})
    x, y, kv, z = rule.before.params
    assert x.type == TypePattern(DTypeVar("t"), (), free_lead=True)
    assert y.type == TypePattern(F32, (dim("D") * 2,), free_lead=True)
    assert kv == Param("$kv", StatePattern())
    assert str(z.type) == "i8/32:f16[*]"
    first = rule.before.ops[0]
    assert first.operands == ("%x", "$kv", "step.slots")
    assert first.attrs == (("axes", (1, AttrVar("n"), dim("D") * 2)), ("k", "s"))
    assert first.result_types == (x.type,)
    assert rule.before.state_outputs == ("%1",)
    assert parse_rule(print_rule(rule)) == rule


def test_the_path_is_no_part_of_a_rules_value() -> None:
    assert parse_rule(RULE, "a") == parse_rule(RULE, "b")


# ---- conditions --------------------------------------------------------------------------------


def wheres(names: tuple[str, ...]) -> st.SearchStrategy[Where]:
    """Conditions over names."""
    leaves = st.one_of(
        st.integers(0, 9).map(Number),
        st.floats(0, 1e30).map(Number),
        st.sampled_from(names).map(Name),
    )
    arithmetic = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(Binary, st.sampled_from(["+", "-", "*", "//", "%"]), inner, inner),
            inner.map(lambda w: Unary("-", w)),
        ),
        max_leaves=4,
    )
    comparisons = st.builds(
        Binary, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), arithmetic, arithmetic
    )
    several = st.sampled_from(["and", "or"])
    return st.recursive(
        comparisons | st.booleans().map(Number),
        lambda inner: st.one_of(
            inner.map(lambda w: Unary("not", w)),
            st.builds(
                Logical, several, st.lists(inner, min_size=2, max_size=3).map(lambda w: tuple(w))
            ),
        ),
        max_leaves=4,
    )


def _rule_with(where: str) -> str:
    side = "(%x: t[T,D]) {{ %0 = {}(%x) {{eps = $eps}} return %0 }}"
    return f'rule r why "w" where {where} before {side.format("f")} after {side.format("g")}'


@settings(deadline=None)
@given(wheres(("T", "D", "$eps", "device.num_sms", "t.bits")))
@example(Binary("==", Binary("-", Number(3), Binary("-", Number(2), Number(1))), Number(2)))
@example(Logical("and", (Logical("or", (Number(True), Number(False))), Number(False))))
def test_a_condition_is_read_back_equal(where: Where) -> None:
    text = print_where(where)
    again = parse_rule(_rule_with(text)).where
    assert again is not None
    assert again == where
    assert print_where(again) == text


@given(wheres(("T", "D")), st.integers(0, 100), st.integers(0, 100) | st.floats(-9, 9, width=32))
def test_a_condition_means_what_python_means(where: Where, t: int, d: float) -> None:
    text = print_where(where).replace("true", "True").replace("false", "False")
    try:
        expected = bool(eval(text, {"T": t, "D": d}))
    except ZeroDivisionError:
        with pytest.raises(TypeMismatch, match="division by zero"):
            evaluate_where(where, {"T": t, "D": d})
        return
    assert evaluate_where(where, {"T": t, "D": d}) == expected


def test_a_name_without_a_value_is_refused() -> None:
    where = parse_rule(RULE).where
    assert names_of(where) == {"D", "device.smem_per_block_bytes"}
    assert evaluate_where(where, {"D": 64, "device.smem_per_block_bytes": 256})
    assert not evaluate_where(where, {"D": 64, "device.smem_per_block_bytes": 255})
    # The left side decides: the right one is not asked.
    assert not evaluate_where(where, {"D": 33})
    with pytest.raises(
        TypeMismatch, match=r"device\.smem_per_block_bytes has no value\n  known: D"
    ):
        evaluate_where(where, {"D": 64})


# ---- round trip --------------------------------------------------------------------------------


def type_patterns() -> st.SearchStrategy[TypePattern]:
    """Types of tensors in patterns."""
    return st.builds(
        lambda dtype, shape, free: TypePattern(dtype, tuple(shape), free),
        st.sampled_from("tu").map(DTypeVar) | strategies.dtypes(),
        st.lists(strategies.dims(SIZES), max_size=3),
        st.booleans(),
    )


def pattern_attrs() -> st.SearchStrategy[PatternAttr]:
    """Values of attributes and variables, tuples of them too."""
    leaves: st.SearchStrategy[Any] = st.one_of(
        strategies.attr_values(SIZES), st.sampled_from(ATTRS).map(AttrVar)
    )
    return leaves | st.lists(leaves, max_size=2).map(tuple)


@st.composite
def patterns(draw: st.DrawFn, params: tuple[Param, ...], outputs: int) -> Pattern:
    """A side of a rule that binds every variable in its first op."""
    names = [p.name for p in params]
    everything = PatternOp(
        "all",
        tuple(names),
        (),
        (
            ("a", tuple(map(AttrVar, ATTRS))),
            ("d", tuple(dim(size) for size in SIZES)),
        ),
    )
    ops = [everything]
    for index in range(draw(st.integers(1, 3))):
        results = tuple(f"%made {index} {i}" for i in range(draw(st.integers(1, 2))))
        attrs = draw(st.dictionaries(strategies.WORDS, pattern_attrs(), max_size=2))
        types: list[AnyPattern] = draw(
            st.just([])
            | st.lists(
                type_patterns() | st.just(StatePattern()),
                min_size=len(results),
                max_size=len(results),
            )
        )
        ops.append(
            PatternOp(
                draw(strategies.OP_NAMES),
                tuple(draw(st.lists(st.sampled_from([*names, "step.slots"]), max_size=3))),
                results,
                tuple(sorted(attrs.items())),
                tuple(types),
            )
        )
        names += results
    given_back = draw(st.lists(st.sampled_from(names), min_size=outputs, max_size=outputs))
    return Pattern(params, tuple(ops), tuple(given_back), tuple(given_back[:1]))


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Rules whose sides are unrelated but for their parameters."""
    tails = draw(st.lists(strategies.VALUE_NAMES, min_size=1, max_size=3, unique=True))
    params = [
        Param("%t", TypePattern(DTypeVar("t"), ())),
        Param("%u", TypePattern(DTypeVar("u"), ())),
    ]
    for sigil, tail in zip(itertools.cycle("%@$"), tails, strict=False):
        if sigil + tail in ("%t", "%u"):
            continue
        type_ = StatePattern() if sigil == "$" else draw(type_patterns())
        params.append(Param(sigil + tail, type_))
    outputs = draw(st.integers(0, 2))
    names = (*SIZES, "t.bits", "$eps", "$odd name", "device.num_sms")
    return Rule(
        name=draw(strategies.WORDS),
        why=draw(strategies.TEXTS),
        needs=tuple(draw(st.lists(strategies.WORDS, max_size=2))),
        phase=draw(st.sampled_from(["", *PHASES])),
        priority=draw(st.integers(-5, 100)),
        where=draw(st.none() | wheres(names)),
        before=draw(patterns(tuple(params), outputs)),
        after=draw(patterns(tuple(params), outputs).filter(_makes_no_group)),
    )


def _makes_no_group(pattern: Pattern) -> bool:
    return all(op.name != "fused" for op in pattern.ops)


@settings(deadline=None)
@given(rules())
def test_a_rule_is_read_back_equal(rule: Rule) -> None:
    text = print_rule(rule)
    again = parse_rule(text)
    assert again == rule
    assert print_rule(again) == text


# ---- errors ------------------------------------------------------------------------------------

BASE = """\
rule r
  why "w"
  before (%x: t[T,D]) { %0 = f(%x) {a = $a} return %0 }
  after (%x: t[T,D]) { %0 = g(%x) return %0 }
"""
ERRORS = [
    ('why "w"', 'why "w" where D + 1', "D + 1 is a number where a condition", 2, "compare it"),
    ('why "w"', 'why "w" where not D % 2', "D % 2 is a number where a condition", 2, ""),
    ('why "w"', 'why "w" where D < 1 and 2', "2 is a number where a condition", 2, ""),
    ('why "w"', 'why "w" where Q > 1', "Q in `where` is not bound", 2, "known: $a, D, T, t.bits"),
    ('why "w"', 'why "w" where $aa > 1', "$aa in `where` is not bound", 2, "did you mean $a?"),
    ('why "w"', 'why "w" where D < %x', "%x is no number", 2, "attributes are written $name"),
    ('why "w"', 'why "w" where D < +1', "a number has no sign +", 2, "leave the + away"),
    ('why "w"', 'why "w" where 1 < D < 3', "unexpected '<'", 2, "expected"),
    ('why "w"', 'why "w" where D < 1e999', "1e999 is too large", 2, ""),
    ('why "w"', 'why "w" phase train', "unknown phase train", 2, "known: prefill, decode"),
    ('why "w"', 'why "w" why "v"', "`why` stands twice", 2, ""),
    ('why "w"', "priority 1", "rule r has no `why`", 1, "why, before and after"),
    ("t[T,D]", "t[T,d]", "size variable d must begin with a capital", 3, "write D"),
    ("t[T,D]", "bf61[T,D]", "unknown element type 'bf61'", 3, "known: bool"),
    ("t[T,D]", "Tt[T,D]", "unknown element type 'Tt'", 3, "known: bool"),
    ("t[T,D]", "t[..., ]", "bad sizes in t[..., ]", 3, "t[*] or t[..., D]"),
    ("t[T,D]", "t[...D]", "bad sizes in t[...D]", 3, "t[*] or t[..., D]"),
    ("t[T,D]", "t[T,...]", "unexpected character '.'", 3, "a size symbol"),
    ("t[T,D]", 't[T,D] as "x"', "no sharding and no layout", 3, ""),
    ("t[T,D]", "pages(k: f32[4]) per token", "pages is no type of a pattern", 3, "state"),
    ("t[T,D]", "state", "%x cannot have the type state", 3, "$kv: state"),
    ("t[T,D])", "t[T,D], $kv: t[D])", "$kv cannot have the type t[D]", 3, "$kv: state"),
    ("t[T,D])", "t[T,D], step.slots: t[D])", "step.slots is no parameter", 3, ""),
    ("t[T,D])", "t[T,D], %x: t[D])", "%x is defined twice", 3, "rename it"),
    ("f(%x)", "f(%y)", "%y is used but not defined", 3, "known: %x"),
    ("f(%x)", "f(step.slot)", "no field 'slot'", 3, "it has"),
    ("f(%x)", "f(%x) stream 1", "f: stream has no meaning in a rule", 3, ""),
    ("= $a}", "= $a} {b = 1}", "f: attrs stands twice", 3, ""),
    ("= $a}", "= %a}", "%a is no attribute", 3, "variables are written $name"),
    ("= $a}", "= $a} : t[T], t[T]", "f: 1 results but 2 result types", 3, ""),
    ("%0 = f", "@0 = f", "@0 cannot be a result", 3, "%name"),
    ("g(%x)", "g(%x) {b = $b}", "b of `after` is not bound by `before`", 4, ""),
    ("g(%x)", "g(%x) {b = dim(Q)}", "Q of `after` is not bound by `before`", 4, ""),
    ("g(%x)", "g(%x) : u[T]", "u of `after` is not bound by `before`", 4, ""),
    ("g(%x) return %0", "g(%x) return", "`before` has 1 outputs, `after` has 0", 4, ""),
    ("after (%x: t[T,D]", "after (%x: t[T]", "%x: t[T] of `after` is not one of", 4, "same param"),
    ("= g(%x)", "= fused[k](%x) %1 = h(%0)", "stands for the whole of `before`", 4, "only op"),
    ("= g(%x)", "= fused[k]()", "stands for the whole of `before`", 4, "all parameters"),
    ("= g(%x)", "= fused(%x)", "a fused group needs its kind", 4, "fused[NAME]"),
    ("t[T,D]) {", "t[T,D]) { states { }", "a pattern has no section `states`", 3, "parameters"),
    ('rule r\n  why "w"', 'rule r\n  "w"', "unexpected", 2, "`why`"),
]


def test_the_rule_that_is_spoilt_is_good() -> None:
    assert parse_rule(BASE).name == "r"


@pytest.mark.parametrize(("old", "new", "what", "line", "advice"), ERRORS)
def test_an_error_in_a_rule_names_place_and_remedy(
    old: str, new: str, what: str, line: int, advice: str
) -> None:
    assert old in BASE
    with pytest.raises(ParseError) as caught:
        parse_rule(BASE.replace(old, new, 1), "x.rule")
    assert what in caught.value.what
    assert caught.value.line == line
    assert caught.value.column >= 1
    assert advice in caught.value.advice
    assert "from x.rule: line" in str(caught.value)
