import sys
from dataclasses import replace

import pytest

from metainfer.hardware import load_machine, matches
from metainfer.hardware.detect import describe_answers, describe_here, detect_machine
from metainfer.hardware.detect_cpu import parse_features
from metainfer.hardware.detect_gpu import Gpu, device_table
from metainfer.hardware.fabric import fabric_tables, gpu_layout, parse_pcie, parse_topology
from metainfer.ir.errors import HardwareError

# What torch 2.11.0+cu130 and nvidia-smi said of an H200, 2026-11-29.
H200 = Gpu(
    index=0,
    name="NVIDIA H200",
    capability=(9, 0),
    platform="cuda",
    memory_bytes=150109880320,
    num_sms=132,
    smem_per_block_bytes=232448,
    smem_per_sm_bytes=233472,
    l2_bytes=62914560,
    clock_hz=1.98e9,
    bandwidth=4814304000000.0,
    peers=(1,),
)
ONE = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n"
FOUR = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNODE\tSYS\tSYS\t0-31\t0\n"
    "GPU1\tNODE\t X \tSYS\tSYS\t0-31\t0\n"
    "GPU2\tSYS\tSYS\t X \tNODE\t32-63\t1\n"
    "GPU3\tSYS\tSYS\tNODE\t X \t32-63\t1\n"
    "\nLegend:\n  X    = Self\n"
)


def test_this_processor_can_be_described() -> None:
    machine = detect_machine("cpu")
    assert machine.num_devices == 1
    device = machine.device(0)
    assert device.kind == "cpu"
    assert device.memory_bytes > 2**28
    assert device.rate("f32").peak > 1e9


def test_this_processor_splits_into_ranks() -> None:
    whole, halves = detect_machine("cpu"), detect_machine("cpu", 2)
    assert halves.num_devices == 2
    assert halves.device(0).memory_bytes <= whole.device(0).memory_bytes // 2
    assert not halves.topology().path(0, 1).direct


def test_describing_does_not_import_torch_before_it_looks_for_gpus() -> None:
    code = "import sys, metainfer.hardware.detect; sys.exit('torch' in sys.modules)"
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_measuring_gives_figures_that_hold_together() -> None:
    device = describe_here("cpu", measure=True).machine().device(0)
    assert 1e8 < device.memory_bandwidth.sustained < 1e13
    assert device.rate("f32").sustained <= device.rate("f32").peak


def test_flags_become_features() -> None:
    text = "processor : 0\nflags\t\t: fpu avx2 fma f16c avx512f avx512_vnni\n"
    assert parse_features(text) == {"avx2", "fma", "f16c", "avx512f", "avx512_vnni"}
    assert parse_features("Features : fp asimd i8mm\n") == {"neon", "i8mm"}
    assert parse_features("") == frozenset()


def test_matrices_are_read() -> None:
    assert parse_topology(ONE) == {(0, -1): "0"}
    matrix = parse_topology(FOUR)
    assert matrix[0, 1] == "NODE"
    assert matrix[3, -1] == "1"
    assert parse_topology("") == {}
    assert parse_pcie("5, 16\n5, 16\n") == (5, 16)
    assert parse_pcie("[N/A], [N/A]") == (0, 0)


def test_two_domains_become_two_sockets() -> None:
    gpus = [replace(H200, index=i, peers=tuple(p for p in range(4) if p != i)) for i in range(4)]
    layout, notes = gpu_layout(gpus, parse_topology(FOUR), (5, 16))
    tables = fabric_tables(layout)
    assert [s["numa"] for s in tables["sockets"]] == [0, 1]
    assert tables["links"][0]["from"] == ["gpu0", "gpu1"]
    assert tables["links"][2]["from"] == ["socket0"]
    assert len(notes) == 1


def test_nvlink_between_all_becomes_a_switch_and_no_peers_a_host_path() -> None:
    pair = [H200, replace(H200, index=1, peers=(0,))]
    matrix = {(0, 1): "NV18", (1, 0): "NV18"}
    tables = fabric_tables(gpu_layout(pair, matrix, (5, 16))[0])
    assert tables["links"][-1]["kind"] == "nvlink"
    assert tables["links"][-1]["width"] == 18
    assert "host" not in tables
    alone = [replace(gpu, peers=()) for gpu in pair]
    layout, notes = gpu_layout(alone, {}, (0, 0))
    assert "host" in fabric_tables(layout)
    assert any("4 x16 assumed" in note for note in notes)
    assert any("through the host" in note for note in notes)


def test_a_known_name_takes_the_description_and_the_drivers_limits() -> None:
    table, notes = device_table(replace(H200, memory_bytes=2**36))
    assert table["extends"] == "h200"
    assert table["memory"]["capacity"] == "64 GiB"
    assert notes == []


def test_an_unknown_name_falls_to_capabilities() -> None:
    table, notes = device_table(replace(H200, name="NVIDIA H200-48Q"))
    assert "wgmma" in table["compute"]["features"]
    assert table["memory"]["peak_bandwidth"] == "4.814 TB/s"
    assert len(notes) == 1


def test_an_unknown_architecture_is_told_and_gets_generic_features() -> None:
    table, notes = device_table(replace(H200, name="NVIDIA X", capability=(13, 7)))
    assert "tcgen05" not in table["compute"]["features"]
    assert "bf16_mma" in table["compute"]["features"]
    assert any("unknown architecture cuda 13.7, using generic kernels" in note for note in notes)
    amd, _ = device_table(replace(H200, name="gfx", platform="hip"))
    assert amd["compute"]["features"] == ["hip", "triton"]


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H200-48Q", "NVIDIA X"])
def test_gpus_become_machines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [replace(H200, name=name), replace(H200, name=name, index=1, peers=(0,))]
    monkeypatch.setattr("metainfer.hardware.detect_gpu.found_gpus", lambda: gpus)
    monkeypatch.setattr("metainfer.hardware.fabric._nvidia_smi", lambda *a: "")
    machine = detect_machine()
    assert machine.num_devices == 2
    assert machine.device(1).memory_bytes == H200.memory_bytes
    if name == "NVIDIA H200":
        assert matches(load_machine("2xh200"), machine) == ()
    assert detect_machine("gpu", 1).num_devices == 1
    with pytest.raises(HardwareError, match="3 GPUs asked for, 2 are here"):
        detect_machine("gpu", 3)


def test_asking_for_gpus_where_none_are_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metainfer.hardware.detect_gpu.found_gpus", list)
    with pytest.raises(HardwareError, match="no GPU is visible"):
        detect_machine("gpu")
    assert detect_machine().device(0).kind == "cpu"


@pytest.mark.parametrize("link", ["pcie3x8", "pcie5x16", "nvlink4", "nvlink5"])
def test_answers_become_machines(link: str) -> None:
    machine = describe_answers("box", "l20", 4, link, 2).machine()
    assert machine.num_devices == 4
    assert all(entry.basis == "assumed" for entry in machine.links)
    islands = machine.topology().islands()
    assert islands == (((0, 1, 2, 3),) if link.startswith("nvlink") else ((0, 1), (2, 3)))


def test_wrong_answers_are_refused() -> None:
    with pytest.raises(HardwareError, match="unknown link 'pci5x16'"):
        describe_answers("box", "l20", 4, "pci5x16", 1)
    with pytest.raises(HardwareError, match="unknown device 'l21'"):
        describe_answers("box", "l21", 4, "pcie5x16", 1)
    with pytest.raises(HardwareError, match="2 devices on 3 sockets"):
        describe_answers("box", "l20", 2, "pcie5x16", 3)
