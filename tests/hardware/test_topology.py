from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.hardware import Flow, Library, Topology, load_machine, matches
from metainfer.hardware.device import Policy

PCIE = load_machine("8xpcie")
PRO = load_machine("8xpro6000")


def test_8xpcie_has_two_islands_and_a_slower_way_between() -> None:
    topology = PCIE.topology()
    assert topology.islands() == ((0, 1, 2, 3), (4, 5, 6, 7))
    near, far = topology.path(0, 3), topology.path(0, 4)
    assert near.vertices == ("gpu0", "socket0", "gpu3")
    assert far.vertices == ("gpu0", "socket0", "socket1", "gpu4")
    assert far.crosses_socket
    assert not near.crosses_socket
    assert far.write < near.write
    assert far.write_latency_us > near.write_latency_us
    assert topology.slowest().write == far.write
    assert topology.slowest([0, 1, 2]).write == near.write
    assert near.direct
    assert far.direct


def test_a_pair_behind_a_switch_stays_there() -> None:
    topology = PRO.topology()
    assert topology.path(0, 1).vertices == ("gpu0", "switch0", "gpu1")
    assert topology.path(0, 2).vertices[1:-1] == ("switch0", "root0", "socket0", "root1", "switch1")
    assert topology.host_link(5).vertices == ("gpu5", "switch2", "root2", "socket1")


def test_nvlink_is_taken_before_pcie_and_makes_one_island() -> None:
    topology = load_machine("8xh20").topology()
    assert topology.path(0, 7).vertices == ("gpu0", "nvswitch", "gpu7")
    assert topology.islands() == (tuple(range(8)),)
    assert topology.host_link(7).vertices[-1] == "socket1"


def test_without_peer_access_data_goes_through_the_host() -> None:
    path = load_machine("2xh200-nop2p").topology().path(0, 1)
    assert not path.direct
    assert path.write == 27e9
    assert path.write_latency_us > 14
    assert load_machine("2xh200").topology().path(0, 1).write > 10 * path.write


def test_transfer_time_is_latency_and_bytes() -> None:
    path = PCIE.topology().path(0, 1)
    assert path.time_us(53_000) == pytest.approx(0.7 + 1.0)
    assert path.time_us(50_000, "read") == pytest.approx(1.4 + 1.0)


def test_flows_share_edges() -> None:
    topology = PCIE.topology()
    assert topology.share([Flow(0, 1)]) == (53e9,)
    # Two flows out of one card share its link; two across the sockets share the socket link.
    assert topology.share([Flow(0, 1), Flow(0, 2)]) == (26.5e9, 26.5e9)
    assert topology.share([Flow(0, 4), Flow(1, 5)]) == (19.5e9, 19.5e9)
    # Both directions at once reach less than twice one.
    assert topology.share([Flow(0, 4), Flow(4, 0)]) == (32e9, 32e9)
    # A flow that meets no one keeps its own.
    assert topology.share([Flow(0, 4), Flow(1, 5), Flow(6, 7)])[2] == 53e9
    # A read moves data towards its initiator; several reach together what one reaches alone.
    assert topology.share([Flow(0, 1, "read"), Flow(2, 1, "read")]) == (25e9, 25e9)
    assert topology.share([Flow(0, 1, "read"), Flow(2, 1)])[0] > 25e9


def test_posted_writes_collapse_and_reads_do_not() -> None:
    topology = PRO.topology()
    two_roots = [Flow(0, 2), Flow(1, 4)]
    assert topology.share(two_roots) == (1.35e9, 1.35e9)
    reads = topology.share([Flow(0, 2, "read"), Flow(1, 4, "read")])
    assert min(reads) > 20e9
    one_root = topology.share([Flow(0, 2), Flow(1, 3)])
    assert min(one_root) > 20e9
    one_writer = topology.share([Flow(0, 2), Flow(0, 4)])
    assert min(one_writer) > 20e9


FLOWS = st.lists(
    st.builds(
        Flow, st.integers(0, 7), st.integers(0, 7), st.sampled_from(["read", "write"])
    ).filter(lambda f: f.initiator != f.peer),
    min_size=1,
    max_size=12,
)


@given(FLOWS, st.sampled_from([PCIE.topology(), PRO.topology()]))
def test_sharing_never_exceeds_a_flow_or_a_link(flows: list[Flow], topology: Topology) -> None:
    shares = topology.share(flows)
    for share, flow in zip(shares, flows, strict=True):
        path = topology.path(flow.initiator, flow.peer)
        assert 0 < share <= getattr(path, flow.mode)
    out = sum(
        s for s, f in zip(shares, flows, strict=True) if f.initiator == 0 and f.mode == "write"
    )
    assert out <= 53e9 * (1 + 1e-9)
    # One flow less never leaves the others with less in total.
    if len(flows) > 1:
        assert topology.share(flows[:1])[0] >= shares[0] * (1 - 1e-9)


TWO_NODES = """\
name = "two"
title = "two hosts"
source = "test"
nodes = [{ name = "a", source = "test" }, { name = "b", source = "test" }]
sockets = [{ name = "sa", node = "a" }, { name = "sb", node = "b" }]
nics = [{ name = "na", node = "a" }, { name = "nb", node = "b" }]
switches = [{ name = "net", kind = "network" }]
[[devices]]
names = ["g0"]
type = "h20"
node = "a"
[[devices]]
names = ["g1"]
type = "h20"
node = "b"
"""
LINK = """\
[[links]]
from = ["{0}"]
to = "{1}"
kind = "{2}"
{3}
read = "{4}"
write = "{4}"
read_latency = "2 us"
write_latency = "1 us"
p2p = true
basis = "assumed"
source = "test"
"""


def two_nodes(folder: FilePath, speed: str) -> str:
    pcie = "generation = 5\nwidth = 16"
    rows = [
        ("g0", "sa", "pcie", pcie, "50 GB/s"),
        ("g1", "sb", "pcie", pcie, "50 GB/s"),
        ("na", "sa", "pcie", pcie, "50 GB/s"),
        ("nb", "sb", "pcie", pcie, "50 GB/s"),
        ("na", "net", "infiniband", 'line_rate = "400 Gbit/s"', speed),
        ("nb", "net", "infiniband", 'line_rate = "400 Gbit/s"', speed),
    ]
    path = folder / "two.toml"
    path.write_text(TWO_NODES + "".join(LINK.format(*row) for row in rows))
    return str(path)


def test_two_nodes_meet_over_the_network(tmp_path: FilePath) -> None:
    topology = load_machine(two_nodes(tmp_path, "48 GB/s")).topology()
    path = topology.path(0, 1)
    assert path.crosses_node
    assert path.write == 48e9
    assert topology.islands() == ((0,), (1,))


def test_a_nic_faster_than_its_line_is_refused(tmp_path: FilePath) -> None:
    with pytest.raises(Exception, match="limit of its line_rate"):
        load_machine(two_nodes(tmp_path, "100 GB/s"))


def test_matches_asks_for_what_plans_need() -> None:
    assert matches(PCIE, PCIE) == ()
    assert matches(PCIE, PRO) == ()
    assert matches(load_machine("cpu"), PCIE) == ("rank 0: the plan needs a cpu, here is a gpu",)
    assert matches(PCIE, load_machine("2xh200")) == ("the plan needs 8 devices, here are 2",)
    found = matches(load_machine("2xh200"), load_machine("2xh200-nop2p"))
    assert found == ("ranks 0 and 1: the plan reads peer memory, here it cannot",)
    assert matches(load_machine("2xh200-nop2p"), load_machine("2xh200")) == ()
    found = matches(load_machine("8xb300"), load_machine("8xh20"))
    assert "rank 0: missing features fp4_mma, mma_block_scale, tcgen05" in found
    assert any("GB of memory" in line for line in found)
    found = matches(load_machine("8xl20"), load_machine("8x4090"))
    assert any("memory" in line for line in found)
    found = matches(load_machine("1xh200"), PCIE)
    assert any("shared memory" in line for line in found)


def test_matches_ignores_rates_and_names() -> None:
    slow = replace(PCIE.device(0), name="other", rates=PCIE.device(0).rates[:1])
    instances = tuple(replace(i, device=slow, name=f"x{i.rank}") for i in PCIE.devices)
    links = tuple(
        replace(k, ends=(k.ends[0].replace("gpu", "x"), k.ends[1]), write=1e9) for k in PCIE.links
    )
    assert matches(PCIE, replace(PCIE, devices=instances, links=links)) == ()


def test_tables_come_best_founded_first() -> None:
    tables = PCIE.tables("all_reduce", 8)
    assert [t.algorithm for t in tables] == ["nccl", "two_shot_islands"]
    assert tables[0].time_us(2**20) == pytest.approx(132)
    assert tables[0].time_us(2**40) is None
    assumed = load_machine("8xl20").tables("all_reduce", 8)[0]
    assert assumed.basis == "assumed"
    assert assumed.time_us(7_000_000) == pytest.approx(26 + 1000)


def test_library_versions_are_compared_by_number() -> None:
    def refusal(version: str, least: str) -> str:
        return Library("deep_gemm", version, least, False, "test").refusal()

    assert "older than 2.10" in refusal("2.9", "2.10")
    assert refusal("2.10.0+cu130", "2.10") == ""
    assert refusal("", "2.10") == ""


def test_policies_apply_by_phase_and_ending() -> None:
    entry = Policy("kernel", "triton.moe_*", "forbid", "decode", "slow")
    assert entry.applies("kernel", "triton.moe_fp8", "decode")
    assert not entry.applies("kernel", "triton.moe_fp8", "prefill")
    assert not entry.applies("rule", "triton.moe_fp8", "decode")
    assert PCIE.stances("collective", "one_shot_pull", "decode")[0].stance == "forbid"
