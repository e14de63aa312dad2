"""Describing the machine at hand: processors by /proc, CUDA devices through torch if it is there.

A device is described from what its driver says it can do. Its product name only serves to add the
rates of a known description; an unknown name loses nothing but measured figures.
"""

from dataclasses import dataclass, replace
from typing import Any

from metainfer.hardware import detect_cpu, detect_gpu, fabric
from metainfer.hardware.document import Document
from metainfer.hardware.load import FOLDER, load_device, read_machine
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import HardwareError


@dataclass(frozen=True)
class Description:
    """Data of a machine file, and what could not be found out.

    Attributes:
        data: values as a TOML file holds them.
        notes: lines for the reader: what was assumed, and what that may cost.
    """

    data: dict[str, Any]
    notes: tuple[str, ...]

    def machine(self, path: str = "") -> Machine:
        """Build the machine that a file of this data describes.

        Raises: HardwareError if the data contradicts itself.
        """
        place = path or str(FOLDER / "here.toml")
        return replace(read_machine(Document(place, self.data, {})), path=path)


def detect_machine(kind: str = "auto", num_devices: int | None = None) -> Machine:
    """Describe this machine, without measuring anything.

    Args:
        kind: "cpu", "gpu", or "auto": GPUs if there are any.
        num_devices: number of GPUs to take, or of ranks to split the processor into; None for all
            GPUs, or one rank.

    Raises: HardwareError if there are fewer GPUs than asked for.
    """
    return describe_here(kind, num_devices).machine()


def describe_here(
    kind: str = "auto", num_devices: int | None = None, *, measure: bool = False, name: str = "here"
) -> Description:
    """Describe this machine as the data of a hardware file.

    Args:
        kind: "cpu", "gpu" or "auto".
        num_devices: as `detect_machine`.
        measure: time a copy and a product on the processor (about a second) for sustained figures.
        name: name of the machine.

    Raises: HardwareError if there are fewer GPUs than asked for.
    """
    gpus = [] if kind == "cpu" else detect_gpu.found_gpus()
    if kind == "gpu" and not gpus:
        raise HardwareError(
            "no GPU is visible to torch on this machine",
            advice="install torch with CUDA, or describe the processor: --device-kind cpu",
        )
    if not gpus:
        return _describe_cpu(num_devices or 1, measure=measure, name=name)
    wanted = num_devices or len(gpus)
    if wanted > len(gpus):
        raise HardwareError(
            f"{wanted} GPUs asked for, {len(gpus)} are here",
            advice=f"ask for {len(gpus)} or fewer, or describe another machine by hand",
        )
    return _describe_gpus(gpus[:wanted], name=name)


def _host_tables(memory_bytes: int, cores: int) -> dict[str, Any]:
    return {
        "nodes": [
            {
                "name": "host0",
                "memory": f"{memory_bytes} B",
                "source": "read from this machine: /proc/meminfo and the control group",
            }
        ],
        "sockets": [{"name": "socket0", "node": "host0", "cores": cores}],
    }


def _describe_cpu(ranks: int, *, measure: bool, name: str) -> Description:
    cpu = detect_cpu.read_cpu()
    table, notes = detect_cpu.device_table(cpu, ranks, measure=measure)
    bandwidth = table["memory"]["sustained_bandwidth"]
    data: dict[str, Any] = {
        "name": name,
        "title": f"{cpu.model}, {cpu.cores} cores",
        "source": "read from this machine by metainfer hw new",
        **_host_tables(cpu.memory_bytes, cpu.cores),
        "devices": [
            {"names": [f"cpu{i}" for i in range(ranks)], "type": "cpu_here", "node": "host0"}
        ],
        "links": [
            {
                "from": [f"cpu{i}" for i in range(ranks)],
                "to": "socket0",
                "kind": "memory",
                "read": bandwidth,
                "write": bandwidth,
                "read_latency": "0.1 us",
                "write_latency": "0.1 us",
                "p2p": ranks == 1,
                "basis": "assumed",
                "source": "the device's own memory bandwidth; latency assumed",
            }
        ],
        "types": {"cpu_here": table},
    }
    if ranks > 1:
        data["host"] = {
            "staging_bandwidth": "3 GB/s",
            "staging_latency": "100 us",
            "dma_total": bandwidth,
            "source": "assumed: gloo over loopback",
        }
    return Description(data, tuple(notes))


def _describe_gpus(gpus: list[detect_gpu.Gpu], *, name: str) -> Description:
    types: dict[str, Any] = {}
    notes: list[str] = []
    for gpu in gpus:
        type_name = detect_gpu.type_name(gpu)
        if type_name not in types:
            types[type_name], said = detect_gpu.device_table(gpu)
            notes += said
    layout, assumed = fabric.read_layout(gpus)
    data: dict[str, Any] = {
        "name": name,
        "title": f"{len(gpus)}x {gpus[0].name}",
        "source": "read from this machine by metainfer hw new",
        **_host_tables(detect_cpu.memory_bytes(), detect_cpu.read_cpu().cores),
        "devices": [
            {"names": [f"gpu{gpu.index}"], "type": detect_gpu.type_name(gpu), "node": "host0"}
            for gpu in gpus
        ],
        **fabric.fabric_tables(layout),
        "types": types,
    }
    return Description(data, (*notes, *assumed))


def describe_answers(
    name: str, device_type: str, num_devices: int, link: str, num_sockets: int = 1
) -> Description:
    """Describe a machine from a few answers, every figure of its links assumed.

    Args:
        name: name of the machine.
        device_type: a known device (see known_devices).
        num_devices: number of devices, spread over the sockets in order.
        link: "pcie4x16", "pcie5x8", "nvlink4" ...; fabric.LINKS has all.
        num_sockets: processors of the host.

    Raises: HardwareError for an unknown device or link, or fewer devices than sockets.
    """
    device = load_device(device_type)
    if not 1 <= num_sockets <= num_devices:
        raise HardwareError(
            f"{num_devices} devices on {num_sockets} sockets",
            advice="give at least one socket, and a device for each",
        )
    stem = "cpu" if device.kind == "cpu" else "gpu"
    names = [f"{stem}{i}" for i in range(num_devices)]
    numa = [i * num_sockets // num_devices for i in range(num_devices)]
    layout = fabric.layout_of(link, names, numa)
    tables = fabric.fabric_tables(layout)
    data: dict[str, Any] = {
        "name": name,
        "title": f"{num_devices}x {device.title}, {link}",
        "source": "answers given to metainfer hw new; links assumed",
        "nodes": [{"name": "host0", "source": "answers given to metainfer hw new"}],
        "devices": [{"names": names, "type": device_type, "node": "host0"}],
        **tables,
    }
    return Description(data, (fabric.ASSUMED_LINKS,))
