"""Rounds over windows as a GPU runs them: interpreted beside the reference, compiled for cards."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from triton_worker import CARDS, interpreted
from window_threads import run_launched

from metainfer.backends.kernel import Query
from metainfer.backends.ranks.constraints import obstacle
from metainfer.backends.ranks.direct import DIRECT
from metainfer.backends.ranks.rounds import Part, launch_of
from metainfer.backends.ranks.windows import Place
from metainfer.backends.registry import installed
from metainfer.backends.triton.cross import faults_of, resources_of
from metainfer.hardware import load_machine
from metainfer.ir.dtypes import BF16
from metainfer.ir.graph import Op, Value, attrs_of
from metainfer.ir.ops.collective import exchange
from metainfer.ir.types import tensor

PAIRS = [(name, algorithm) for name, found in DIRECT.items() for algorithm in found]
# One pull differs from one push in who moves the bytes.
MARKED = [
    pytest.param(*pair, marks=pytest.mark.thorough) if pair[1] == "one_shot_pull" else pair
    for pair in PAIRS
]
META = torch.device("meta")


@pytest.mark.parametrize(("name", "algorithm"), MARKED)
def test_launches_are_the_reference_bit_for_bit(name: str, algorithm: str) -> None:
    """Three calls over one window: its halves in turn. 37 elements are no whole vectors."""
    rng, ranks, own = np.random.default_rng(5), 3, 37
    size = own if name in ("all_reduce", "all_gather") else own * ranks
    attrs = {"dim": 0, "source": 0, "target": 0}
    for dtype in (ml_dtypes.bfloat16, np.int32):
        calls = [
            [(rng.standard_normal(size) * 100).astype(np.float32).astype(dtype) for _ in "012"]
            for _ in "abc"
        ]
        wanted = [exchange(name, parts, attrs) for parts in calls]
        # Bits travel: the types of ml_dtypes do not pickle as themselves everywhere.
        found = interpreted(run_launched, name, algorithm, calls, wanted[0][0].size)
        for got, want in zip(found, wanted, strict=True):
            assert [g.tobytes() for g in got] == [w.tobytes() for w in want]


def launches(dtype: torch.dtype, ranks: int) -> Any:
    """Every round, aligned, for so many peers."""
    from metainfer.backends.triton.templates import peers

    count = 1 << 16
    x = torch.empty(count, dtype=dtype, device=META)
    parts = [Part(Place(rank, rank * count)) for rank in range(ranks)]
    table = torch.empty((2, ranks), dtype=torch.int64, device=META)
    shared = {
        "turns": torch.empty(4, dtype=torch.int32, device=META), "half_bytes": 1 << 20,
        "size": count,
    }  # fmt: skip
    sent = {"x": x, "targets": table, "count": count, **shared}
    summed = {"out": x, "sources": table, "targets": table, **shared}
    taken = {"out": x, "sources": table, "count": count, **shared}
    for function, arguments, constants in (
        (peers.send, sent, {"TARGETS": ranks, "ROUND": 0}),
        (peers.total, summed, {"SOURCES": ranks, "TARGETS": 0, "ROUND": 1, "LAST": True}),
        (peers.total, summed, {"SOURCES": ranks, "TARGETS": ranks, "ROUND": 1, "LAST": False}),
        (peers.receive, taken, {"SOURCES": ranks, "ROUND": 2}),
    ):
        yield launch_of(function, x, count, arguments, parts, constants)


@pytest.mark.parametrize("card", CARDS)
def test_rounds_compile_for_cards_that_are_not_here(card: str) -> None:
    for dtype, ranks in ((torch.bfloat16, 8), (torch.int16, 2)):
        for launch in launches(dtype, ranks):
            if dtype is torch.bfloat16 and launch.function.__name__ != "total":
                continue  # copies go by the width of the elements
            assert launch.constants["VECTOR"] == 8
            found = resources_of(launch, CARDS[card])
            assert faults_of(found, launch, CARDS[card]) == []


def test_places_that_begin_within_a_vector_move_one_element_at_a_time() -> None:
    from metainfer.backends.triton.templates import peers

    x = torch.empty(10, dtype=torch.int16, device=META)
    for part in (Part(Place(0, 2)), Part(Place(0, 0), 1)):
        assert launch_of(peers.send, x, 10, {}, [part], {}).constants["VECTOR"] == 1


def query(machine: str, *groups: tuple[int, ...], **changes: Any) -> Query:
    found = load_machine(machine)
    x = Value("%x", tensor(BF16, 8, 64))
    op = Op("all_reduce", (x,), (Value("%y", x.type),), attrs_of({"axis": "tp", "ranks": 8}))
    return Query(op, found.device(0), {}, frozenset(), found, groups)


def refusals(kernel: str, asked: Query) -> list[str]:
    return [str(r) for r in installed().kernels.get(kernel).refusals(asked)]


def test_direct_algorithms_want_peer_access_on_one_host() -> None:
    push = "ranks.all_reduce_one_shot_push"
    assert refusals(push, query("8xpcie", (0, 1, 2, 3))) == []
    (said,) = refusals(push, query("8x4090", (0, 1, 2, 3)))
    assert said == (
        "wanted ranks of one host that reach each other's memory, found gpu0 and gpu1 have no peer "
        "access (p2p = false on the link gpu0-socket0)"
    )
    assert refusals("ranks.all_reduce_library", query("8x4090", (0, 1, 2, 3))) == []


def test_islands_want_several_of_one_size() -> None:
    islands = "ranks.all_reduce_islands"
    assert refusals(islands, query("8xpcie", tuple(range(8)))) == []
    (said,) = refusals(islands, query("8xpcie", (0, 1, 2, 3)))
    assert said.endswith("found gpu0, gpu1, gpu2, gpu3 are no islands of one size above 1")


def test_windows_are_counted() -> None:
    for algorithm, mebibytes in (("one_shot_push", 32), ("two_shot_pull", 8), ("islands", 8)):
        kernel = installed().kernels.get(f"ranks.all_reduce_{algorithm}")
        x = Value("%x", tensor(BF16, 128, 8192))
        op = Op("all_reduce", (x,), (Value("%y", x.type),), attrs_of({"axis": "tp", "ranks": 8}))
        assert kernel.window is not None
        asked = Query(op, load_machine("8xpcie").device(0), {})
        # 2 MiB whole to each of eight, or an eighth, and the sums; two halves, rounded up.
        assert kernel.window(asked) == mebibytes << 20, algorithm


def test_obstacles_name_hosts() -> None:
    machine = load_machine("8xpcie")
    assert obstacle(machine, (0, 7)) == ""
