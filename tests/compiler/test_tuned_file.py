"""The file of measured times, keys in it, and costs by it."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.backends.registry import installed
from metainfer.compiler.cost import CostModel
from metainfer.compiler.tuning.keys import device_key, key_of
from metainfer.compiler.tuning.measured import Measured, parse_sizes
from metainfer.compiler.tuning.tuned_file import Section, read_sections, write_sections
from metainfer.hardware.load import load_machine
from metainfer.ir.errors import TuningError
from metainfer.ir.graph import Op, Value
from metainfer.ir.parser import parse_graph

CPU = load_machine("cpu").device(0)
LINEAR = "linear(f32[T,64], @f32[32,64]) : f32[T,32]"
KERNEL = installed().kernels.get("cpu.linear_f32")


def linear(rows: str = "T") -> Op:
    graph = parse_graph(f"""graph g(%x: f32[{rows},64], %w: f32[32,64]) {{
      %0 = linear(%x, %w) : f32[{rows},32]
      return %0
    }}""")
    (op,) = graph.ops
    return replace(op, operands=(op.operands[0], Value("@w", op.operands[1].type)))


def test_a_key_names_no_value_and_calls_its_rows_t() -> None:
    key = key_of(linear())
    assert key.text == LINEAR
    sampled = key_of(linear("R"))
    assert sampled.text == LINEAR
    assert sampled.sizes({"T": 512, "R": 3}) == {"T": 3}
    assert sampled.env({"T": 8}, {"T": 512, "R": 3}) == {"T": 512, "R": 8}
    half = key_of(linear("ceildiv(T,2)"))
    assert half.text == LINEAR
    assert half.sizes({"T": 5}) == {"T": 3}
    assert half.env({"T": 3}, {"T": 5}) == {"T": 5}


def test_a_packing_is_no_part_of_a_key() -> None:
    op = linear()
    weight = op.operands[1]
    packed = replace(weight, type=replace(weight.tensor, layout="cpu.f32_n16"))
    assert key_of(replace(op, operands=(op.operands[0], packed))) == key_of(op)


def test_a_group_of_several_sizes_keeps_their_names() -> None:
    graph = parse_graph("""graph g(%x: f32[T,8], %rows: i32[R]) {
      %0 = gather(%x, %rows) : f32[R,8]
      return %0
    }""")
    key = key_of(graph.ops[0])
    assert key.text == "gather(f32[T,8], i32[R]) : f32[R,8]"
    assert key.sizes({"T": 5, "R": 2, "B": 1}) == {"R": 2, "T": 5}


def test_devices_of_one_kind_have_one_key_whatever_they_are_called() -> None:
    card = load_machine("1xh200").device(0)
    renamed = replace(card, name="other", title="Other", product_names=("Other",))
    assert device_key(renamed) == device_key(card)
    assert device_key(replace(card, smem_per_block_bytes=101_376)) != device_key(card)
    assert device_key(load_machine("8xh20").device(0)) != device_key(card)


# --- the file ----------------------------------------------------------------------------------

SECTION = Section(
    device_key(CPU), {"torch": "2.13.0"}, {"cpu": "0a"}, "a processor",
    {LINEAR: {"cpu.linear_f32": {"T=1": 3.5, "T=64": "failed: by signal 6"}}},
)  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_sections(path, [SECTION, replace(SECTION, libraries={})])
    assert read_sections(path) == [SECTION, replace(SECTION, libraries={})]
    assert '"cpu.linear_f32": {"T=1": 3.5, "T=64": "failed: by signal 6"}' in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("3.5", "-1", f"sections[0].groups.{LINEAR}.cpu.linear_f32.T=1: microseconds above 0"),
        ("3.5", "true", "microseconds above 0 are wanted, found True"),
        ('"T=1"', '"T"', "sizes such as T=16 are wanted, found 'T'"),
        ('"a processor"', "7", "sections[0].measured_on: a str is wanted, found 7"),
        ('"0a"', "7", "sections[0].sources.cpu: text is wanted"),
        ('"schema": 1', '"schema": 9', "schema: schema 1 is read, found 9"),
        ('"groups": {', '"groups": {,', "is no JSON"),
    ],
)
def test_damage_is_named_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "t.json"
    write_sections(path, [SECTION])
    whole = path.read_text()
    assert whole.count(old) == 1
    path.write_text(whole.replace(old, new))
    with pytest.raises(TuningError) as caught:
        read_sections(path)
    assert said in caught.value.what
    assert caught.value.exit_code == 2
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if new in text)
    assert caught.value.origin == f"{path}:{line}"


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda s: (
            st.lists(s)
            | st.dictionaries(
                st.sampled_from(
                    ["schema", "sections", "device", "groups", "libraries", "T=1", "x"]
                ),
                s,
            )
        ),
    )
)
def test_no_content_is_an_internal_error(data: object) -> None:
    from metainfer.compiler.tuning.tuned_file import sections_of

    wrapped = {"schema": 1, "sections": [SECTION.to_dict(), data]}
    for given_data in (data, wrapped):
        # What is not damaged is read; whatever else it is, it is told.
        with suppress(TuningError):
            sections_of(given_data, json.dumps(given_data, indent=1), "t.json")


# --- costs ---------------------------------------------------------------------------------------


def measured(**figures: float) -> Measured:
    sizes: dict[str, float | str] = {f"T={name[1:]}": us for name, us in figures.items()}
    return Measured({LINEAR: {KERNEL.name: sizes}}, "measured here", "t.json")


def test_measured_sizes_are_taken_as_they_are_and_others_between_them_by_the_models_shape() -> None:
    plain = CostModel(installed().layouts)
    tuned = replace(plain, measured=measured(t4=400.0, t64=12_800.0))

    def seconds(model: CostModel, rows: int) -> tuple[float, str]:
        cost = model.kernel(KERNEL, linear(), CPU, {"T": rows})
        return cost.seconds, cost.basis

    assert seconds(tuned, 4) == (pytest.approx(400e-6), "measured here")
    assert seconds(tuned, 64) == (pytest.approx(12_800e-6), "measured here")
    ratios = [seconds(tuned, n)[0] / seconds(plain, n)[0] for n in (4, 16, 64)]
    # 16 is half-way from 4 to 64 in logarithms.
    assert ratios[1] == pytest.approx((ratios[0] * ratios[2]) ** 0.5)
    assert seconds(tuned, 16)[1] == "measured here, between T=4 and 64"
    for outside in (2, 128):
        assert seconds(tuned, outside) == seconds(plain, outside)
    assert seconds(plain, 4)[1] == "analytic"


@given(st.integers(1, 64))
def test_a_price_between_sizes_lies_between_their_ratios(rows: int) -> None:
    plain = CostModel(installed().layouts)
    tuned = replace(plain, measured=measured(t1=10.0, t8=20.0, t64=5000.0))

    def ratio(n: int) -> float:
        costs = [m.kernel(KERNEL, linear(), CPU, {"T": n}).seconds for m in (tuned, plain)]
        return costs[0] / costs[1]

    ends = (1, 8) if rows <= 8 else (8, 64)
    low, high = sorted(map(ratio, ends))
    assert low * 0.999 <= ratio(rows) <= high * 1.001


def test_sequences_that_move_with_the_rows_are_one_series() -> None:
    graph = parse_graph("""graph g(%q: f32[T,4,8], %s: i32[B+1], %l: i32[B], %p: i32[B,P]) {
      states { $kv: pages(k: f32[2,8], v: f32[2,8]) per token page 16 }
      %0 = attention(%q, $kv, %s, %l, %p) : f32[T,4,8]
      return %0
    }""")
    (op,) = graph.ops
    kernel = installed().kernels.get("cpu.attention_paged")
    figures: dict[str, float | str] = {
        "B=1 P=32 T=1": 7.0, "B=4 P=32 T=4": 11.0, "B=1 P=32 T=4": 13.0, "B=4 P=64 T=4": 17.0,
    }  # fmt: skip
    known = Measured({key_of(op).text: {kernel.name: figures}}, "measured here")
    model = CostModel(installed().layouts, measured=known)

    def basis(tokens: int, batch: int, pages: int) -> tuple[float, str]:
        cost = model.kernel(kernel, op, CPU, {"T": tokens, "B": batch, "P": pages, "R": 1})
        return round(cost.seconds * 1e6, 6), cost.basis

    assert basis(4, 4, 32) == (11.0, "measured here")
    assert basis(4, 1, 32) == (13.0, "measured here")
    assert basis(2, 2, 32)[1] == "measured here, between T=1 and 4"
    assert basis(4, 4, 128)[1] == "measured here, at P=64"
    assert basis(8, 8, 32)[1] == "analytic"
    assert basis(8, 1, 32)[1] == "analytic"


def test_a_kernel_that_failed_is_told(tmp_path: Path) -> None:
    known = Measured({LINEAR: {KERNEL.name: {"T=1": 2.0, "T=2": "failed: by signal 6"}}})
    assert CostModel(installed().layouts, measured=known).failure(KERNEL, linear()) == "by signal 6"
    assert parse_sizes("fixed") == ()
