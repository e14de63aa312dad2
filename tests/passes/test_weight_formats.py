"""Formats of weights: on request, and by kernels, time and memory."""

from dataclasses import replace

import pytest

from metainfer.backends.registry import installed
from metainfer.compiler.cost import CostModel
from metainfer.hardware import load_machine
from metainfer.hardware.machine import Machine
from metainfer.ir.dtypes import parse_dtype
from metainfer.ir.format_error import relative_rms
from metainfer.ir.graph import Module
from metainfer.ir.options import WEIGHTS, Options
from metainfer.ir.parser import parse_module
from metainfer.ir.strategy import Strategy
from metainfer.ir.verify import verify_module
from metainfer.passes.layout import layout
from metainfer.passes.quantize import quantize
from metainfer.passes.target import Decision, Report, Target
from metainfer.passes.weight_items import weight_items
from metainfer.passes.weight_options import Option, choose_within

# A layer: attention's projection, a router, experts; outside, a table that is the head too.
MODEL = """
module m {
  dim T in [1, 512]
  load layer {
    weights {
      @q.weight : {own}[{n},{k}]
      @router.weight : bf16[8,{k}]
      @norm.weight : bf16[{k}]
      @gate : {own}[8,{n},{k}]
      @up : {own}[8,{n},{k}]
      @down : {own}[8,{k},{n}]
    }
    %0 = {widen}(@q.weight) {dtype = "{act}"} : {act}[{n},{k}]
    %1 = {widen}(@gate) {dtype = "{act}"} : {act}[8,{n},{k}]
    %2 = {widen}(@up) {dtype = "{act}"} : {act}[8,{n},{k}]
    %3 = {widen}(@down) {dtype = "{act}"} : {act}[8,{k},{n}]
    %4 = cast(@router.weight) {dtype = "{act}"} : {act}[8,{k}]
    %5 = cast(@norm.weight) {dtype = "{act}"} : {act}[{k}]
    return %0, %4, %5, %1, %2, %3
  }
  load main {
    weights {
      @table : bf16[96,{k}]
    }
    %0 = cast(@table) {dtype = "{act}"} : {act}[96,{k}]
    return %0
  }
  block layer(%x: {act}[T,{k}]) {
    weights {
      @q.weight : {act}[{n},{k}]
      @router.weight : {act}[8,{k}]
      @norm.weight : {act}[{k}]
      @gate : {act}[8,{n},{k}]
      @up : {act}[8,{n},{k}]
      @down : {act}[8,{k},{n}]
    }
    %0 = linear(%x, @router.weight) : {act}[T,8]
    %1 = softmax(%0) {dim = 1} : {act}[T,8]
    %2, %3 = topk(%1) {k = 2} : {act}[T,2], i64[T,2]
    %4 = experts(%x, %3, %2, @gate, @up, @down) : {act}[T,{k}]
    %5 = linear(%4, @q.weight) : {act}[T,{n}]
    %6 = slice(%5) {dim = 1, start = 0, stop = {k}} : {act}[T,{k}]
    %7 = rms_norm(%6, @norm.weight) {eps = 1e-05} : {act}[T,{k}]
    return %7
  }
  main(%ids: i32[T]) {
    weights {
      @table : {act}[96,{k}]
    }
    %0 = embedding(%ids, @table) {dtype = "{act}"} : {act}[T,{k}]
{calls}
    %last = linear(%y{layers}, @table) : {act}[T,96]
    return %last
  }
}
"""


def model(own: str, act: str, n: int = 512, k: int = 256, layers: int = 1) -> Module:
    calls = []
    for i in range(layers):
        before = f"%y{i}" if i else "%0"
        calls.append(
            f'    %y{i + 1} = call(%{before[1:]}) {{block = "layer", prefix = "layers.{i}."}}'
            f" : {act}[T,{k}]"
        )
    widen = "dequantize" if "/" in own else "cast"
    text = MODEL
    for name, value in {
        "own": own, "act": act, "n": n, "k": k, "widen": widen, "calls": "\n".join(calls),
        "layers": layers,
    }.items():  # fmt: skip
        text = text.replace(f"{{{name}}}", str(value))
    return parse_module(text)


def machine(name: str, gib: float = 0.0, without: tuple[str, ...] = ()) -> Machine:
    """A known machine, maybe with another memory and without some features."""
    found = load_machine(name)
    first = found.devices[0]
    device = replace(
        first.device,
        memory_bytes=int(gib * 2**30) or first.device.memory_bytes,
        features=first.device.features - set(without),
    )
    return replace(found, devices=(replace(first, device=device), *found.devices[1:]))


def target(
    on: Machine, weights: str = "auto", phase: str = "decode", exact: bool = False
) -> Target:
    activations = "f32" if on.device(0).kind == "cpu" else "bf16"
    strategy = Strategy(phase, activations=activations, weights=weights, exact=exact)
    backends = installed()
    return Target(
        on, strategy, Options(weights=weights), backends.kernels, CostModel(backends.layouts),
        Report(),
    )  # fmt: skip


def chosen(module: Module, given: Target) -> dict[str, Decision]:
    """Decisions by weight; the module is verified too."""
    made = quantize(module, given)
    verify_module(made)
    found = {d.subject.split(" of ")[0]: d for d in given.report.decisions}
    for graph in made.graphs:
        for weight in graph.weights:
            if weight.name in found:
                assert str(weight.tensor.dtype) == found[weight.name].chosen
    return found


EXPERTS = ("@gate", "@up", "@down")


def test_items_are_what_one_kernel_reads() -> None:
    items = {i.weights: i for i in weight_items(model("bf16", "f32", layers=3))}
    assert set(items) == {("@q.weight",), ("@router.weight",), EXPERTS, ("@table",)}
    assert [i.is_router for i in items.values()] == [False, True, False, False]
    assert items["@table",].is_outer
    assert (items[EXPERTS].calls, items["@table",].calls) == (3, 1)
    assert len(items["@table",].readers) == 2


# --- on request ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "sizes", "linear", "experts"),
    [
        ("fp8", (512, 256), "f8e4m3/128x128:f32", "f8e4m3/128x128:f32"),
        ("fp8", (192, 96), "f8e4m3/row:f32", "f8e4m3/row:f32"),
        ("mxfp4", (512, 256), "f4e2m1/32:f8e8m0", "f4e2m1/32:f8e8m0"),
        ("mxfp4", (160, 80), "f8e4m3/row:f32", "f8e4m3/row:f32"),
        ("nvfp4", (160, 80), "f4e2m1/16:f8e4m3*f32", "f4e2m1/16:f8e4m3*f32"),
        ("fp8-32x32", (192, 96), "f8e4m3/32x32:f32", "f8e4m3/32x32:f32"),
        ("fp8-32x32", (160, 80), "f8e4m3/row:f32", "f8e4m3/row:f32"),
        ("int4", (512, 256), "u4/32:f16+f16", "u4/32:f16+f16"),
    ],
)
def test_requests(weights: str, sizes: tuple[int, int], linear: str, experts: str) -> None:
    found = chosen(model("bf16", "f32", *sizes), target(machine("cpu"), weights))
    assert found["@q.weight"].chosen == linear
    assert {found[name].chosen for name in EXPERTS} == {experts}
    assert found["@router.weight"].chosen == "bf16"
    assert "a router's scores choose the experts" in found["@router.weight"].reason
    assert found["@table"].chosen == ("i8/32:f16" if weights == "int4" else "bf16")
    assert "@norm.weight" not in found
    budget = dict(found["@q.weight"].data)["relative_rms"]
    assert budget == pytest.approx(relative_rms(parse_dtype(linear), parse_dtype("bf16")))


def test_a_request_overrules_a_narrower_checkpoint() -> None:
    found = chosen(model("u4/32:f16+f16", "f32"), target(machine("cpu"), "fp8"))
    assert found["@q.weight"].chosen == "f8e4m3/128x128:f32"
    assert "a relative error of 0.0264 is to be expected" in found["@q.weight"].reason


@pytest.mark.parametrize(
    ("weights", "own"),
    [
        ("fp8", "f8e4m3/tensor:f32"),
        ("fp8", "f8e4m3/64x64:f8e8m0"),
        ("mxfp4", "f4e2m1/32:f8e8m0"),
        ("keep", "f4e2m1/32:f8e8m0"),
        ("keep", "f8e4m3/128x128:f32"),
    ],
)
def test_what_is_there_already_stays(weights: str, own: str) -> None:
    found = chosen(model(own, "f32"), target(machine("cpu"), weights))
    assert {found[n].chosen for n in ("@q.weight", *EXPERTS)} == {own}


def test_every_request_is_known_to_the_pass() -> None:
    for weights in WEIGHTS:
        given = target(machine("cpu"), weights)
        assert chosen(model("bf16", "f32"), given)["@q.weight"].reason


# The budget of a format is known before any weight is: normal numbers, to three digits.
@pytest.mark.parametrize(
    ("format", "source", "error"),
    [
        ("f8e4m3/128x128:f32", None, 0.0264),
        ("f8e4m3/row:f32", None, 0.0264),
        ("f8e4m3/128:f8e8m0", None, 0.0265),
        ("f4e2m1/32:f8e8m0", None, 0.1157),
        ("f4e2m1/16:f8e4m3*f32", None, 0.0951),
        ("f8e4m3/32x32:f32", None, 0.0264),
        ("i8/32:f16", None, 0.0054),
        ("u4/32:f16+f16", None, 0.0783),
        ("bf16", None, 0.0017),
        ("bf16", "f4e2m1/32:f8e8m0", 0.0),
        ("f32", "f4e2m1/16:f8e4m3*f32", 0.0),
        ("f8e4m3/row:f8e8m0", "f4e2m1/32:f8e8m0", 0.0),
        ("f32", "f8e4m3/128x128:f32", 0.0),
    ],
)
def test_error_budgets(format: str, source: str | None, error: float) -> None:
    before = parse_dtype(source) if source else None
    assert relative_rms(parse_dtype(format), before) == pytest.approx(error, abs=5e-5)


# --- by kernels, time and memory -----------------------------------------------------------------


# Faults: MXFP4 falls to what happens to be there; a load-time conversion outgrows the memory.
FP4, FP8, BARE = "f4e2m1/32:f8e8m0", "f8e4m3/row:f8e8m0", ("triton",)


@pytest.mark.parametrize(
    ("hw", "gib", "without", "format", "packing", "words"),
    [
        # Codes are streamed as they are; of many rows the library multiplies what they become.
        ("8xl20", 24.0, (), FP4, "triton.words", "next is f8e4m3/row:f8e8m0"),
        ("8xpcie", 0.0, (), FP4, "triton.words", "next is f8e4m3/row:f8e8m0 as triton.words"),
        # Without Triton, the fp8 units read half the bytes of bf16: e2m1 is exact in e4m3.
        ("8xl20", 24.0, BARE, FP8, "cuda.fp8_cols", "next is f4e2m1/32:f8e8m0 as torch.dense_bf16"),
        ("8xpcie", 0.0, BARE, FP8, "cuda.fp8_cols", "a relative error of 0.0000"),
        # Too small for that: the codes stay, at a price that is named.
        ("8xl20", 12.0, BARE, FP4, "torch.codes", "quicker is f8e4m3/row:f8e8m0"),
        ("8xl20", 24.0, (*BARE, "fp8_mma"), FP4, "torch.codes", "all weights so do not fit 18.3"),
        # No fp8 units, but room.
        ("8xl20", 48.0, (*BARE, "fp8_mma"), FP4, "torch.dense_bf16", "the checkpoint's own format"),
    ],
)
def test_mxfp4_by_card_and_memory(
    hw: str, gib: float, without: tuple[str, ...], format: str, packing: str, words: str
) -> None:
    for phase in ("prefill", "decode"):
        given = target(machine(hw, gib, without), phase=phase)
        made = quantize(dense(FP4, 80), given)
        (decision,) = given.report.decisions
        assert (decision.chosen, words in decision.reason) == (format, True), decision.reason
        assert dict(decision.data)["relative_rms"] == 0.0
        packed = layout(made, given)
        verify_module(packed)
        (weight,) = packed.graph("layer").weights
        assert weight.tensor.layout == packing
        held = resident(packed, given)
        assert held <= given.device.usable_bytes * given.options.memory_fraction
        assert held == dict(decision.data)["bytes"]
        smaller = [d for d in given.report.decisions if d.chosen == "smaller packings"]
        if packing == "torch.codes":
            assert "GiB are there for them" in smaller[0].reason


def test_exactness_forbids_conversions_that_round() -> None:
    given = target(machine("8xl20"), exact=True)
    quantize(dense(FP4, 2), given)
    assert given.report.decisions[0].chosen in (FP4, "f32", "bf16")
    assert "fp8_cols" not in given.report.decisions[0].reason


def test_whole_number_codes_are_kept_where_a_kernel_reads_them() -> None:
    found = chosen(model("u4/32:f16+f16", "f32"), target(machine("cpu")))
    assert {found[n].chosen for n in ("@q.weight", *EXPERTS)} == {"u4/32:f16+f16"}


# Fault: fp8 blocks of 128 x 128 on a card without block scales: another way, with its memory.
def test_fp8_blocks_on_a_card_without_block_scales() -> None:
    given = target(machine("8xl20"))
    quantize(dense("f8e4m3/128x128:f32", 8), given)
    decision = given.report.decisions[0]
    assert decision.chosen in ("f8e4m3/128x128:f32", "bf16")
    assert "392.0 MiB" in decision.reason
    assert "torch.dense_bf16" in decision.reason or "it is" in decision.reason


def dense(own: str, layers: int) -> Module:
    """One linear of 14336 x 14336 a layer: 205 million numbers."""
    size = 14336
    calls = [
        f'    %{i + 1} = call(%{i or "x"}) {{block = "layer", prefix = "layers.{i}."}}'
        f" : bf16[T,{size}]"
        for i in range(layers)
    ]
    return parse_module(f"""
module m {{
  dim T in [1, 512]
  load layer {{
    weights {{
      @w : {own}[{size},{size}]
    }}
    %0 = dequantize(@w) {{dtype = "bf16"}} : bf16[{size},{size}]
    return %0
  }}
  block layer(%x: bf16[T,{size}]) {{
    weights {{
      @w : bf16[{size},{size}]
    }}
    %0 = linear(%x, @w) : bf16[T,{size}]
    return %0
  }}
  main(%x: bf16[T,{size}]) {{
{chr(10).join(calls)}
    return %{layers}
  }}
}}""")


def resident(module: Module, given: Target) -> int:
    """Bytes of the weights of all calls as they lie in memory."""
    layer = module.graph("layer")
    one = sum(given.costs.resident_bytes(w.tensor) for w in layer.weights)
    return one * len(list(module.calls()))


def test_swaps_free_most_for_each_second() -> None:
    f32 = parse_dtype("f32")

    def option(seconds: float, size: int) -> Option:
        return Option(f32, seconds, size, 0.0, True, ("",))

    cheap, dear = [option(1.0, 100), option(1.1, 40)], [option(1.0, 100), option(9.0, 40)]
    assert choose_within([cheap, dear], [1, 1], 300) == [cheap[0], dear[0]]
    assert choose_within([cheap, dear], [1, 1], 150) == [cheap[1], dear[0]]
    assert choose_within([cheap, dear], [1, 1], 90) == [cheap[1], dear[1]]
    assert choose_within([cheap, dear], [1, 1], 10) == [cheap[1], dear[1]]
    # Seventy calls of the second: its bytes count as often, and so do its seconds.
    assert choose_within([cheap, dear], [1, 70], 7000) == [cheap[1], dear[1]]
