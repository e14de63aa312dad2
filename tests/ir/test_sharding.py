"""Shardings: what a rule accepts is what ranks compute, and a missing collective is a type error.

`shard_oracle` computes what ranks hold and puts it together.
"""

import itertools
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import PAGE_SIZE, SAMPLES, Sample, read_type
from shard_oracle import PLAIN, Placements, check_ranks, options, parts_of, placed, sharded_types

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import F32, I32, BlockArray, parse_dtype
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Op, Value
from metainfer.ir.ops import OPS, Builder, infer_types
from metainfer.ir.ops.record import COLLECTIVE
from metainfer.ir.shard_rule import parse_rule
from metainfer.ir.sharding import (
    check_divides,
    check_sharding,
    local_type,
    propagate,
)
from metainfer.ir.types import PARTIAL, Mesh, Sharding, StateType, TensorType, tensor


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sample", PLAIN, ids=str)
def test_every_accepted_sharding_computes_the_whole(sample: Sample, ranks: int) -> None:
    mesh = Mesh((("tp", ranks),))
    seed = zlib.crc32(str(sample).encode())
    choices = itertools.product(*(options(t, "tp") for t in sample.types))
    accepted = [c for c in choices if check_ranks(sample, c, mesh, seed)]
    # Whole operands are always accepted.
    assert any(not any(c) for c in accepted)


@settings(deadline=None)
@given(st.data())
def test_axes_of_a_mesh_do_not_interact(data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(PLAIN))
    mesh = Mesh((("dp", 2), ("tp", 2)))
    choice = []
    for type_ in sample.types:
        one = data.draw(st.sampled_from(options(type_, "dp")))
        other = data.draw(st.sampled_from(options(type_, "tp")))
        choice.append({**one, **other})
    alone = [[{a: p[a]} if a in p else {} for p in choice] for a in ("dp", "tp")]
    results = [sharded_types(sample, c, mesh) for c in alone]
    accepted = check_ranks(sample, choice, mesh, data.draw(st.integers(0, 99)))
    if accepted:
        assert None not in results


_EXPERTS = ("f32[T,8]", "i32[T,2]", "f32[T,2]", "f32[4,12,8]", "f32[4,12,8]", "f32[4,8,12]")
ACCEPTED = {
    # op, operands and their placements over tp (".": whole, "+": pending), -> the result's
    "linear 0 . -> 0": ("f32[T,8]", "f32[12,8]"),
    "linear . 0 -> 1": ("f32[T,8]", "f32[12,8]"),
    "linear 1 1 -> +": ("f32[T,8]", "f32[12,8]"),
    "linear + . -> +": ("f32[T,8]", "f32[12,8]"),
    "linear . 0 0 -> 1": ("f32[T,8]", "f32[12,8]", "f32[12]"),
    "matmul 0 0 -> 0": ("f32[4,T,8]", "f32[4,8,12]"),
    "matmul 2 1 -> +": ("f32[4,T,8]", "f32[4,8,12]"),
    "matmul . 2 -> 2": ("f32[4,T,8]", "f32[4,8,12]"),
    "add + + -> +": ("f32[T,8]", "f32[T,8]"),
    "add 1 0 -> 1": ("f32[T,8]", "f32[8]"),
    "add 0 . -> 0": ("f32[T,8]", "f32[8]"),
    "mul + . -> +": ("f32[T,8]", "f32[8]"),
    "div + . -> +": ("f32[T,8]", "f32[8]"),
    "neg + -> +": ("f32[T,8]",),
    "where . + + -> +": ("bool[T,8]", "f32[T,8]", "f32[T,8]"),
    "silu_mul 1 1 -> 1": ("f32[T,8]", "f32[T,8]"),
    "rope 1 . -> 1": ("f32[T,4,8]", "i32[T]"),
    "rope 0 0 -> 0": ("f32[T,4,8]", "i32[T]"),
    "experts . . . 0 0 0 -> +": _EXPERTS,
    "experts . . . 1 1 2 -> +": _EXPERTS,
    "experts 0 0 0 . . . -> 0": _EXPERTS,
    "experts . . + . . . -> +": _EXPERTS,
    "experts . . . . . + -> +": _EXPERTS,
    "embedding . 0 -> +": ("i32[T]", "f32[8,16]"),
    "embedding . 1 -> 1": ("i32[T]", "f32[8,16]"),
    "embedding 0 . -> 0": ("i32[T]", "f32[8,16]"),
    "gather 1 . -> 1": ("f32[8,4]", "i32[T]"),
    "gather + . -> +": ("f32[8,4]", "i32[T]"),
    "sdpa 1 1 1 -> 1": ("f32[2,8,T,8]", "f32[2,4,6,8]", "f32[2,4,6,8]"),
    "sdpa 1 . . -> 1": ("f32[2,8,T,8]", "f32[2,1,6,8]", "f32[2,1,6,8]"),
    "softmax 0 -> 0": ("f32[T,8]",),
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_rules_accept(text: str) -> None:
    name, *places = text.replace("-> ", "").split()
    *given_, wanted = [{} if p == "." else {"tp": PARTIAL if p == "+" else int(p)} for p in places]
    types = [read_type(t) for t in ACCEPTED[text]]
    operands = [placed(t, p) for t, p in zip(types, given_, strict=True)]
    (made,) = propagate(name, operands, {}, infer_types(name, types, {}))
    assert isinstance(made, TensorType)
    assert dict(made.sharding.axes) == wanted


@pytest.mark.parametrize(
    ("before", "after", "place", "wanted"),
    [
        (("T", 32), ("T", 4, 8), 1, 1),
        (("T", 4, 8), ("T", 32), 1, 1),
        (("T", 4, 8), ("T", 32), 2, None),
        (("T", 4, 8), ("T", 32), 0, 0),
        (("B", "T", 8), ("B", "T", 2, 4), 1, 1),
        (("T", 1, 8), ("T", 8), 2, 1),
        (("T", 8), (1, "T", 8), 0, 1),
        (("T", 6, 4), ("T", 3, 8), 1, 1),
        (("T", 6, 4), ("T", 3, 8), 2, None),
    ],
)
def test_reshape_keeps_the_outermost_factor_sharded(
    before: tuple[Any, ...], after: tuple[Any, ...], place: int, wanted: int | None
) -> None:
    x, result = tensor(F32, *before), tensor(F32, *after)
    attrs = {"shape": result.shape}
    if wanted is None:
        with pytest.raises(TypeMismatch, match="reshape: x must be whole in dim"):
            propagate("reshape", [placed(x, {"tp": place})], attrs, [result])
        return
    (made,) = propagate("reshape", [placed(x, {"tp": place})], attrs, [result])
    assert made == placed(result, {"tp": wanted})


def value(name: str, text: str, **placements: int | str) -> Value:
    return Value(name, placed(read_type(text), placements))


def mlp(builder: Builder, *, column: int = 0, row: int = 1, reduce: bool = True) -> Value:
    """norm -> gate, up -> silu_mul -> down [-> all_reduce] -> add -> norm."""
    x, norm = value("%x", "bf16[T,8]"), value("@n", "bf16[8]")
    gate = value("@gate", "bf16[32,8]", tp=column)
    up = value("@up", "bf16[32,8]", tp=column)
    down = value("@down", "bf16[8,32]", tp=row)
    h = builder.emit("rms_norm", x, norm, eps=1e-5)
    h = builder.emit("silu_mul", builder.emit("linear", h, gate), builder.emit("linear", h, up))
    h = builder.emit("linear", h, down)
    if reduce:
        h = builder.emit("all_reduce", h, axis="tp")
    return builder.emit("rms_norm", builder.emit("add", x, h), norm, eps=1e-5)


def test_a_column_and_row_parallel_mlp() -> None:
    builder = Builder()
    assert mlp(builder).type == read_type("bf16[T,8]")
    lies = [str(op.result.tensor.sharding) for op in builder.ops]
    assert lies == ["", "(tp=S1)", "(tp=S1)", "(tp=S1)", "(tp=partial)", "", "", ""]
    for op in builder.ops:
        check_sharding(op, Mesh((("tp", 4),)))


def test_an_mlp_without_its_all_reduce_is_a_type_error() -> None:
    with pytest.raises(TypeMismatch) as refused:
        mlp(Builder(), reduce=False)
    assert str(refused.value) == (
        "a pending sum over tp reaches add: an all_reduce is missing\n"
        "  y: bf16[T,8] @ (tp=partial)\n"
        '  insert all_reduce (or reduce_scatter) over tp; rule of add: "...=+"'
    )


def test_an_mlp_with_wrongly_sharded_weights_is_a_type_error() -> None:
    with pytest.raises(TypeMismatch) as refused:
        mlp(Builder(), row=0)
    assert str(refused.value) == (
        "linear: weight is sharded in dim N, x in K, over axis tp\n"
        "  weight: bf16[8,32] @ (tp=S0)\n"
        '  rule of linear: "... K+, N K+ -> ... N ; sums 0 | 1"'
    )
    with pytest.raises(TypeMismatch) as refused:
        mlp(Builder(), column=1)
    assert refused.value.what == (
        "linear: x holds all of dim K, weight is sharded in it, over axis tp"
    )
    assert refused.value.advice.startswith("insert take_shard over tp; ")


def test_a_bias_is_not_added_once_per_rank() -> None:
    x, weight = value("%x", "f32[T,8]", tp=1), value("@w", "f32[12,8]", tp=1)
    with pytest.raises(TypeMismatch) as refused:
        Builder().emit("linear", x, weight, value("@b", "f32[12]"))
    assert refused.value.what == (
        "linear: bias would be added once per rank, since x makes a pending sum, over axis tp"
    )


def attention_block(builder: Builder, kv: Placements, *, fix: str = "all_reduce") -> Value:
    """q, k, v by columns -> heads -> rope -> write, attend -> o by rows [-> a collective]."""
    x = value("%x", "f32[T,32]")
    state = Value("$kv", placed(read_type("pages(k: f32[4,8], v: f32[4,8]) per token"), kv))
    steps = [Value(f"step.{n}", read_type(t)) for n, t in (
        ("positions", "i32[T]"), ("slots", "i32[T]"),
        ("starts", "i32[B+1]"), ("lengths", "i32[B]"), ("pages", "i32[B,P]"),
    )]  # fmt: skip
    heads = []
    for name, count in (("q", 8), ("k", 4), ("v", 4)):
        weight = value(f"@{name}", f"f32[{count * 8},32]", tp=0)
        made = builder.emit("linear", x, weight)
        heads.append(builder.emit("reshape", made, shape=(dim("T"), count, 8)))
    q, k = (builder.emit("rope", h, steps[0]) for h in heads[:2])
    state = builder.emit("kv_write", state, k, heads[2], steps[1])
    y = builder.emit("attention", q, state, *steps[2:])
    y = builder.emit("reshape", y, shape=(dim("T"), 64))
    y = builder.emit("linear", y, value("@o", "f32[32,64]", tp=1))
    if fix == "all_reduce":
        y = builder.emit("all_reduce", y, axis="tp")
    elif fix == "reduce_scatter":
        y = builder.emit("reduce_scatter", y, axis="tp", dim=0)
    return builder.emit("rms_norm", y, value("@n", "f32[32]"), eps=1e-5)


def test_an_attention_block_sharded_by_heads() -> None:
    builder = Builder()
    assert attention_block(builder, {"tp": 0}).tensor.sharding == Sharding()
    for op in builder.ops:
        check_sharding(op, Mesh((("tp", 4),)))
    written = next(op for op in builder.ops if op.name == "kv_write").result
    assert str(written.type) == ("pages(k: f32[4,8] @ (tp=S0), v: f32[4,8] @ (tp=S0)) per token")
    scattered = attention_block(Builder(), {"tp": 0}, fix="reduce_scatter")
    assert scattered.tensor.sharding == Sharding.of({"tp": 0})


def test_an_attention_block_without_its_all_reduce_is_a_type_error() -> None:
    with pytest.raises(TypeMismatch) as refused:
        attention_block(Builder(), {"tp": 0}, fix="")
    assert refused.value.what == (
        "a pending sum over tp reaches rms_norm: an all_reduce is missing"
    )


def test_a_whole_state_under_sharded_heads_is_a_type_error() -> None:
    with pytest.raises(TypeMismatch) as refused:
        attention_block(Builder(), {})
    assert refused.value.what == (
        "kv_write: state.k holds all of dim H, k is sharded in it, over axis tp"
    )


def test_more_ranks_than_key_heads_do_not_divide() -> None:
    builder = Builder()
    attention_block(builder, {"tp": 0})
    write = next(op for op in builder.ops if op.name == "kv_write")
    with pytest.raises(TypeMismatch, match=r"does not divide by 8 ranks of \(tp=8\)"):
        check_sharding(write, Mesh((("tp", 8),)))


def test_heads_that_do_not_divide_are_refused_by_the_mesh() -> None:
    x = placed(read_type("bf16[T,576]"), {"tp": 1})
    attrs = {"shape": (dim("T"), 9, 64)}
    results = infer_types("reshape", [x], attrs)
    (made,) = propagate("reshape", [x], attrs, results)
    assert str(made) == "bf16[T,9,64] @ (tp=S1)"
    with pytest.raises(TypeMismatch) as refused:
        propagate("reshape", [x], attrs, results, Mesh((("tp", 2),)))
    assert refused.value.what == (
        "dim 1 of bf16[T,9,64] @ (tp=S1) does not divide by 2 ranks of (tp=2)"
    )
    assert propagate("reshape", [x], attrs, results, Mesh((("tp", 3),))) == (made,)


COLLECTIVES = [
    ("all_reduce", {}, PARTIAL, None),
    ("reduce_scatter", {"dim": 1}, PARTIAL, 1),
    ("all_gather", {"dim": 1}, 1, None),
    ("all_to_all", {"source": 0, "target": 1}, 0, 1),
    ("take_shard", {"dim": 0}, None, 0),
]


def on(place: int | str | None) -> Placements:
    return {} if place is None else {"tp": place}


@pytest.mark.parametrize(("name", "attrs", "source", "target"), COLLECTIVES)
def test_collectives_change_one_axis(
    name: str, attrs: dict[str, Any], source: int | str | None, target: int | str | None
) -> None:
    x = read_type("f32[T,8,4]")
    attrs = {**attrs, "axis": "tp"}
    for other in ({}, {"dp": PARTIAL}, {"dp": 2}):
        operand = placed(x, {**other, **on(source)})
        (made,) = propagate(name, [operand], attrs, [x])
        assert made == placed(x, {**other, **on(target)})
    for wrong in (None, PARTIAL, 0, 1, 2):
        operand = placed(x, {"dp": 2, **on(wrong)})
        if wrong != source:
            with pytest.raises(TypeMismatch, match=f"{name} over tp takes an operand that is"):
                propagate(name, [operand], attrs, [x])


def test_every_collective_is_tested() -> None:
    assert {c[0] for c in COLLECTIVES} == {n for n, r in OPS.items() if r.has(COLLECTIVE)}


def test_inner_axes_of_a_dim_are_gathered_first() -> None:
    x = placed(read_type("f32[T,8]"), {"dp": 1, "tp": 1})
    mesh = Mesh((("dp", 2), ("tp", 2)))
    (made,) = propagate("all_gather", [x], {"axis": "tp", "dim": 1}, [x], mesh)
    assert str(made) == "f32[T,8] @ (dp=S1)"
    for axis, known in (("dp", mesh), ("tp", None)):
        with pytest.raises(TypeMismatch, match=r"is sharded over .* too"):
            propagate("all_gather", [x], {"axis": axis, "dim": 1}, [x], known)


def test_ops_without_a_rule_take_whole_operands() -> None:
    ruleless = [name for name, record in OPS.items() if not record.shard]
    # Ops that make numbers have no operands to be sharded, and local_index stands in local form
    # only; all others have a rule.
    assert sorted(ruleless) == ["constant", "full", "iota", "local_index"]


def test_an_op_without_a_rule_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "exp", replace(OPS["exp"], shard=""))
    with pytest.raises(TypeMismatch) as refused:
        propagate("exp", [placed(read_type("f32[T]"), {"tp": 0})], {}, [read_type("f32[T]")])
    assert refused.value.what == "exp takes no sharded operands, x is f32[T] @ (tp=S0)"


def test_declared_shardings_are_checked() -> None:
    x, y = value("%x", "f32[T,8]", tp=1), value("%0", "f32[T,8]")
    with pytest.raises(TypeMismatch) as refused:
        check_sharding(Op("exp", (x,), (y,)))
    assert str(refused.value) == (
        'exp: the result %0 lies @ (tp=S1), declared whole on every rank\n  rule of exp: "...="'
    )
    with pytest.raises(TypeMismatch, match="the result %x lies whole on every rank, declared @"):
        check_sharding(Op("full", (), (x,), (("shape", (dim("T"), 8)), ("value", 1.0),
                                             ("dtype", "f32"))))  # fmt: skip
    check_sharding(Op("exp", (y,), (y,)))


def test_an_axis_that_the_mesh_lacks_is_named() -> None:
    with pytest.raises(TypeMismatch, match=r"names the axis ep, the mesh is \(tp=2\)"):
        check_divides(placed(read_type("f32[8]"), {"ep": 0}), Mesh((("tp", 2),)))
    with pytest.raises(TypeMismatch, match="exp: x is sharded over tp in dim 3 of 1"):
        propagate("exp", [placed(read_type("f32[8]"), {"tp": 3})], {}, [read_type("f32[8]")])


def test_parts_of_a_tensor() -> None:
    mesh = Mesh((("dp", 2), ("tp", 4)))
    x = placed(read_type("f32[T,64,6]"), {"dp": 1, "tp": 1})
    assert local_type(x, mesh) == tensor(F32, dim("T"), 8, 6)  # type: ignore[arg-type]
    weight = placed(read_type("i8/32:f16[8,128]"), {"tp": 1})
    assert str(local_type(weight, mesh)) == "i8/32:f16[8,32]"  # type: ignore[arg-type]
    cut = placed(read_type("i8/32:f16[8,64]"), {"tp": 1})
    with pytest.raises(TypeMismatch, match="cut blocks of 32 in dim 1"):
        check_divides(cut, mesh)
    rows = placed(read_type("i8/row:f32[8,64]"), {"tp": 1})
    check_divides(rows, mesh)


def test_quantizing_rows_needs_them_whole() -> None:
    x = placed(read_type("f32[8,64]"), {"tp": 1})
    attrs = {"format": "i8/row:f32"}
    with pytest.raises(TypeMismatch, match="quantize: x must be whole in dim d1"):
        propagate("quantize", [x], attrs, infer_types("quantize", [x], attrs))
    attrs = {"format": "i8/32:f16"}
    (made,) = propagate("quantize", [x], attrs, infer_types("quantize", [x], attrs))
    assert str(made) == "i8/32:f16[8,64] @ (tp=S1)"
    data = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    whole = OPS["quantize"].reference(data, format="i8/32:f16")
    parts = [OPS["quantize"].reference(p, format="i8/32:f16") for p in np.split(data, 2, axis=1)]
    assert isinstance(whole, BlockArray)
    assert np.array_equal(whole.codes, np.concatenate([p.codes for p in parts], axis=1))
    assert np.array_equal(whole.scales, np.concatenate([p.scales for p in parts], axis=1))


def test_experts_and_their_parts_are_sharded_alike() -> None:
    types = [read_type(t) for t in _EXPERTS]
    for places, refused in (
        ({3: 0, 4: 0, 5: 1}, "experts: down must be whole in dim D, over axis tp"),
        ({3: 0, 4: 0}, "experts: down holds all of dim E, gate is sharded in it, over axis tp"),
        ({3: 0, 4: 1, 5: 0}, "experts: up is sharded in dim F, gate in E, over axis tp"),
        ({0: 1}, "experts: x must be whole in dim D, over axis tp"),
        ({1: 0}, "experts: x holds all of dim T, ids is sharded in it, over axis tp"),
    ):
        operands = [
            placed(t, {"tp": places[i]} if i in places else {}) for i, t in enumerate(types)
        ]
        with pytest.raises(TypeMismatch) as error:
            propagate("experts", operands, {}, infer_types("experts", types, {}))
        assert error.value.what == refused


def test_an_operand_that_multiplies_may_lack_a_contracted_dim() -> None:
    rule = parse_rule("a K+, b, c -> a ; sums 0 ; times 2 ; index 1 K")
    assert [rule.multiplies(i) for i in range(3)] == [False, True, True]
    assert rule.index == ((1, "K"),)


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "a -> b -> c",
        "a? -> a",
        "a ; plus 0",
        "-> ; sum",
        "a -> a ; times",
        "a -> a ; index 0",
    ],
)
def test_malformed_rules_are_faults_of_the_record(text: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        parse_rule(text)


def test_rules_read_as_written() -> None:
    rule = parse_rule("... M K+, ... K+ N -> ... M N ; sums 0 | 1")
    assert rule.passes(frozenset({0}), 2)
    assert rule.passes(frozenset({1}), 2)
    assert not rule.passes(frozenset({0, 1}), 2)
    assert parse_rule("...=+").passes(frozenset({0, 1, 2}), 3)
    assert not parse_rule("...=").passes(frozenset({0}), 1)
    labels = rule.operand(0).labels(4)
    assert [label.name for label in labels] == ["...2", "...1", "M", "K"]
    assert labels[3].contracted
    with pytest.raises(ValueError, match="a term of 2 dims for a tensor of rank 1"):
        rule.operand(0).labels(1)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_rule_fits_its_operands(sample: Sample) -> None:
    record = OPS[sample.name]
    text = record.shard_rule(sample.types, record.complete(sample.attrs))
    if not text or record.has(COLLECTIVE):
        return
    rule = parse_rule(text)
    results = infer_types(sample.name, sample.types, sample.attrs)
    for terms, types in ((rule.operand, sample.types), (rule.result, results)):
        for index, type_ in enumerate(types):
            parts = [t for _, t in type_.fields] if isinstance(type_, StateType) else [type_]
            assert all(len(terms(index).labels(t.rank)) == t.rank for t in parts)


def test_the_oracle_sees_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests above prove rules only if a wrong one fails: let softmax pass its sharded dim.
    monkeypatch.setitem(OPS, "softmax", replace(OPS["softmax"], shard="... D -> ... D"))
    sample = next(s for s in PLAIN if s.name == "softmax")
    with pytest.raises(AssertionError):
        check_ranks(sample, [{"tp": 1}], Mesh((("tp", 2),)), 0)


def test_simulated_ranks_hold_pages_of_states() -> None:
    assert PAGE_SIZE == 4
    state = {"k": np.arange(16.0).reshape(1, 2, 4, 2)}
    parts = parts_of(state, {"tp": 0}, Mesh((("tp", 2),)), np.random.default_rng(0))
    assert [p["k"].shape for p in parts] == [(1, 2, 2, 2)] * 2
    assert parse_dtype("i32") is I32
