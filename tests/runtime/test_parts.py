"""A rank's weights: what it keeps is its part, and what it reads is little more than that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest

from metainfer.backends.registry import installed
from metainfer.ir.dtypes import BlockArray, parse_dtype, quantize
from metainfer.ir.errors import PlanError
from metainfer.ir.flatten import flatten
from metainfer.ir.parser import parse_module
from metainfer.ir.simulate import RankInput, simulate
from metainfer.runtime.weights import WeightStore

TAKEN = """\
module f {{
  mesh (dp=2, tp=2)
  dim T in [1, 8]
  load main {{
    weights {{
      @w : f32[8,4,8]
      @order : i32[8]
    }}
    %0 = quantize(@w) {{format = "{format}"}} : {format}[8,4,8]
    %1 = take_rows(%0, @order) : {format}[8,4,8]
    %2 = take_shard(%1) {{axis = "tp", dim = 0, ranks = 2}} : {format}[4,4,8]
    %3 = take_shard(%2) {{axis = "dp", dim = 0, ranks = 2}} : {format}[2,4,8]
    return %3
  }}
  main(%x: f32[T,8]) {{
    weights {{
      @w : {format}[2,4,8]
    }}
    return @w
  }}
}}
"""
MODULE = """\
module f {{
  mesh (dp=2, tp=2)
  dim T in [1, 8]
  load main {{
    weights {{
      @w : {held}
    }}
{steps}
    return %{last}
  }}
  main(%x: f32[T,8]) {{
    weights {{
      @w : {kept}
    }}
    return @w
  }}
}}
"""


@dataclass
class Source:
    """One tensor, read in parts."""

    data: np.ndarray | BlockArray
    asked: list[Mapping[int, tuple[int, int]]] = field(default_factory=list)

    def __call__(self, name: str) -> np.ndarray | BlockArray:
        if name == "order":
            return ORDER
        self.asked.append({})
        return self.data

    def find(self, name: str) -> tuple[tuple[int, ...], str]:
        kind = self.data.format if isinstance(self.data, BlockArray) else self.data.dtype
        return tuple(self.data.shape), str(kind)

    def region(self, name: str, region: Mapping[int, tuple[int, int]]) -> Any:
        self.asked.append(dict(region))
        found = self.data
        for dim, (start, stop) in region.items():
            if isinstance(found, BlockArray):
                found = found.part(dim, start, stop)
            else:
                found = found[(slice(None),) * dim + (slice(start, stop),)]
        return found


def chain(*steps: tuple[str, str]) -> str:
    """Ops of a load graph, each applied to the one before: (op and attributes, type)."""
    lines, of = [], "@w"
    for number, (call, type_) in enumerate(steps):
        name, _, attrs = call.partition(" ")
        lines.append(f"    %{number} = {name}({of}) {{{attrs}}} : {type_}")
        of = f"%{number}"
    return "\n".join(lines)


def shard(axis: str, dim: int, type_: str, parts: int = 0) -> tuple[str, str]:
    more = f", parts = {parts}" if parts else ""
    return f'take_shard axis = "{axis}", dim = {dim}, ranks = 2{more}', type_


# Rows in another order, one of them three times.
ORDER = np.array([5, 0, 3, 5, 1, 7, 5, 2], np.int32)
B = "f8e4m3/4x4:f32"
ROW = "f8e4m3/row:f32"
N4 = "f4e2m1/4:f8e4m3*f32"
# name -> (held, steps, kept, the part that rank (dp 1, tp 1) reads)
CASES: dict[str, tuple[str, list[tuple[str, str]], dict[int, tuple[int, int]]]] = {
    "one axis": ("f32[8,8]", [shard("tp", 0, "f32[4,8]")], {0: (4, 8)}),
    "both axes, one dim": (
        "f32[8,8]", [shard("tp", 0, "f32[4,8]"), shard("dp", 0, "f32[2,8]")], {0: (6, 8)},
    ),
    "heads of rows, and a part of each": (
        "f32[8,6]",
        [
            ("reshape shape = (4, 2, 6)", "f32[4,2,6]"),
            ("slice dim = 1, start = 1, stop = 2", "f32[4,1,6]"), shard("tp", 0, "f32[2,1,6]"),
        ],
        {0: (4, 8)},
    ),
    "both axes, two dims": (
        "f32[4,8,8]", [shard("tp", 1, "f32[4,4,8]"), shard("dp", 0, "f32[2,4,8]")],
        {1: (4, 8), 0: (2, 4)},
    ),
    "neighbours with the same part": ("f32[8,8]", [shard("tp", 0, "f32[8,8]", 1)], {0: (0, 8)}),
    "after rounding": (
        "f32[8,8]", [('cast dtype = "bf16"', "bf16[8,8]"), shard("tp", 1, "bf16[8,4]")],
        {1: (4, 8)},
    ),
    "blocks made of the part": (
        "f32[8,8]", [(f'quantize format = "{B}"', f"{B}[8,8]"), shard("tp", 1, f"{B}[8,4]")],
        {1: (4, 8)},
    ),
    "rows whose scale spans the dim": (
        "f32[8,8]", [(f'quantize format = "{ROW}"', f"{ROW}[8,8]"), shard("tp", 1, f"{ROW}[8,4]")],
        {1: (0, 8)},
    ),
    "scales of rows beside those of groups": (
        "f32[8,8]", [(f'quantize format = "{N4}"', f"{N4}[8,8]"), shard("tp", 1, f"{N4}[8,4]")],
        {1: (0, 8)},
    ),
    "rows of rows": (
        "f32[8,8]", [(f'quantize format = "{ROW}"', f"{ROW}[8,8]"), shard("tp", 0, f"{ROW}[4,8]")],
        {0: (4, 8)},
    ),
    "scales refined": (
        "f8e4m3/8x8:f32[8,8]",
        [(f'refine_scales format = "{B}"', f"{B}[8,8]"), shard("tp", 0, f"{B}[4,8]")],
        {0: (0, 8)},
    ),
    "blocks widened": (
        f"{B}[8,8]", [('dequantize dtype = "f32"', "f32[8,8]"), shard("tp", 0, "f32[4,8]")],
        {0: (4, 8)},
    ),
}  # fmt: skip


def made_of(held: str, steps: list[tuple[str, str]]) -> tuple[Any, Source]:
    kept = steps[-1][1]
    text = MODULE.format(held=held, steps=chain(*steps), last=len(steps) - 1, kept=kept)
    module = parse_module(text)
    type_ = module.load("main").weights[0].tensor  # type: ignore[union-attr]
    numbers = np.random.default_rng(0).standard_normal(type_.concrete({})).astype(np.float32)
    is_block = "/" in str(type_.dtype)
    data = quantize(numbers, parse_dtype(str(type_.dtype))) if is_block else numbers  # type: ignore[arg-type]
    return module, Source(data)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_keeps_what_a_simulated_rank_keeps(name: str) -> None:
    held, steps, _ = CASES[name]
    module, source = made_of(held, steps)
    x = np.zeros((2, 8), np.float32)
    ranks = simulate(module, [RankInput([x], {}, {})] * 4, lambda _: source.data)
    (weight,) = flatten(module).weights.values()
    for (dp, tp), wanted in zip(product((0, 1), (0, 1)), ranks, strict=True):
        store = WeightStore(source, installed(), {"dp": dp, "tp": tp})
        found = store.get(module, weight)
        expected: Any = wanted.outputs[0]
        if isinstance(found, BlockArray):
            assert isinstance(expected, BlockArray)
            np.testing.assert_array_equal(found.dequantize(), expected.dequantize())
            assert found.codes.shape == expected.codes.shape
        else:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_reads_its_part_only(name: str) -> None:
    held, steps, wanted = CASES[name]
    module, source = made_of(held, steps)
    (weight,) = flatten(module).weights.values()
    WeightStore(source, installed(), {"dp": 1, "tp": 1}).get(module, weight)
    assert source.asked == [wanted]


@pytest.mark.parametrize("format", [B, ROW])
def test_rows_that_are_picked_are_read_one_by_one(format: str) -> None:
    """As experts are that a placement puts on a rank, some of them on several."""
    module = parse_module(TAKEN.format(format=format))
    numbers = np.random.default_rng(0).standard_normal((8, 4, 8)).astype(np.float32)
    (weight,) = flatten(module).weights.values()
    ranks = simulate(
        module,
        [RankInput([np.zeros((2, 8), np.float32)], {}, {})] * 4,
        lambda name: {"w": numbers, "order": ORDER}[name],
    )
    for (dp, tp), wanted in zip(product((0, 1), (0, 1)), ranks, strict=True):
        source = Source(numbers)
        found = WeightStore(source, installed(), {"dp": dp, "tp": tp}).get(module, weight)
        expected: Any = wanted.outputs[0]
        assert isinstance(found, BlockArray)
        np.testing.assert_array_equal(found.dequantize(), expected.dequantize())
        rows = sorted(set(ORDER.tolist()[4 * tp + 2 * dp :][:2]))
        assert source.asked == [{0: (row, row + 1)} for row in rows]


def test_a_process_that_is_no_rank_is_told_so() -> None:
    module, source = made_of("f32[8,8]", [shard("tp", 0, "f32[4,8]")])
    (weight,) = flatten(module).weights.values()
    with pytest.raises(PlanError, match="cuts weights over the axis 'tp'"):
        WeightStore(source, installed()).get(module, weight)
