"""Prices of collectives: who may do what, which way, at which size, and where that comes from."""

from dataclasses import replace

import pytest

from metainfer.hardware import load_machine
from metainfer.hardware.collective_cost import Price, cheapest, price_of, prices
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import HardwareError

PCIE = load_machine("8xpcie")
FOUR, EIGHT = tuple(range(4)), tuple(range(8))
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def changed(machine: Machine, **fields: object) -> Machine:
    """A machine whose links differ, and of whose collectives nobody measured any."""
    links = tuple(replace(link, **fields) for link in machine.links)  # type: ignore[arg-type]
    return replace(machine, links=links, collectives=())


def swapped(machine: Machine) -> Machine:
    links = tuple(replace(link, read=link.write, write=link.read) for link in machine.links)
    return replace(machine, links=links, collectives=())


def seconds(found: tuple[Price, ...]) -> dict[str, float]:
    return {p.algorithm: p.seconds for p in found}


@pytest.mark.parametrize("name", NAMES)
def test_the_faster_direction_of_the_links_is_the_cheaper_one(name: str) -> None:
    # Links are slower read than written: 50 and 53 GB/s.
    for machine, better, worse in (
        (changed(PCIE), "push", "pull"), (swapped(PCIE), "pull", "push"),
    ):  # fmt: skip
        found = seconds(prices(name, machine, FOUR, 16 << 20))
        assert found[f"one_shot_{better}"] < found[f"one_shot_{worse}"]
        # Small ones are latency: a pull waits for an answer, whatever the rates are.
        found = seconds(prices(name, machine, FOUR, 256))
        assert found["one_shot_push"] < found["one_shot_pull"]


@pytest.mark.parametrize("name", NAMES)
def test_without_peer_access_nothing_is_direct(name: str) -> None:
    staged, direct = changed(PCIE, p2p=False), changed(PCIE)
    found = seconds(prices(name, staged, FOUR, 1 << 20))
    assert not any(a.endswith(("push", "pull", "islands")) for a in found)
    for algorithm, price in found.items():
        assert price > seconds(prices(name, direct, FOUR, 1 << 20))[algorithm]
    with pytest.raises(HardwareError, match="by one_shot_push is not for the ranks"):
        price_of(name, "one_shot_push", staged, FOUR, 1)


def test_copies_through_host_memory_share_what_its_dma_moves() -> None:
    staged = changed(PCIE, p2p=False)
    assert staged.host is not None
    narrow = replace(staged, host=replace(staged.host, dma_total=10e9))
    wide, slow = (
        price_of("all_gather", "library", m, FOUR, 1 << 24).seconds for m in (staged, narrow)
    )
    assert slow > 5 * wide


def test_a_table_of_links_with_peer_access_says_nothing_without() -> None:
    links = tuple(replace(link, p2p=False) for link in PCIE.links)
    staged = replace(PCIE, links=links)
    measured, made = (price_of("all_reduce", "library", m, EIGHT, 32 << 20) for m in (PCIE, staged))
    assert measured.basis == "measured elsewhere"
    assert "peer access" in made.basis
    assert made.seconds > measured.seconds
    # What is slower than the links described can be true.
    nop2p = load_machine("2xh200-nop2p")
    assert price_of("all_reduce", "library", nop2p, (0, 1), 256 << 20).basis == "measured here"


def test_an_unmeasured_library_is_a_ring_and_says_so() -> None:
    found = price_of("all_gather", "library", changed(PCIE), EIGHT, 1 << 20)
    assert found.basis == "analytic, as a ring: nobody measured the library"
    # NCCL's own times at 2 KiB, which the constants are fitted to.
    for name, ranks, wanted in (
        ("all_reduce", 2, 6), ("all_reduce", 4, 13), ("all_reduce", 8, 26), ("all_gather", 8, 15),
        ("all_to_all", 8, 10),
    ):  # fmt: skip
        made = price_of(name, "library", changed(PCIE), EIGHT[:ranks], 2048)
        assert made.seconds * 1e6 == pytest.approx(wanted, rel=0.2)


def test_where_its_all_reduce_was_measured_other_rings_are_as_much_slower() -> None:
    plain = price_of("all_gather", "library", changed(PCIE), FOUR, 16 << 20)
    found = price_of("all_gather", "library", PCIE, FOUR, 16 << 20)
    assert "as its all_reduce measured" in found.basis
    assert 1.5 < found.seconds / plain.seconds < 3


def test_a_measured_table_sets_the_level_of_all_that_it_can_be_held_beside() -> None:
    size = 32 << 10
    own = price_of("all_reduce", "one_shot_push", PCIE, FOUR, size)
    assert own.seconds == pytest.approx(10e-6)
    assert own.basis == "measured elsewhere"
    plain = changed(PCIE)
    level = own.seconds / price_of("all_reduce", "one_shot_push", plain, FOUR, size).seconds
    other = price_of("all_reduce", "two_shot_push", PCIE, FOUR, size)
    wanted = price_of("all_reduce", "two_shot_push", plain, FOUR, size).seconds * level
    assert other.seconds == pytest.approx(wanted)
    assert other.basis == "analytic, as one_shot measured"
    islands = price_of("all_reduce", "islands", PCIE, EIGHT, 256 << 10)
    assert islands.seconds == pytest.approx(91e-6)


def test_islands_cross_the_slow_link_once() -> None:
    machine = changed(PCIE)
    for size in (1 << 20, 16 << 20):
        found = seconds(prices("all_reduce", machine, EIGHT, size))
        others = ("one_shot_push", "one_shot_pull", "two_shot_push", "two_shot_pull", "one_shot")
        assert found["islands"] < 0.9 * min(found[name] for name in others)
    assert "islands" not in seconds(prices("all_reduce", machine, FOUR, 1 << 20))
    assert "islands" not in seconds(prices("all_reduce", machine, (0, 1, 4), 1 << 20))


def test_what_policy_forbids_is_no_bound_and_what_is_lossy_is_none() -> None:
    machine = swapped(PCIE)
    assert cheapest("all_gather", machine, FOUR, 16 << 20).algorithm == "one_shot_push"
    free = replace(machine, policy=())
    assert cheapest("all_gather", free, FOUR, 16 << 20).algorithm == "one_shot_pull"
    assert cheapest("all_reduce", free, FOUR, 64 << 20).is_exact
    lossy = price_of("all_reduce", "two_shot_fp8", free, FOUR, 64 << 20)
    assert not lossy.is_exact
    assert lossy.seconds < cheapest("all_reduce", free, FOUR, 64 << 20).seconds


def test_one_rank_pays_nothing() -> None:
    assert {p.seconds for p in prices("all_reduce", PCIE, (3,), 1 << 20)} == {0.0}
    with pytest.raises(HardwareError, match="no algorithm is known for 'broadcast'"):
        prices("broadcast", PCIE, FOUR, 1)
