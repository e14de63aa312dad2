"""Every op record: inferred types are those of its reference, costs make sense, errors name the op.

Data comes from the samples in ``tests/op_samples.py``: a new op needs one line there.
"""

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import (
    BY_NAME,
    PAGE_SIZE,
    SAMPLES,
    SETTINGS,
    SYMBOLS,
    Operand,
    Sample,
    read_type,
    scalar_data,
)

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import BF16, BOOL, F32, F64, I32, U8, Block, BlockArray, Scalar, quantize
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Op, Value, attrs_of
from metainfer.ir.interpret import as_reference_input, round_to
from metainfer.ir.ops import OPS, Builder, infer_types, op_def, op_sizes
from metainfer.ir.ops.record import RAW, OpDef, with_types
from metainfer.ir.types import StateType, TensorType, Type, tensor

NAMES = sorted(OPS)
STATE = StateType("slot", (("x", tensor(F32, 4)),), "sequence")


def seeded(sample: Sample) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(str(sample).encode()))


def run(sample: Sample, data: list[Any]) -> tuple[tuple[Type, ...], list[Any]]:
    """Inferred types and raw results of the reference, of a sample whose sizes are numbers."""
    record = op_def(sample.name)
    types = infer_types(sample.name, sample.types, sample.attrs)
    raw = record.has(RAW)
    with np.errstate(all="ignore"):
        made = record.reference(
            *(as_reference_input(d, raw=raw) for d in data), **record.complete(sample.attrs)
        )
    return types, list(made) if isinstance(made, tuple) else [made]


def check_results(types: tuple[Type, ...], results: list[Any], *, wide: bool = False) -> None:
    """Compare types; ``wide`` operands (f64) may make wider results, rounded at the op's border."""
    assert len(types) == len(results)
    for type_, made in zip(types, results, strict=True):
        if isinstance(type_, StateType):
            assert set(made) == {name for name, _ in type_.fields}
        elif isinstance(type_.dtype, Block):
            assert isinstance(made, BlockArray)
            assert made.format == type_.dtype
            assert made.shape == type_.concrete({})
            assert made.scales.shape == type_.dtype.scale_shape(made.shape)
        else:
            assert np.shape(made) == type_.concrete({})
            fitting = [type_.dtype.numpy, widened(type_.dtype)]
            if wide and type_.dtype.is_float:
                fitting.append(F64.numpy)
            assert np.asarray(made).dtype in fitting


def widened(dtype: Scalar) -> np.dtype[Any]:
    """Floats narrower than f32 are computed in f32 and rounded at the op's border."""
    return F32.numpy if dtype.is_float and dtype.bits < 32 else dtype.numpy


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_a_sample(name: str) -> None:
    assert BY_NAME[name], f"op {name!r} has no sample: add a line to SAMPLES, tests/op_samples.py"


def test_every_sample_is_of_an_op() -> None:
    assert set(BY_NAME) == set(OPS)


@pytest.mark.parametrize("name", NAMES)
def test_every_op_says_what_it_does(name: str) -> None:
    text = OPS[name].reference.__doc__ or ""
    first = text.strip().splitlines()[0] if text.strip() else ""
    assert first, f"the reference of {name!r} needs a docstring"
    assert len(first.split()) >= 3
    assert first.endswith((".", ":"))


@pytest.mark.parametrize("env", SETTINGS, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_the_inferred_type_is_that_of_the_reference(sample: Sample, env: dict[str, int]) -> None:
    symbolic = infer_types(sample.name, sample.types, sample.attrs)
    concrete = sample.at(env)
    types, results = run(concrete, concrete.data(seeded(sample)))
    check_results(types, results)
    for general, special in zip(symbolic, types, strict=True):
        if isinstance(general, StateType):
            assert general == special
        else:
            assert isinstance(special, TensorType)
            assert (general.concrete(env), general.dtype) == (special.concrete({}), special.dtype)
            round_to(results[symbolic.index(general)], Value("%0", special))


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_references_leave_their_operands_alone(sample: Sample) -> None:
    concrete = sample.at(SETTINGS[1])
    data = concrete.data(seeded(sample))
    copies = concrete.data(seeded(sample))
    run(concrete, data)
    for one, other in zip(data, copies, strict=True):
        if isinstance(one, dict):
            assert all(np.array_equal(one[k], other[k]) for k in one)
        elif isinstance(one, BlockArray):
            assert np.array_equal(one.codes, other.codes)
        else:
            assert np.array_equal(one, other)


def as_op(sample: Sample) -> Op:
    operands = []
    for i, type_ in enumerate(sample.types):
        paged = replace(type_, page_size=PAGE_SIZE) if isinstance(type_, StateType) else type_
        operands.append(Value(f"%{i}", paged))
    types = infer_types(sample.name, [v.type for v in operands], sample.attrs)
    results = tuple(Value(f"%r{i}", t) for i, t in enumerate(types))
    return Op(sample.name, tuple(operands), results, attrs_of(sample.attrs))


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_costs_are_counts_that_grow_with_sizes(sample: Sample) -> None:
    op, record = as_op(sample), op_def(sample.name)
    for symbol in SYMBOLS:
        before = (0, 0)
        for size in (1, 2, 3, 5, 8, 16, 33):
            sizes = op_sizes(op, {**SETTINGS[2], symbol: size})
            flops, moved = record.flops(sizes), record.bytes(sizes)
            assert type(flops) is int
            assert type(moved) is int
            assert flops >= before[0]
            assert moved >= before[1]
            before = (flops, moved)


@pytest.mark.parametrize(
    ("text", "attrs", "flops"),
    [
        (("linear", "f32[T,8]", "f32[12,8]"), {}, 2 * 5 * 8 * 12),
        (("matmul", "f32[2,T,8]", "f32[2,8,3]"), {}, 2 * 2 * 5 * 8 * 3),
        (("conv2d", "f32[B,4,6,6]", "f32[8,2,3,3]"), {"groups": 2}, 2 * 2 * 8 * 16 * 2 * 9),
        (("sdpa", "f32[4,T,8]", "f32[2,6,8]", "f32[2,6,3]"), {}, 2 * 4 * 5 * 6 * (8 + 3)),
        (("reshape", "f32[T,8]"), {"shape": (8, dim("T"))}, 0),
        (("add", "f32[T,8]", "f32[8]"), {}, 40),
    ],
)
def test_flops_of_known_ops(text: tuple[str, ...], attrs: dict[str, Any], flops: int) -> None:
    name, *operands = text
    sample = Sample(name, tuple(Operand(read_type(o)) for o in operands), attrs)
    assert op_def(name).flops(op_sizes(as_op(sample), SETTINGS[1])) == flops


@pytest.mark.parametrize(
    ("tokens", "batch", "pages", "window", "seen"),
    [
        (1, 1, 4, 0, 16),  # decode: one query sees all
        (16, 1, 4, 0, 16 * 17 // 2),  # prefill: query i sees i + 1
        (8, 1, 4, 0, sum(range(9, 17))),  # a second chunk
        (8, 2, 4, 0, 2 * sum(range(13, 17))),
        (16, 1, 4, 3, 16 * 3),
        (64, 1, 4, 0, 64 * 65 // 2),  # more tokens than pages: they are the context themselves
    ],
)
def test_flops_of_attention_count_the_keys_seen(
    tokens: int, batch: int, pages: int, window: int, seen: int
) -> None:
    sample = replace(BY_NAME["attention"][0], attrs={"window": window})
    env = {"T": tokens, "B": batch, "P": pages}
    assert op_def("attention").flops(op_sizes(as_op(sample), env)) == 2 * 8 * (8 + 8) * seen


def refusal(name: str, types: list[Type], attrs: dict[str, Any]) -> str:
    with pytest.raises(TypeMismatch) as refused:
        infer_types(name, types, attrs)
    return refused.value.what


@pytest.mark.parametrize("name", NAMES)
def test_wrong_arity_names_the_op(name: str) -> None:
    record = OPS[name]
    full = max(BY_NAME[name], key=lambda s: len(s.operands))
    if not any(o.variadic for o in record.operands):
        many = [*full.types, *([tensor(F32)] * (len(record.operands) + 1 - len(full.types)))]
        assert refusal(name, many, full.attrs).startswith(f"{name}(")
    if record.operands:
        assert refusal(name, [], full.attrs).startswith(name)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_attributes_name_the_op(name: str) -> None:
    sample = BY_NAME[name][0]
    assert refusal(name, sample.types, {**sample.attrs, "colour": 1}) == (
        f"{name} has no attribute 'colour'"
    )
    for spec in OPS[name].attrs:
        bad = {**sample.attrs, spec.name: ("a", ("b",))}
        assert refusal(name, sample.types, bad).startswith(name)
        if spec.is_required:
            rest = {k: v for k, v in sample.attrs.items() if k != spec.name}
            assert refusal(name, sample.types, rest) == f"{name} needs the attribute {spec.name!r}"


@pytest.mark.parametrize("name", [n for n in NAMES if OPS[n].operands])
def test_a_state_for_a_tensor_and_a_tensor_for_a_state_name_the_op(name: str) -> None:
    sample = BY_NAME[name][0]
    for i, type_ in enumerate(sample.types):
        other = tensor(F32, 4) if isinstance(type_, StateType) else STATE
        types = [*sample.types[:i], other, *sample.types[i + 1 :]]
        assert refusal(name, types, sample.attrs).startswith(name)


MUTANTS = (BOOL, I32, U8, F32, F64, BF16)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_whatever_element_type_is_accepted_can_be_computed(sample: Sample) -> None:
    concrete = sample.at(SETTINGS[1])
    if any(isinstance(t, StateType) for t in concrete.types):
        return
    rng = seeded(sample)
    for dtype in MUTANTS:
        everywhere = list(range(len(concrete.operands)))
        for places in (everywhere, *([i] for i in everywhere)):
            _check_mutant(_retyped(concrete, places, dtype), rng)


def _retyped(sample: Sample, places: list[int], dtype: Scalar) -> Sample:
    operands = list(sample.operands)
    for i in places:
        type_ = operands[i].type
        assert isinstance(type_, TensorType)
        bound = operands[i] if operands[i].sign == "<" else Operand(type_, "<", 4)
        operands[i] = replace(bound, type=type_.with_dtype(dtype))
    return replace(sample, operands=tuple(operands))


def _check_mutant(mutant: Sample, rng: np.random.Generator) -> None:
    what = ""
    try:
        infer_types(mutant.name, mutant.types, mutant.attrs)
    except TypeMismatch as refused:
        what = refused.what
    if what:
        assert what.startswith(mutant.name)
        return
    wide = any(isinstance(t, TensorType) and t.dtype == F64 for t in mutant.types)
    check_results(*run(mutant, mutant.data(rng)), wide=wide)


@settings(deadline=None)
@given(st.data())
def test_whatever_shape_is_accepted_can_be_computed(data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(SAMPLES)).at(data.draw(st.sampled_from(SETTINGS)))
    if not sample.operands or any(isinstance(t, StateType) for t in sample.types):
        return
    operands = list(sample.operands)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, len(operands) - 1))
        type_ = operands[place].type
        assert isinstance(type_, TensorType)
        shape = list(type_.concrete({}))
        kind = data.draw(st.sampled_from(["resize", "drop", "insert"]))
        at = data.draw(st.integers(0, max(len(shape) - 1, 0)))
        size = data.draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
        if kind == "insert":
            shape.insert(at, size)
        elif shape and kind == "resize":
            shape[at] = size
        elif shape:
            del shape[at]
        operands[place] = replace(operands[place], type=tensor(type_.dtype, *shape))
    # Row 0 exists whatever became of the table.
    operands = [replace(o, bound=1) if o.sign == "<" else o for o in operands]
    blocks = [(o.type.dtype, o.type.rank) for o in operands if isinstance(o.type, TensorType)]
    if all(rank >= len(d.block) for d, rank in blocks if isinstance(d, Block)):
        _check_mutant(replace(sample, operands=tuple(operands)), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("sample", "what"),
    [
        (("linear", "f32[T,8]", "f32[8,12]"), "(it is stored [out, in])"),
        (("linear", "bf16[T,8]", "f32[12,8]"), "bf16 by f32, which is no narrower"),
        (("linear", "f8e4m3/row:f32[T,8]", "f8e4m3/row:f32[12,8]"), "linear of f8e4m3/row:f32"),
        (("linear", "f8e4m3/row:f32[T,8]", "bf16[12,8]"), "linear of f8e4m3/row:f32 by bf16"),
        (("linear", "f8e4m3/4x4:f32[8,8]", "f8e4m3/row:f32[12,8]"), "its blocks span rows"),
        (("matmul", "f32[4,8]", "f32[12,8]"), "inner sizes differ, 8 and 12"),
        (("add", "f32[4]", "bf16[4]"), "add: element types differ: bf16, f32"),
        (("add", "f32[T]", "f32[B]"), "add: sizes of dim 0 differ: B, T"),
        (("sub", "bool[4]", "bool[4]"), "sub: needs numbers"),
        (("exp", "i32[4]"), "exp: needs floating point"),
        (("add", "i8/32:f16[32]", "i8/32:f16[32]"), "add cannot make a block format"),
        (("where", "f32[4]", "f32[4]", "f32[4]"), "where: the condition of where is bool"),
    ],
)
def test_wording_of_refusals(sample: tuple[str, ...], what: str) -> None:
    name, *operands = sample
    assert what in refusal(name, [read_type(o) for o in operands], {})


def test_an_unknown_op_names_near_ones() -> None:
    with pytest.raises(TypeMismatch, match="unknown op 'rmsnorm'") as refused:
        op_def("rmsnorm")
    assert refused.value.advice == "did you mean rms_norm?"


def test_ties_go_to_the_lower_index() -> None:
    x = np.array([[1, 3, 3, 0, 3], [2, 2, 2, 2, 2]], np.float32)
    for values in (x, x.astype(np.int64), x.astype(np.uint8), x > 2):
        assert OPS["argmax"].reference(values, dim=1).tolist() == [1, 0]
        top, index = OPS["topk"].reference(values, k=3)
        assert index.tolist() == [[1, 2, 4], [0, 1, 2]]
        assert np.array_equal(top, np.take_along_axis(values, index, 1))


def test_softmax_of_a_masked_row_is_zero() -> None:
    x = np.array([[-np.inf, -np.inf], [0.0, -np.inf]], np.float32)
    assert OPS["softmax"].reference(x).tolist() == [[0, 0], [1, 0]]


def test_attention_over_pages_is_attention_over_the_sequence() -> None:
    sample = BY_NAME["attention"][0].at({"T": 6, "B": 1, "P": 2})
    q, state, *_ = sample.data(np.random.default_rng(1))
    starts, lengths, pages = np.array([0, 6]), np.array([6]), np.array([[2, 1]])
    made = OPS["attention"].reference(q, state, starts, lengths, pages)
    k, v = (state[n][[2, 1]].reshape(8, 4, 8)[:6].swapaxes(0, 1) for n in ("k", "v"))
    wanted = OPS["sdpa"].reference(q.swapaxes(0, 1), k, v, causal=True)
    np.testing.assert_allclose(made, wanted.swapaxes(0, 1), rtol=1e-5, atol=1e-6)


def test_kv_write_writes_only_its_slots() -> None:
    sample = BY_NAME["kv_write"][0].at({"T": 3})
    state, k, v, _ = sample.data(np.random.default_rng(2))
    slots = np.array([5, 0, 2])
    made = OPS["kv_write"].reference(state, k, v, slots)
    for name, value in (("k", k), ("v", v)):
        flat, old = made[name].reshape(-1, 4, 8), state[name].reshape(-1, 4, 8)
        assert np.array_equal(flat[slots], value)
        rest = [i for i in range(len(flat)) if i not in slots]
        assert np.array_equal(flat[rest], old[rest])


@given(st.integers(1, 4), st.integers(1, 3))
def test_unpermute_rope_inverts_the_permutation(heads: int, pairs: int) -> None:
    rows = np.arange(heads * pairs * 2)[:, None]
    stored = rows.reshape(heads, 2, pairs, 1).swapaxes(1, 2).reshape(rows.shape)
    assert np.array_equal(OPS["unpermute_rope"].reference(stored, heads=heads), rows)


def test_concat_rows_of_blocks_is_that_of_their_values() -> None:
    rng = np.random.default_rng(3)
    for text in ("i8/32:f16", "u4/32:f16+f16", "i8/4x4:f32", "i8/row:f32"):
        block = read_type(f"{text}[8,32]").dtype  # type: ignore[union-attr]
        assert isinstance(block, Block)
        parts = [quantize(rng.standard_normal((n, 32)), block) for n in (8, 4)]
        made = OPS["concat_rows"].reference(*parts)
        assert np.array_equal(made.dequantize(), np.concatenate([p.dequantize() for p in parts]))
    rows = [read_type("f8e4m3/4x4:f32[6,8]")] * 2
    assert "its blocks span rows" in refusal("concat_rows", rows, {})


def test_the_builder_names_results_and_drops_defaults() -> None:
    builder = Builder(start=7)
    x = Value("%x", tensor(F32, "T", 8))
    y = builder.emit("softmax", x, dim=-1)
    values, index = builder.emit_many("topk", y, k=2)
    assert [v.name for v in (y, values, index)] == ["%7", "%8", "%9"]
    assert [op.attrs for op in builder.ops] == [(), (("k", 2),)]
    assert with_types(builder.ops[0], [tensor(F32, 3)]).result.type == tensor(F32, 3)


def test_registering_twice_is_a_fault() -> None:
    from metainfer.ir.ops.record import op

    record: OpDef = OPS["add"]
    with pytest.raises(ValueError, match="op 'add' is registered twice"):
        op("add", infer=record.infer)(record.reference)
    assert OPS["add"] is record


def test_random_data_holds_ties() -> None:
    values = scalar_data(F32, (64,), np.random.default_rng(0))
    assert len(np.unique(values)) < 64
