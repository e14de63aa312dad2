import json

import pytest

from metainfer.hardware import (
    Machine,
    known_devices,
    known_machines,
    load_device,
    load_machine,
)
from metainfer.ir.dtypes import MXFP4, MXFP8
from metainfer.ir.errors import HardwareError

NAMES = (
    *("cpu", "2xcpu", "8xcpu", "1xh200", "2xh200", "2xh200-nop2p", "8xpcie"),
    *("8xpro6000", "8xl20", "8x4090", "8xh20", "8xb300"),
)


def test_the_promised_machines_are_there() -> None:
    assert set(NAMES) == set(known_machines())


@pytest.mark.parametrize("name", known_machines())
def test_a_shipped_machine_is_sound(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    topology = machine.topology()
    for a in range(machine.num_devices):
        for b in range(machine.num_devices):
            if a != b:
                path = topology.path(a, b)
                assert 1e9 < path.write < 2e12
                assert 0 < path.write_latency_us < 1000
                assert path.write == topology.path(b, a).write
    for device in machine.kinds:
        assert device.usable_bytes > 0
        for rate in device.rates:
            assert 0.2 <= rate.sustained / rate.peak <= 1
            assert rate.source
        ridge = device.rate("f32").peak / device.memory_bandwidth.peak
        assert 1 < ridge < 200
    # A collective never beats the wire by more than what a switch's reductions save.
    for entry in machine.collectives:
        if entry.op != "all_reduce":
            continue
        payload = entry.points[-1][0] if entry.points else 2**28
        seconds = (entry.time_us(payload) or 0) / 1e6
        assert payload / seconds < 2 * topology.slowest().links[0].total


@pytest.mark.parametrize("name", known_machines())
def test_a_machine_survives_json(name: str) -> None:
    machine = load_machine(name)
    again = Machine.from_dict(json.loads(json.dumps(machine.to_dict())))
    assert again == machine
    assert hash(again) == hash(machine)
    assert again.machine_hash() == machine.machine_hash()


def test_hashes_differ_between_machines_and_ignore_texts() -> None:
    hashes = {load_machine(name).machine_hash() for name in NAMES}
    assert len(hashes) == len(NAMES)
    data = load_machine("8xpcie").to_dict()
    data["title"], data["source"] = "other", "other"
    assert Machine.from_dict(data).machine_hash() == load_machine("8xpcie").machine_hash()
    data["links"][0]["write"] *= 0.9
    assert Machine.from_dict(data).machine_hash() != load_machine("8xpcie").machine_hash()


def test_a_damaged_record_is_a_hardware_error() -> None:
    data = load_machine("cpu").to_dict()
    data["devices"][0]["surprise"] = 1
    with pytest.raises(HardwareError, match="not the record of a machine"):
        Machine.from_dict(data)


@pytest.mark.parametrize("name", known_devices())
def test_a_shipped_device_loads_by_name(name: str) -> None:
    assert load_device(name).name == name


def test_the_6000d_keeps_fp8_and_mxfp8_apart() -> None:
    device = load_machine("8xpcie").device(0)
    assert device.rate("f8e4m3").peak == 288e12
    assert device.rate("mxfp8").peak == 473e12
    assert device.rate("mxfp8").sustained == 288e12
    assert "unresolved" in device.rate("mxfp8").source
    assert device.rate(str(MXFP4)).dtype == "mxfp4"


def test_rates_fall_in_the_documented_order_and_say_so() -> None:
    h200, cpu = load_device("h200"), load_device("x86_v3")
    assert h200.rate(str(MXFP8)).dtype == "f8e4m3"
    assert h200.rate(str(MXFP4)).dtype == "bf16"
    assert h200.rate("i8/32:f16").dtype == "i8"
    assert cpu.rate("bf16").dtype == "f32"
    assert cpu.rate("u4/32:f16+f16").dtype == "i8"
    with pytest.raises(HardwareError, match="no rate for bool"):
        cpu.rate("bool")
    with pytest.raises(HardwareError, match="unknown element type"):
        cpu.rate("i9/32:f16")


def test_cpu_promises_only_what_every_v3_machine_has() -> None:
    assert load_machine("cpu").device(0).features == {"avx2", "fma", "f16c"}


def test_features_are_asked_by_known_names() -> None:
    device = load_device("rtx_6000d")
    assert device.has("mma_block_scale")
    assert not device.has("wgmma")
    with pytest.raises(HardwareError, match="unknown feature") as caught:
        device.has("wgmm")
    assert caught.value.advice == "did you mean 'wgmma'?"


def test_curves_interpolate_and_stop_at_their_ends() -> None:
    curve = load_device("h200").curves_of("gemm", "bf16")[0]
    assert curve.time_us(1) == pytest.approx(27.3)
    assert curve.flops_at(4096) == pytest.approx(700e12)
    between = curve.flops_at(2048)
    assert between is not None
    assert 700e12 < between < 730e12
    assert curve.flops_at(10**6) is None
    moe = load_device("rtx_pro_6000").curves_of("fused_moe", "f8e4m3")[0]
    with pytest.raises(HardwareError, match="fused_moe"):
        moe.time_us(64)


def test_absent_libraries_say_why() -> None:
    entry = load_device("rtx_6000d").library("flash_mla")
    assert entry is not None
    assert "sm_90 and sm_100 only" in entry.refusal()
    assert load_device("rtx_6000d").library("cublas") is None


def test_names_are_guessed() -> None:
    with pytest.raises(HardwareError, match="unknown machine '8xpci'") as caught:
        load_machine("8xpci")
    assert "did you mean '8xpcie'?" in caught.value.advice
    with pytest.raises(HardwareError, match="no rank 8"):
        load_machine("8xpcie").device(8)
