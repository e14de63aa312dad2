"""Every kind of wrong file is refused with its line, its key and a remedy."""

import re
from pathlib import Path

import pytest

from metainfer.hardware import load_machine
from metainfer.hardware.load import FOLDER
from metainfer.ir.errors import HardwareError

GOOD = """\
name = "box"
title = "a box"
source = "test"

[types.card]
title = "a card"
kind = "gpu"
[types.card.memory]
capacity = "80 GB"
reserved = "1 GB"
peak_bandwidth = "1000 GB/s"
sustained_bandwidth = "900 GB/s"
source = "test"
[types.card.compute]
sms = 100
smem_per_block = "99 KiB"
smem_per_sm = "100 KiB"
features = ["cuda", "bf16_mma", "acme.turbo"]
source = "test"
[types.card.launch]
latency = "10 us"
kernel_floor = "1 us"
source = "test"
[types.card.rates.f32]
peak = "50 TFLOP/s"
sustained = "40 TFLOP/s"
source = "test"
[types.card.rates.bf16]
peak = "200 TFLOP/s"
sustained = "150 TFLOP/s"
source = "test"
[[types.card.curves]]
kind = "gemm"
dtype = "bf16"
n = 4096
k = 4096
rows = [1, 1024]
values = ["20 us", "150 TFLOP/s"]
basis = "measured here"
source = "test"
[[types.card.policy]]
subject = "kernel"
name = "slow.*"
stance = "forbid"
phase = "decode"
reason = "slow"

[[nodes]]
name = "host0"
source = "test"
[[sockets]]
name = "socket0"
node = "host0"
[[devices]]
names = ["gpu0", "gpu1"]
type = "card"
node = "host0"
[[links]]
from = ["gpu0", "gpu1"]
to = "socket0"
kind = "pcie"
generation = 5
width = 16
read = "50 GB/s"
write = "53 GB/s"
read_latency = "1.4 us"
write_latency = "0.7 us"
p2p = true
basis = "assumed"
source = "test"
[[collectives]]
op = "all_reduce"
algorithm = "nccl"
ranks = 2
sizes = ["2 KiB", "1 MiB"]
times = ["6 us", "44 us"]
basis = "measured elsewhere"
source = "test"
"""


def load(text: str, folder: Path) -> str:
    path = folder / "box.toml"
    path.write_text(text)
    with pytest.raises(HardwareError) as caught:
        load_machine(str(path))
    return str(caught.value)


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(GOOD)
    machine = load_machine(str(path))
    assert machine.num_devices == 2
    assert machine.path == str(path)
    device = machine.device(1)
    assert device.has("acme.turbo")
    assert device.curves[0].points[0] == (1, pytest.approx(2 * 4096 * 4096 / 20e-6))
    assert machine.stances("kernel", "slow.one", "decode")[0].stance == "forbid"
    assert machine.stances("kernel", "slow.one", "prefill") == ()


LINK_AT = "[[links]]"
# A setting that would load code.
SETTING = """[[communicator]]
name = "NCCL_NET_PLUGIN"
value = "libevil.so"
reason = "test"
[[links]]"""
WRONG = [
    # (old, new, what the message says, text of the line that it names)
    ('reserved = "1 GB"', 'reservd = "1 GB"', "memory.reserved is missing", "[types.card.memory]"),
    ("sms = 100", "sms = 100\nwarp_per_sm = 4", "unknown key compute.warp_per_sm", "warp_per_sm"),
    ('read = "50 GB/s"', "read = 50", "links.0.read: 50 has no unit", "read = 50"),
    ('read = "50 GB/s"', 'read = "50"', "links.0.read: '50' has no unit", "read = "),
    ('read = "50 GB/s"', 'read = "50 GB"', "is a size, a bandwidth is needed", "read = "),
    ('write = "53 GB/s"', 'write = "106 GB/s"', "above 63.01 GB/s, the limit of pcie", "write = "),
    ("generation = 5", "generation = 4", "the limit of pcie generation 4 x16", "read = "),
    ("generation = 5", "generation = 9", "unknown generation 9 of pcie", "generation"),
    ("width = 16", "width = 12", "not 12 lanes wide", "width"),
    ("generation = 5\n", "", "a pcie link states its generation", LINK_AT),
    ('names = ["gpu0", "gpu1"]', 'names = ["g", "g"]', "'g' is given twice", "names"),
    ('names = ["gpu0", "gpu1"]', 'names = ["socket0"]', "in sockets and in devices", "names"),
    ('to = "socket0"', 'to = "soket0"', "to 'soket0' is not described", "to = "),
    ('type = "card"', 'type = "crd"', "unknown device type 'crd'", "type = "),
    ('1 us"\nsource', '1 us"\n# source', "launch.source is missing", "[types.card.launch]"),
    ('1 us"\nsource = "test"', '1 us"\nsource = " "', "launch.source", 'source = " "'),
    ('sustained = "150 T', 'sustained = "250 T', "above the peak of 200", 'sustained = "250'),
    ('bandwidth = "900 G', 'bandwidth = "1100 G', "above the peak", "sustained_bandwidth"),
    ('"150 TFLOP/s"]', '"201 TFLOP/s"]', "measured 201 TFLOP/s is above", "values"),
    (', "150 TFLOP/s"]', "]", "2 rows and 1 values", "values"),
    ("rows = [1, 1024]", "rows = [1024, 1]", "do not ascend", "rows"),
    ('dtype = "bf16"', 'dtype = "i8"', "which has no rate", "dtype"),
    ('peak = "200 T', 'peak = "200 P', "FLOP a byte", 'peak = "200 P'),
    ('"bf16_mma", "acme', '"bf16_mm", "acme', "unknown feature 'bf16_mm'", "features"),
    ("rates.bf16]", "rates.bf61]", "unknown rate 'bf61'", "[types.card.rates.bf61]"),
    ('block = "99 KiB"', 'block = "101 KiB"', "larger than smem_per_sm", "smem_per_block"),
    ('reserved = "1 GB"', 'reserved = "80 GB"', "leaves no memory", "reserved"),
    ('kind = "gpu"', 'kind = "npu"', "kind: input should be 'cpu' or 'gpu'", "kind"),
    ("sms = 100", 'sms = "100"', "compute.sms: input should be a valid integer", "sms"),
    ("ranks = 2", "ranks = 4", "a collective of 4 ranks on 2 devices", "ranks"),
    ('"6 us", "44 us"', '"6 us"', "2 sizes and 1 times", "times"),
    ('"6 us", "44 us"', '"0 us", "44 us"', "a time of 0", "times"),
    ("ranks = 2", 'ranks = 2\nlatency = "6 us"', "sizes and times, or latency", "[[collectives]]"),
    ("p2p = true", "p2p = false", "[host] is missing", None),
    ('basis = "assumed"', 'basis = "guessed"', "links.0.basis", 'basis = "guessed"'),
    ('from = ["gpu0", "gpu1"]', 'from = ["gpu0"]', "gpu1 is joined to no socket", None),
    ('from = ["gpu0", "gpu1"]', 'from = ["gpu0", "gpu0"]', "linked twice", LINK_AT),
    ("[[links]]", SETTING, "unknown setting 'NCCL_NET_PLUGIN'", 'name = "NCCL_NET_PLUGIN'),
    ('"a card"', '"a card"\nextends = "h2000"', "extends unknown device", "extends"),
]


@pytest.mark.parametrize(("old", "new", "says", "at"), WRONG, ids=[w[2] for w in WRONG])
def test_a_wrong_file_is_refused_with_its_place(
    old: str, new: str, says: str, at: str | None, tmp_path: Path
) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    message = load(text, tmp_path)
    assert says in message.splitlines()[0]
    if at is None:
        return
    found = re.search(r"box\.toml:(\d+)$", message, re.MULTILINE)
    assert found, message
    assert text.splitlines()[int(found[1]) - 1].startswith(at), message


def test_the_whole_message(tmp_path: Path) -> None:
    message = load(GOOD.replace("kernel_floor", "kernel_flor"), tmp_path)
    path = tmp_path / "box.toml"
    line = GOOD.splitlines().index("[types.card.launch]") + 1
    assert message == (
        "launch.kernel_floor is missing\n"
        "  [types.card.launch]\n"
        f"  from {path}:{line}\n"
        "  is 'kernel_flor' meant to be it?\n"
        "  1 more to look at: launch.kernel_flor"
    )
    message = load(GOOD.replace("sms = 100", "sms = 100\nfeature = []"), tmp_path)
    assert message == (
        "unknown key compute.feature\n"
        "  feature = []\n"
        "  ^^^^^^^\n"
        f"  from {path}:{GOOD.splitlines().index('sms = 100') + 2}\n"
        "  did you mean 'features'?"
    )


def test_users_files_extend_ours_and_their_own(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "my_card.toml").write_text(
        'extends = "rtx_6000d"\nname = "my_card"\n[memory]\nreserved = "3 GB"\n'
    )
    (tmp_path / "mine.toml").write_text(
        'extends = "8xpcie"\nname = "mine"\n'
        '[[devices]]\nnames = ["gpu0","gpu1","gpu2","gpu3","gpu4","gpu5","gpu6","gpu7"]\n'
        'type = "my_card"\nnode = "host0"\n'
    )
    machine = load_machine(str(tmp_path / "mine.toml"))
    assert machine.name == "mine"
    assert machine.device(7).name == "my_card"
    assert machine.device(7).reserved_bytes == 3 * 10**9
    assert machine.links == load_machine("8xpcie").links


def test_an_error_in_a_base_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(GOOD.replace("width = 16", "width = 12"))
    (tmp_path / "box.toml").write_text('extends = "base"\nname = "box"\n')
    with pytest.raises(HardwareError, match=r"base\.toml:\d+"):
        load_machine(str(tmp_path / "box.toml"))


def test_a_device_is_no_machine() -> None:
    device = FOLDER / "devices" / "l20.toml"
    with pytest.raises(HardwareError, match="describes a device, not a machine") as refused:
        load_machine(str(device))
    assert refused.value.advice == 'give a machine that has it: [[devices]] type = "l20"'
