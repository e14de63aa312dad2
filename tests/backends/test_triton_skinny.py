"""Products of few rows: parts of sums, early launches, for cards that are not here."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch_samples import fused
from triton_groups import as_op, group_data, writing_group
from triton_products import EPILOGUES, STORED, gated, linear
from triton_worker import (
    CARDS,
    applies,
    check_compiles,
    check_interpreted,
    interpreted,
    refused,
    run_named,
)

from metainfer.backends.registry import installed
from metainfer.backends.torch.check import make_op
from metainfer.backends.triton import cross, skinny
from metainfer.backends.triton.fits import typed_call
from metainfer.backends.triton.linear import SKINNY_TILES
from metainfer.compiler.cost import CostModel
from metainfer.hardware.load import load_machine
from metainfer.ir.dtypes import BF16, parse_dtype
from metainfer.ir.parser import parse_graph
from metainfer.ir.types import tensor

# Rows, columns, inner: one row in 8 parts; two tiles of rows, 4 parts, odd; more tiles than parts.
SHAPES = ((1, 40, 4096), (19, 70, 2056), (5, 37, 197))
FORMATS = ("bf16", "f8e4m3/128x128:f32", "f4e2m1/32:f8e8m0", "u4/32:f16+f16", "i8/32:f16")


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_add_up(format_: str, shape: tuple[int, int, int]) -> None:
    op, data = linear(format_, shape)
    name = f"triton.linear_{STORED[format_]}_few16"
    assert refused(name, op) == []
    check_interpreted(name, op, data)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 64, 2048)], ids=str)
def test_a_head_is_part_of_the_sums(shape: tuple[int, int, int]) -> None:
    """Of one part, of several, of one that is shorter than the head."""
    op, data = linear("bf16", shape)
    check_interpreted("triton.linear_plain_head16", op, data)


HEADS = [
    ("head16", (1, 40, 4096)), ("all16", (2, 64, 2048)), ("all16", (19, 70, 2056)),
    ("head64", (5, 37, 1100)),
]  # fmt: skip


@pytest.mark.parametrize(("tile", "shape"), HEADS, ids=str)
def test_heads_of_codes(tile: str, shape: tuple[int, int, int]) -> None:
    """Parts that are the head, that go on behind it, and that end within its steps."""
    op, data = linear("f8e4m3/128x128:f32", shape)
    check_interpreted(f"triton.linear_codes_{tile}", op, data)


@pytest.mark.parametrize(
    ("tile", "format_", "shape", "reason"),
    [
        ("all16", "f8e4m3/128x128:f32", (1, 4096, 4096), ""),
        ("all16", "f8e4m3/128x128:f32", (1, 4096, 14336), "found 8 parts of 14336"),
        ("head16", "f8e4m3/128x128:f32", (1, 4096, 14336), ""),
        ("head16", "f8e4m3/128x128:f32", (1, 28672, 4096), "found 1 parts of 4096"),
        ("head16", "f8e4m3/32:f8e8m0", (1, 4096, 4096), "operand 1 is fp8 codes"),
    ],
    ids=str,
)
def test_heads_of_codes_are_for_sums_that_are_shared(
    tile: str, format_: str, shape: tuple[int, int, int], reason: str
) -> None:
    rows, columns, inner = shape
    types = [tensor(BF16, rows, inner), tensor(parse_dtype(format_), columns, inner)]
    found = refused(f"triton.linear_codes_{tile}", make_op("linear", types, {}, [1]))
    assert reason in " ".join(found) if reason else found == []


TAKEN = [
    ("bf16", 1, (4096, 4096), "codes_all16"), ("bf16", 16, (4096, 14336), "codes_head16"),
    ("bf16", 64, (4096, 14336), "codes_head64"), ("f8e4m3/128:f32", 1, (4096, 14336), "fp8_few16"),
    ("f8e4m3/128:f32", 64, (4096, 14336), "fp8_few32"),
    ("f8e4m3/128:f32", 64, (28672, 4096), "fp8_m64"),
]  # fmt: skip


@pytest.mark.parametrize(("x", "rows", "shape", "tile"), TAKEN, ids=str)
def test_the_tile_is_taken_that_was_fastest(
    x: str, rows: int, shape: tuple[int, int], tile: str
) -> None:
    columns, inner = shape
    types = [
        tensor(parse_dtype(x), rows, inner),
        tensor(parse_dtype("f8e4m3/128x128:f32"), columns, inner),
    ]
    op = make_op("linear", types, {} if x == "bf16" else {"dtype": "bf16"}, [1])
    found, card = installed(), CARDS["1xh200"]
    model, begin = CostModel(found.layouts), f"triton.linear_{tile.split('_')[0]}_"
    kernels = [k for k in found.kernels.all() if k.name.startswith(begin)]
    seconds = {
        k.name: model.kernel(k, op, card, {}).seconds
        for k in kernels
        if k.op == "linear" and refused(k.name, op) == []
    }
    assert min(seconds, key=seconds.__getitem__) == f"triton.linear_{tile}"


def test_a_head_is_read_of_weights_only() -> None:
    """What a launch of the same step writes may not be there yet."""
    kind, types = "linear", [tensor(BF16, 4, 1024), tensor(BF16, 64, 1024)]
    assert refused("triton.linear_plain_head16", make_op(kind, types, {}, [1])) == []
    (reason,) = refused("triton.linear_plain_head16", make_op(kind, types, {}, []))
    assert "operand 1 is a weight" in reason


@pytest.mark.parametrize(("kind", "bias", "follows", "attrs"), EPILOGUES[:4], ids=str)
def test_epilogues_follow_the_last_part(
    kind: str, bias: bool, follows: str, attrs: dict[str, Any]
) -> None:
    op, data = fused(kind, (2, 3), bias, follows, attrs, "bf16", (21, 1100))
    check_interpreted(f"triton.{kind}_plain_few16", op, data)


def test_a_residual_of_some_leading_dims_is_read_at_its_own_rows() -> None:
    """What is read before the sums are there waits for where its row lies."""
    graph = parse_graph("""graph g(%x: bf16[2,3,1100], %w: bf16[40,1100], %r: bf16[1,3,40]) {
      %0 = linear(%x, %w) : bf16[2,3,40]
      %1 = add(%0, %r) : bf16[2,3,40]
      return %1
    }""")
    op = as_op(graph, "linear_add")
    check_interpreted("triton.linear_add_plain_few16", op, group_data(op, 1))


@pytest.mark.parametrize("shape", [(3, 40, 1100), (70, 21, 72)], ids=str)
@pytest.mark.parametrize("tile", ["head16", "deep64"])
def test_gates(shape: tuple[int, int, int], tile: str) -> None:
    op, data = gated(*shape)
    name = f"triton.linear_silu_mul_plain_{tile}"
    assert all("operand 1 is a weight" in why for why in refused(name, op))
    check_interpreted(name, op, data)


@pytest.mark.parametrize(
    ("name", "tiles", "inner", "split"),
    [
        ("few16", 96, 4096, 1), ("few16", 64, 4096, 2), ("few16", 32, 2048, 4),
        ("few16", 2, 2048, 4), ("few16", 1, 512, 1), ("few16", 1, 65536, 128),
        ("head16", 96, 4096, 2), ("head16", 64, 4096, 4), ("head16", 2, 2048, 4),
    ],
)  # fmt: skip
def test_as_many_programs_as_processors_where_the_sums_are_long(
    name: str, tiles: int, inner: int, split: int
) -> None:
    (tile,) = (t for t in SKINNY_TILES["plain"] if t.name == name)
    assert skinny.split_of(tile, tiles, inner) == split


@pytest.mark.parametrize("name", ["few16", "head16", "deep64"])
@pytest.mark.parametrize(("columns", "inner"), [(128, 2048), (4096, 4096), (96, 65536)])
def test_the_plans_scratch_holds_the_parts(name: str, columns: int, inner: int) -> None:
    kernel = installed().kernels.get(f"triton.linear_plain_{name}")
    for rows in (1, 16, 17, 64, 300):
        types = [tensor(BF16, rows, inner), tensor(BF16, columns, inner)]
        call = typed_call(make_op("linear", types, {}, [1]), {}, {}, installed().layouts)
        (launch,) = kernel.binder.launches(call)
        partial = launch.arguments["partial"]
        used = 0 if launch.constants["SPLIT"] == 1 else partial.numel() * partial.element_size()
        assert kernel.workspace is not None
        assert used <= kernel.workspace(None)  # type: ignore[arg-type]


COMPILED = [("bf16", "head16"), ("bf16", "few64"), ("f8e4m3/128x128:f32", "few64"),
            ("f8e4m3/128x128:f32", "all16"), ("f4e2m1/32:f8e8m0", "few16"),
            ("u4/32:f16+f16", "few64")]  # fmt: skip


@pytest.mark.parametrize(("format_", "tile"), COMPILED)
def test_skinny_products_compile_for_cards_that_are_not_here(format_: str, tile: str) -> None:
    op, _ = linear(format_, (16, 576, 576))
    check_compiles(f"triton.linear_{STORED[format_]}_{tile}", op)


def test_launches_start_early_where_the_card_can(monkeypatch: pytest.MonkeyPatch) -> None:
    op, _ = linear("bf16", (1, 576, 576))
    kernel = installed().kernels.get("triton.linear_plain_few16")
    (launch,) = kernel.binder.launches(typed_call(op, {}, {}, installed().layouts))
    assert launch.is_early
    assert launch.options_on(early=True)["launch_pdl"] is True
    assert "launch_pdl" not in launch.options_on(early=False)
    assert launch.constants_on(early=True)["EARLY"] is True
    waits = []

    def assembled(ptx: str, arch: int) -> tuple[int, int]:
        waits.append(len(re.findall(r"griddepcontrol\.(?:wait|launch_dependents)", ptx)))
        return 0, 0

    monkeypatch.setattr(cross, "_assembled", assembled)
    for device in (CARDS["1xh200"], load_machine("8xl20").device(0)):
        cross._compiled(launch, device)
    assert waits == [2, 0]


def test_results_do_not_depend_on_which_part_is_last() -> None:
    """Parts are added up in their own order: two runs are equal to the bit."""
    op, data = linear("bf16", (3, 40, 4096))
    first, second = (
        interpreted(run_named, "triton.linear_plain_few16", op, data, {}) for _ in range(2)
    )
    assert np.array_equal(first[0], second[0])


TURNED_CASES = [
    ("linear_rope_kv_write", "few16", 64, 5, 192), ("linear_rope_kv_write", "head16", 128, 19, 640),
    ("linear_rope_kv_write", "deep64", 128, 70, 72), ("linear_rope_kv_write", "few16", 64, 1, 1024),
    ("linear_qk_norm_rope_kv_write", "turn16", 128, 3, 1100),
    ("linear_qk_norm_rope_kv_write", "turn64", 128, 65, 136),
    ("linear_qk_norm_rope_kv_write", "few16", 64, 2, 512),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tile", "width", "tokens", "inner"), TURNED_CASES)
def test_queries_keys_and_values_leave_a_product_turned_and_written(
    kind: str, tile: str, width: int, tokens: int, inner: int
) -> None:
    op, data = writing_group(kind, tokens, width, False, inner=inner)
    data[1] = (data[1].astype(np.float32) / inner**0.5).astype(data[1].dtype)
    name = f"triton.{kind}_plain_{tile}"
    assert all("is a weight" in why for why in refused(name, op))
    check_interpreted(name, op, data, {"T": tokens})


TURNED_CODES = [
    ("linear_rope_kv_write", "codes_few16", "f8e4m3/128x128:f32", 128, 640),
    ("linear_rope_kv_write", "codes_head16", "f8e4m3/128x128:f32", 64, 1024),
    ("linear_qk_norm_rope_kv_write", "codes_turn16", "f8e4m3/128x128:f32", 128, 1024),
    ("linear_qk_norm_rope_kv_write", "fp4_turn16", "f4e2m1/32:f8e8m0", 128, 512),
    ("linear_rope_kv_write", "int4_few16", "u4/32:f16+f16", 64, 512),
]


@pytest.mark.parametrize(("kind", "tile", "weight", "width", "inner"), TURNED_CODES)
def test_products_by_codes_leave_turned_and_written(
    kind: str, tile: str, weight: str, width: int, inner: int
) -> None:
    op, data = writing_group(kind, 3, width, False, inner=inner, weight=weight)
    op = replace(op, operands=(op.operands[0], replace(op.operands[1], name="@w"),
                               *op.operands[2:]))  # fmt: skip
    name = f"triton.{kind}_{tile}"
    assert refused(name, op) == []
    check_interpreted(name, op, data, {"T": 3})


@pytest.mark.parametrize("case", TURNED_CODES[2:4], ids=str)
def test_turned_products_by_codes_compile_for_cards_that_are_not_here(
    case: tuple[str, str, str, int, int],
) -> None:
    kind, tile, weight, width, inner = case
    op, _ = writing_group(kind, 3, width, False, inner=inner, weight=weight)
    check_compiles(f"triton.{kind}_{tile}", op, {"T": 3})


def test_heads_of_codes_are_for_units_that_take_them_in_order() -> None:
    op, _ = writing_group(
        "linear_rope_kv_write", 3, 64, False, inner=1024, weight="f8e4m3/128x128:f32"
    )
    op = replace(op, operands=(op.operands[0], replace(op.operands[1], name="@w"),
                               *op.operands[2:]))  # fmt: skip
    card = load_machine("8xpro6000").device(0)
    reasons = applies("triton.linear_rope_kv_write_codes_head16", op, card, {"T": (1, 1)})
    assert any("feature wgmma" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("kind", "tile", "width", "why"),
    [
        ("linear_rope_kv_write", "few16", 96, "heads in tiles of 64 numbers"),
        ("linear_qk_norm_rope_kv_write", "few16", 128, "whole where normed, found heads of 128"),
    ],
)
def test_heads_that_no_tile_holds_are_refused(kind: str, tile: str, width: int, why: str) -> None:
    op, _ = writing_group(kind, 3, width, False, inner=64)
    assert any(why in reason for reason in refused(f"triton.{kind}_plain_{tile}", op))


@pytest.mark.parametrize("case", [TURNED_CASES[1], TURNED_CASES[4]], ids=str)
def test_turned_products_compile_for_cards_that_are_not_here(
    case: tuple[str, str, int, int, int],
) -> None:
    kind, tile, width, tokens, _ = case
    op, _ = writing_group(kind, tokens, width, False, inner=512)
    check_compiles(f"triton.{kind}_plain_{tile}", op, {"T": tokens})
