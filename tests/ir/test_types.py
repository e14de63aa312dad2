"""Types of values: text, sizes and fields."""

import pytest
import strategies
from hypothesis import given

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import BF16, F32, I8, parse_dtype
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Binding, Graph, Module, Op, Value, attrs_of
from metainfer.ir.step import STEP_FIELDS, step_symbols, step_value
from metainfer.ir.types import PARTIAL, Mesh, Sharding, StateType, TensorType, tensor

KV = StateType("pages", (("k", tensor(F32, 3, 64)), ("v", tensor(F32, 3, 32))))


def test_text_of_types() -> None:
    x = TensorType(
        (dim("T"), dim(576)), BF16, Sharding.of({"tp": 1, "ep": PARTIAL}), "cpu.u4g32_n8"
    )
    assert str(x) == 'bf16[T,576] @ (ep=partial, tp=S1) as "cpu.u4g32_n8"'
    assert str(tensor(F32)) == "f32[]"
    assert str(KV) == "pages(k: f32[3,64], v: f32[3,32]) per token"
    assert str(Mesh((("pp", 2), ("tp", 4)))) == "(pp=2, tp=4)"
    assert Mesh((("pp", 2), ("tp", 4))).num_ranks == 8
    assert Mesh().num_ranks == 1


def test_a_sharding_has_one_form() -> None:
    made = Sharding.of({"tp": 1, "ep": PARTIAL})
    assert made == Sharding.of({"ep": PARTIAL, "tp": 1})
    assert (made.placement("tp"), made.placement("ep"), made.placement("dp")) == (1, PARTIAL, None)


@given(strategies.tensor_types())
def test_a_tensor_type_counts_its_own_bytes(type_: TensorType) -> None:
    env = {name: 256 for name in strategies.SYMBOLS}
    shape = type_.concrete(env)
    assert type_.rank == len(shape)
    assert type_.with_shape(type_.shape) == type_
    assert type_.with_dtype(I8).dtype is I8
    positive = all(n >= 0 for n in shape)
    block = getattr(type_.dtype, "block", ())
    if positive and len(block) <= type_.rank:
        assert type_.bytes_at(env) == type_.dtype.size_bytes(shape) >= 0


def test_sizes_of_states() -> None:
    assert KV.entry_bytes() == 4 * 3 * (64 + 32)
    assert KV.field_type("v") == tensor(F32, 3, 32)
    narrow = StateType("pages", (("k", tensor(parse_dtype("i8/32:f16"), 3, 64)),))
    assert narrow.entry_bytes() == 3 * (64 + 2 * 2)
    with pytest.raises(TypeMismatch, match="state has no field 'w'"):
        KV.field_type("w")
    with pytest.raises(TypeMismatch, match="unknown kind of state 'heap'"):
        StateType("heap", ())
    with pytest.raises(TypeMismatch, match="not per 'day'"):
        StateType("slot", (), "day")


def test_values_know_what_they_are() -> None:
    x, weight, state = Value("%x", tensor(F32, 3)), Value("@w", tensor(F32, 3)), Value("$kv", KV)
    assert (x.is_weight, weight.is_weight, state.is_state) == (False, True, True)
    assert x.tensor is x.type
    assert state.state is KV
    with pytest.raises(TypeMismatch, match=r"\$kv is a state where a tensor is needed"):
        _ = state.tensor
    with pytest.raises(TypeMismatch, match="%x is a tensor where a state is needed"):
        _ = x.state


def test_graphs_know_their_values() -> None:
    x, y = Value("%x", tensor(F32, 3)), Value("%0", tensor(F32, 3))
    op = Op("add", (x, x), (y,), attrs_of({"b": 1, "a": 2}))
    graph = Graph("main", inputs=(x,), ops=(op,), outputs=(y,))
    assert op.attrs == (("a", 2), ("b", 1))
    assert graph.definitions() == {"%x": x, "%0": y}
    assert graph.producers() == {"%0": op}
    assert graph.uses() == {"%x": [op]}
    assert graph.returned() == {"%0"}
    module = Module("m", graphs=(graph,))
    assert module.with_graph(Graph("main")).main.ops == ()
    load = Graph("main", outputs=(y,))
    assert module.with_load(load).with_load(load).loads == (load,)
    with pytest.raises(TypeMismatch, match="module m has no graph 'block'") as refused:
        module.graph("block")
    assert refused.value.advice == "it has: main"
    pair = Op("f", (), (x, y))
    with pytest.raises(TypeMismatch, match="f has 2 results where one is needed"):
        _ = pair.result


def test_a_call_binds_names() -> None:
    call = Op("call", (), (), attrs_of({"prefix": "l.0.", "bind": (("tied", "embed"),)}))
    assert Binding.of(call).full_name("q") == "l.0.q"
    assert Binding.of(call).full_name("tied") == "embed"
    assert Binding.of(Op("call", (), ())).full_name("q") == "q"


def test_the_step_record_uses_only_its_symbols() -> None:
    symbols = {s.name for s in step_symbols(8, 4, 2)}
    used = {s for t in STEP_FIELDS.values() for size in t.shape for s in size.symbols()}
    assert used == symbols
    assert step_value("starts").tensor.shape == (dim("B") + 1,)
    with pytest.raises(TypeMismatch, match="the step record has no field 'rows'"):
        step_value("rows")
