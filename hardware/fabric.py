"""How the devices of one host are joined: read from nvidia-smi, or from one word of the user.

Figures of such links are assumed at a share of what their generation carries, and say so.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from metainfer.hardware.checks import LANE_LIMITS
from metainfer.hardware.detect_gpu import Gpu
from metainfer.hardware.document import near
from metainfer.hardware.units import show_quantity
from metainfer.ir.errors import HardwareError

ASSUMED_LINKS = (
    "links are assumed at 0.85 of their generation: put what you measure in place, with its source"
)
# Links a user may name: (kind, generation, width).
LINKS: dict[str, tuple[str, int, int]] = {
    **{f"pcie{g}x{w}": ("pcie", g, w) for g in (3, 4, 5, 6) for w in (4, 8, 16)},
    "nvlink3": ("nvlink", 3, 12),
    "nvlink4": ("nvlink", 4, 18),
    "nvlink5": ("nvlink", 5, 18),
    "memory": ("memory", 0, 0),
}
_SHARE = 0.85
# Source: rtx6kpro notes: 39 of 53 GB/s across Genoa sockets.
_ACROSS_SOCKETS = 0.7
_MEMORY_BANDWIDTH = 13e9


@dataclass(frozen=True)
class Layout:
    """What is needed to write the links of one host.

    Attributes:
        names: devices in rank order.
        numa: socket number of each.
        host_link: (kind, generation, width) of each device's link to its socket.
        nvlink: (generation, links of each device) of a switch that joins all, or None.
        p2p: whether every device may reach every other's memory.
        origin: where this is known from.
    """

    names: tuple[str, ...]
    numa: tuple[int, ...]
    host_link: tuple[str, int, int]
    nvlink: tuple[int, int] | None
    p2p: bool
    origin: str


def layout_of(link: str, names: list[str], numa: list[int]) -> Layout:
    """Return the layout that one word describes.

    Raises: HardwareError for a word that is not in LINKS.
    """
    if link not in LINKS:
        raise HardwareError(f"unknown link {link!r}", advice=near(link, list(LINKS)))
    kind, generation, width = LINKS[link]
    nvlink = (generation, width) if kind == "nvlink" else None
    host_link = ("pcie", max(4, generation), 16) if kind == "nvlink" else (kind, generation, width)
    return Layout(
        tuple(names), tuple(numa), host_link, nvlink, p2p=True, origin="given by the user"
    )


def read_layout(gpus: list[Gpu]) -> tuple[Layout, list[str]]:
    """Return the layout of some GPUs by their driver, and notes on what it does not say."""
    matrix = parse_topology(_nvidia_smi("topo", "-m"))
    query = ("--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader")
    return gpu_layout(gpus, matrix, parse_pcie(_nvidia_smi(*query)))


def gpu_layout(
    gpus: list[Gpu], matrix: dict[tuple[int, int], str], pcie: tuple[int, int]
) -> tuple[Layout, list[str]]:
    """Return the layout for a matrix of `parse_topology` and a PCIe (generation, width)."""
    notes = [ASSUMED_LINKS]
    generation, width = pcie
    if f"pcie{generation}x{width}" not in LINKS:
        generation, width = 4, 16
        notes.append("PCIe generation could not be read: 4 x16 assumed")
    p2p = all(peer.index in gpu.peers for gpu in gpus for peer in gpus if peer != gpu)
    if not p2p:
        notes.append("GPUs cannot reach each other's memory: traffic goes through the host")
    links = _nvlink_width(gpus, matrix)
    layout = Layout(
        names=tuple(f"gpu{gpu.index}" for gpu in gpus),
        numa=tuple(int(matrix.get((gpu.index, -1), "0")) for gpu in gpus),
        host_link=("pcie", generation, width),
        nvlink=(_nvlink_generation(gpus[0]), links) if links else None,
        p2p=p2p,
        origin="read from the driver",
    )
    return layout, notes


def _nvlink_generation(gpu: Gpu) -> int:
    """Generation of NVLink that came with a GPU's architecture."""
    return {8: 3, 9: 4}.get(gpu.capability[0], 5)


def _nvlink_width(gpus: list[Gpu], matrix: dict[tuple[int, int], str]) -> int:
    """NVLinks of each GPU if every pair is joined by as many (a switch), else 0."""
    widths = {matrix.get((a.index, b.index), "") for a in gpus for b in gpus if a != b}
    if len(widths) != 1:
        return 0
    found = re.fullmatch(r"NV(\d+)", widths.pop())
    return int(found[1]) if found else 0


def _nvidia_smi(*arguments: str) -> str:
    """Output of nvidia-smi, "" if it is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Read the matrix of `nvidia-smi topo -m`: (gpu, gpu) -> "NV18", "PIX", "SYS" ...

    The NUMA node of a GPU is under (gpu, -1) where the table has the column.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split("\t") for line in plain.splitlines() if line.strip()]
    if not rows:
        return {}
    header = [cell.strip() for cell in rows[0]]
    found: dict[tuple[int, int], str] = {}
    for row in rows[1:]:
        name = re.fullmatch(r"GPU(\d+)", row[0].strip())
        if name is None:
            continue
        for column, cell in zip(header, row, strict=False):
            other = re.fullmatch(r"GPU(\d+)", column)
            if other and other[1] != name[1]:
                found[int(name[1]), int(other[1])] = cell.strip()
            if column == "NUMA Affinity" and cell.strip().isdigit():
                found[int(name[1]), -1] = cell.strip()
    return found


def parse_pcie(text: str) -> tuple[int, int]:
    """Read the first GPU's PCIe generation and width; (0, 0) if not said."""
    found = re.match(r"\s*(\d+)\s*,\s*(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def fabric_tables(layout: Layout) -> dict[str, Any]:
    """Write sockets, switches, links and (without peer access) the host path of a layout."""
    domains = sorted(set(layout.numa))
    flow = _flow(layout.host_link)
    links = []
    for number in domains:
        here = [name for name, n in zip(layout.names, layout.numa, strict=True) if n == number]
        links.append(_link(here, f"socket{number}", layout.host_link, layout))
    for number in domains[1:]:
        across = _link([f"socket{domains[0]}"], f"socket{number}", ("upi", 0, 0), layout)
        slow = show_quantity(_ACROSS_SOCKETS * flow, "bandwidth")
        source = "assumed 0.7 of one device's link, as across Genoa sockets"
        links.append({**across, "read": slow, "write": slow, "p2p": True, "source": source})
    tables: dict[str, Any] = {
        "sockets": [{"name": f"socket{n}", "node": "host0", "numa": n} for n in domains]
    }
    if layout.nvlink is not None:
        tables["switches"] = [{"name": "nvswitch", "node": "host0", "kind": "nvlink"}]
        nvlink = ("nvlink", *layout.nvlink)
        links.append(_link(list(layout.names), "nvswitch", nvlink, layout))
    tables["links"] = links
    if not layout.p2p:
        tables["host"] = {
            "staging_bandwidth": show_quantity(flow / 2, "bandwidth"),
            "staging_latency": "14 us",
            "dma_total": show_quantity(flow, "bandwidth"),
            "source": "assumed: two copies over one link",
        }
    return tables


def _flow(kind: tuple[str, int, int]) -> float:
    """Bandwidth assumed for one flow over a link.

    Units: bytes/s.
    """
    name, generation, width = kind
    if name not in LANE_LIMITS:
        return _MEMORY_BANDWIDTH
    return _SHARE * LANE_LIMITS[name][generation] * width


def _link(
    origins: list[str], to: str, kind: tuple[str, int, int], layout: Layout
) -> dict[str, Any]:
    name, generation, width = kind
    bandwidth = show_quantity(_flow(kind), "bandwidth")
    return {
        "from": origins,
        "to": to,
        "kind": name,
        "generation": generation or None,
        "width": width or None,
        "read": bandwidth,
        "write": bandwidth,
        "read_latency": "1.4 us",
        "write_latency": "0.7 us",
        "p2p": layout.p2p,
        "basis": "assumed",
        "source": f"generation and width {layout.origin}; bandwidth 0.85 of them; latency assumed",
    }
