"""The experts' products by Triton: sorting, numbers interpreted and on a GPU, fit of the cards."""

import inspect
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch_samples import assert_close, scalar
from triton_experts import Case, call_of, experts_op, run_order, run_tiles
from triton_worker import CARDS, applies, check_compiles, check_on_gpu, interpreted, run_named

from metainfer.backends.registry import installed
from metainfer.backends.torch.check import make_op, run_reference
from metainfer.backends.triton.experts import (
    DIRECT_PAIRS,
    EXACT_PAIRS,
    MOST_PARTS,
    Tile,
    Tiles,
    experts,
    scratch_bound,
    scratch_of,
    tiles_for,
)
from metainfer.backends.triton.records_experts import BF16_STEP
from metainfer.backends.triton.scratch import scratch_bytes
from metainfer.ir.dtypes import parse_dtype
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Op
from metainfer.ir.types import tensor

CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
FP8, MXFP4, NVFP4 = "f8e4m3/128x128:f32", "f4e2m1/32:f8e8m0", "f4e2m1/16:f8e4m3*f32"


def wanted_order(ids: np.ndarray[Any, Any], num: int, rows: int) -> tuple[list[int], Any]:
    """What sorting means, in numpy."""
    flat = ids.reshape(-1)
    order: list[int] = []
    tiles = []
    for e in range(num):
        mine = np.flatnonzero(flat == e)
        tiles += [(e, len(order) + i, min(rows, len(mine) - i)) for i in range(0, len(mine), rows)]
        order += mine.tolist()
    return order, np.array(tiles, np.int32).reshape(-1, 3).T


@pytest.mark.parametrize(
    ("tokens", "choices", "num", "rows"),
    [(1, 1, 1, 16), (7, 3, 5, 4), (300, 2, 40, 8), (600, 1, 300, 128), (1100, 2, 20, 64)],
)
@pytest.mark.parametrize("low", [-1, pytest.param(0, marks=pytest.mark.thorough)])
def test_sorting(tokens: int, choices: int, num: int, rows: int, low: int) -> None:
    rng = np.random.default_rng(tokens)
    # Some choose nobody (-1) or an expert that is not held.
    ids = rng.integers(low, num - 2 * low, (tokens, choices)).astype(np.int32)
    order, tiles = interpreted(run_order, ids, num, rows)
    wanted, table = wanted_order(ids, num, rows)
    assert order[: len(wanted)].tolist() == wanted
    assert (order[len(wanted) :] == -7).all()
    np.testing.assert_array_equal(tiles[:, : table.shape[1]], table)
    assert (tiles[0, table.shape[1] :] == -1).all()


def test_sorting_when_all_choose_one() -> None:
    ids = np.full((150, 2), 3, np.int32)
    order, tiles = interpreted(run_order, ids, 4, 64)
    assert order.tolist() == list(range(300))
    assert tiles[2][tiles[0] == 3].tolist() == [64, 64, 64, 64, 44]


CASES = {
    "one token": Case(1),
    "a head and a rest": Case(2, choices=2, experts=3, inner=304, routing="some"),
    "one choice": Case(5, choices=1, routing="some"),
    "sorted": Case(19, routing="some"),
    "all to one": Case(40, routing="one"),
    "gelu, odd sizes": Case(9, choices=3, experts=3, width=80, inner=112, activation="gelu_tanh"),
    "f16": Case(9, dtype="f16", format="f16"),
    "fp8 blocks": Case(9, format=FP8, width=256, inner=160, experts=3, routing="some"),
    "fp8 rows": Case(3, format="f8e4m3/row:f32", dtype="f16"),
    "fp8 groups, powers": Case(9, format="f8e4m3/1x128:f8e8m0", width=128, inner=160),
    "mxfp4": Case(9, format=MXFP4, inner=96, routing="some"),
    "nvfp4": Case(9, format=NVFP4, inner=48, routing="some"),
    "nvfp4, one token": Case(1, format=NVFP4, inner=96),
    "fp8, small blocks": Case(9, format="f8e4m3/32x32:f32", inner=96, routing="some"),
}


def check_case(case: Case, tiles: Tiles | None = None) -> None:
    found = interpreted(run_tiles, case, tiles)
    wanted = run_reference(*experts_op(case))[0]
    assert_close(found, wanted, scalar(case.dtype), BF16_STEP)


@pytest.mark.parametrize("name", CASES)
def test_experts(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.thorough
def test_large_tiles_of_several_per_expert() -> None:
    tiles = Tiles(Tile(64, 32, 64, 4, 2), Tile(64, 64, 16, 4, 2), parts=2)
    check_case(Case(260, routing="some", experts=3), tiles)


@pytest.mark.parametrize("num", [1, 2])
def test_the_kernel_of_the_registry(num: int) -> None:
    case = Case(num * 9, format=FP8, width=128, inner=128)
    op, data = experts_op(case)
    found = interpreted(run_named, "triton.experts_e4m3", op, data, {})
    assert_close(found[0], run_reference(op, data)[0], scalar("bf16"), BF16_STEP)


def qwen3(format_: str, experts_: int = 128, inner: int = 768) -> Op:
    """The experts of Qwen3-30B-A3B, tokens open."""
    types = [
        tensor(scalar("bf16"), "T", 2048),
        tensor(scalar("i32"), "T", 8),
        tensor(scalar("bf16"), "T", 8),
        tensor(parse_dtype(format_), experts_, inner, 2048),
        tensor(parse_dtype(format_), experts_, inner, 2048),
        tensor(parse_dtype(format_), experts_, 2048, inner),
    ]
    return make_op("experts", types, {}, weights=[3, 4, 5])


FORMATS = {"bf16": "bf16", "e4m3": FP8, "e2m1": MXFP4, "nvfp4": NVFP4}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("bf16", 1),
        ("bf16", 16),
        ("bf16", 16384),
        ("e4m3", 16),
        ("e4m3", 16384),
        ("e2m1", 16),
        pytest.param("nvfp4", 16, marks=pytest.mark.thorough),
    ],
)
def test_they_fit_both_cards(name: str, tokens: int) -> None:
    check_compiles(f"triton.experts_{name}", qwen3(FORMATS[name]), {"T": tokens})


def test_large_tiles_are_for_cards_with_room() -> None:
    call = call_of(Case(1000, experts=2), "meta")
    narrow, wide = tiles_for(call), tiles_for(call, wide=True)
    assert wide.gate_up.columns == 2 * narrow.gate_up.columns


@pytest.mark.parametrize("inner", [96, 48, 192])
def test_parts_of_a_rank_apply(inner: int) -> None:
    limits = {"T": (1, 64)}
    assert applies("triton.experts_bf16", qwen3("bf16", 16, inner), CARDS["8xpcie"], limits) == []


@pytest.mark.parametrize(
    ("op", "name", "words"),
    [
        (qwen3("bf16", inner=40), "bf16", "F % 16 == 0, found 40"),
        (qwen3(MXFP4, inner=48), "e2m1", "F % 32 == 0, found 48"),
        (qwen3("f8e4m3/row:f32"), "e2m1", "f4e2m1/32:f8e8m0, found f8e4m3/row:f32"),
        (qwen3("f4e2m1/16:f8e4m3"), "e2m1", "found f4e2m1/16:f8e4m3"),
    ],
)
def test_what_they_refuse(op: Op, name: str, words: str) -> None:
    found = applies(f"triton.experts_{name}", op, CARDS["8xpcie"], {"T": (1, 16)})
    assert words in " ".join(found)


def test_what_the_launchers_refuse() -> None:
    call = call_of(Case(3), "cpu")
    with pytest.raises(Unsupported, match="have gaps"):
        experts(replace(call, ids=call.ids.t().contiguous().t()))
    narrow = replace(call.gate, codes=call.gate.codes[:, :, :40])
    with pytest.raises(Unsupported, match="gate takes 40 inputs"):
        experts(replace(call, gate=narrow))


@pytest.mark.parametrize("most", [1, DIRECT_PAIRS, 100, EXACT_PAIRS + 6, 9000])
def test_scratch_suffices_for_fewer_tokens(most: int) -> None:
    bound = scratch_bound(most, 8, 48, 64, torch.bfloat16)
    for pairs in sorted({min(most, n) for n in (1, 2, 16, 17, EXACT_PAIRS, most)}):
        call = call_of(Case(pairs, choices=1, experts=8), "meta")
        for tiles in (tiles_for(call), replace(tiles_for(call), parts=MOST_PARTS)):
            if tiles.parts == 1 or pairs <= DIRECT_PAIRS:
                assert scratch_bytes(scratch_of(call, tiles)) <= bound


@pytest.mark.parametrize("tokens", [1, 64, 3000])
def test_launches_that_start_early_wait_before_they_read_what_others_write(tokens: int) -> None:
    """The down product first reads what was chosen: the launch in front of it lets it start only
    when all before it have ended, and writes ``hidden`` alone.
    """
    found = experts(call_of(Case(tokens), "meta"))
    assert all(launch.is_early for launch in found)
    names = [launch.function.fn.__name__ for launch in found]
    assert names.index("experts_down") == names.index("experts_gate_up") + 1
    for launch in found:
        name = launch.function.fn.__name__
        behind = inspect.getsource(launch.function.fn).split('"""')[2]
        first = re.sub(r"\s*#.*", "", behind).lstrip()
        if name == "experts_down":
            *parts, after = behind.split("early.wait_for_last(EARLY)\n")
            before = "".join(parts)
            assert "= hidden +" in after
            assert not re.search(r"tl.load\(rows|hidden,|inputs|tl.store", before)
        else:
            wait = "wait_first" if name == "experts_gate_up" else "wait"
            assert first.startswith(f"early.{wait}(EARLY)\n")


LARGE = {
    "one token": Case(1, choices=8, experts=128, width=2048, inner=768),
    "16 tokens": Case(16, choices=8, experts=32, width=1024, inner=768, routing="some"),
    "prefill": Case(700, choices=4, experts=8, width=1024, inner=384, routing="some"),
    "all to one": Case(600, choices=2, experts=8, width=512, inner=256, routing="one"),
    "fp8, one": Case(1, choices=8, experts=16, width=2048, inner=768, format=FP8),
    "fp8": Case(40, choices=4, experts=16, width=1024, inner=768, format=FP8, routing="some"),
    "fp8, prefill": Case(900, choices=2, experts=4, width=512, inner=384, format=FP8),
    "mxfp4, one": Case(1, choices=8, experts=16, width=2048, inner=768, format=MXFP4),
    "mxfp4": Case(40, choices=4, experts=16, width=1024, inner=768, format=MXFP4, routing="some"),
    "mxfp4, prefill": Case(900, choices=2, experts=4, width=512, inner=384, format=MXFP4),
}
KERNELS = {"bf16": ["bf16", "bf16_wide"], FP8: ["e4m3"], MXFP4: ["e2m1"]}
ON_GPU = [(name, kernel) for name, case in LARGE.items() for kernel in KERNELS[case.format]]


@pytest.mark.parametrize(
    ("name", "kernel"), [pytest.param(*p, marks=CUDA, id=" ".join(p)) for p in ON_GPU]
)
def test_on_a_gpu(name: str, kernel: str) -> None:
    check_on_gpu(f"triton.experts_{kernel}", *experts_op(LARGE[name]))


def test_every_format_has_a_kernel() -> None:
    names = {k.name for k in installed().kernels.candidates("experts") if k.backend == "triton"}
    assert names >= {f"triton.experts_{k}" for ks in KERNELS.values() for k in ks}
