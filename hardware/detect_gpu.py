"""The GPUs of this machine, as torch reports them.

torch is imported inside `found_gpus` only, so that describing machines works without it. This is
the one place that reads an architecture number: it turns it into features and per-clock rates, and
nothing after it asks again.
"""

import re
from dataclasses import dataclass
from typing import Any

from metainfer.hardware.load import known_devices, load_device
from metainfer.hardware.units import format_quantity, show_quantity

_BASE = ("cuda", "triton", "cp_async", "f16_mma", "bf16_mma", "tf32_mma")
# Features by compute capability.
# Source: PTX and CUDA programming manuals; Triton 3.9.0's code for each target.
_FEATURES: dict[tuple[int, int], tuple[str, ...]] = {
    (8, 0): (*_BASE, "i8_mma"),
    (8, 6): (*_BASE, "i8_mma"),
    (8, 9): (*_BASE, "i8_mma", "fp8_mma"),
    (9, 0): (
        *(*_BASE, "i8_mma", "fp8_mma", "wgmma"),
        *("tma", "cluster", "tma_multicast", "early_launch"),
    ),
    (10, 0): (
        *(*_BASE, "i8_mma", "fp8_mma", "fp4_mma", "mma_block_scale"),
        *("tcgen05", "tma", "cluster", "tma_multicast", "early_launch"),
    ),
    (10, 3): (
        *(*_BASE, "fp8_mma", "fp4_mma", "mma_block_scale"),
        *("tcgen05", "tma", "cluster", "tma_multicast", "early_launch"),
    ),
    (12, 0): (
        *(*_BASE, "i8_mma", "fp8_mma", "fp4_mma", "mma_block_scale"),
        *("tma", "cluster", "early_launch"),
    ),
    (12, 1): (
        *(*_BASE, "i8_mma", "fp8_mma", "fp4_mma", "mma_block_scale"),
        *("tma", "cluster", "early_launch"),
    ),
}
# bf16 FLOP of one multiprocessor in one clock: (most of its family, least of its family).
# Source: data sheet rates over multiprocessors and clock; 8.9 and 12.0 have halved cards.
_BF16_PER_CLOCK: dict[tuple[int, int], tuple[int, int]] = {
    (8, 0): (2048, 2048),
    (8, 6): (1024, 512),
    (8, 9): (1024, 512),
    (9, 0): (4096, 1024),
    (10, 0): (8192, 8192),
    (10, 3): (8192, 8192),
    (12, 0): (1024, 512),
    (12, 1): (1024, 512),
}
_LEAST_PER_CLOCK = (512, 256)
_F32_PER_CLOCK = 256
_ASSUMED_HZ = 1.5e9
_ASSUMED_BANDWIDTH = 300e9
_SHARE = 0.7


@dataclass(frozen=True)
class Gpu:
    """What the driver says of one GPU.

    Units: bytes, hertz, bytes/s; 0 where it says nothing.
    """

    index: int
    name: str
    capability: tuple[int, int]
    platform: str
    memory_bytes: int
    num_sms: int
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    l2_bytes: int
    clock_hz: float
    bandwidth: float
    peers: tuple[int, ...]


def found_gpus() -> list[Gpu]:
    """Return the GPUs that torch sees; none if torch is not installed."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    platform = "hip" if getattr(torch.version, "hip", None) else "cuda"
    count = torch.cuda.device_count()
    gpus = []
    for index in range(count):
        props: Any = torch.cuda.get_device_properties(index)
        peers = [p for p in range(count) if p != index]
        width, clock = getattr(props, "memory_bus_width", 0), getattr(props, "memory_clock_rate", 0)
        gpus.append(
            Gpu(
                index=index,
                name=props.name,
                capability=(props.major, props.minor),
                platform=platform,
                memory_bytes=props.total_memory,
                num_sms=props.multi_processor_count,
                smem_per_block_bytes=getattr(props, "shared_memory_per_block_optin", 0),
                smem_per_sm_bytes=getattr(props, "shared_memory_per_multiprocessor", 0),
                l2_bytes=getattr(props, "L2_cache_size", 0),
                clock_hz=getattr(props, "clock_rate", 0) * 1e3,
                bandwidth=2 * clock * 1e3 * width / 8,
                peers=tuple(p for p in peers if torch.cuda.can_device_access_peer(index, p)),
            )
        )
    return gpus


def features_of(platform: str, capability: tuple[int, int]) -> tuple[str, ...]:
    """What a GPU can do, by its architecture; what every one can where that is unknown.

    Args:
        platform: "cuda" or "hip".
        capability: major and minor number.
    """
    if platform == "cuda" and capability in _FEATURES:
        return _FEATURES[capability]
    if platform != "cuda":
        return (platform, "triton")
    return _BASE if capability >= (8, 0) else ("cuda",)


def type_name(gpu: Gpu) -> str:
    """Return the name of the GPU's type in the file: its product name in lower snake."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.name.lower()).strip("_") + "_here"


def device_table(gpu: Gpu) -> tuple[dict[str, Any], list[str]]:
    """Describe a GPU: from a known description of its product name, or else from its capability."""
    sizes = {
        "smem_per_block": gpu.smem_per_block_bytes,
        "smem_per_sm": gpu.smem_per_sm_bytes,
        "l2": gpu.l2_bytes,
    }
    limits: dict[str, Any] = {"sms": gpu.num_sms}
    limits |= {key: format_quantity(size, "size") for key, size in sizes.items() if size}
    for name in known_devices():
        if gpu.name in load_device(name).product_names:
            memory = {
                "capacity": format_quantity(gpu.memory_bytes, "size"),
                "source": f"capacity: read from the driver; the rest: description {name}",
            }
            source = f"limits: read from the driver; features: description {name}"
            compute = {**limits, "source": source}
            return {"extends": name, "memory": memory, "compute": compute}, []
    return _from_capability(gpu, limits)


def _from_capability(gpu: Gpu, limits: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Describe a GPU whose name is not known."""
    number = ".".join(map(str, gpu.capability))
    notes = [f"{gpu.name}: no description of this name; rates follow from its capability {number}"]
    known = gpu.platform == "cuda" and gpu.capability in _FEATURES
    features = features_of(gpu.platform, gpu.capability)
    per_clock = _BF16_PER_CLOCK[gpu.capability] if known else _LEAST_PER_CLOCK
    if not known:
        notes.append(
            f"{gpu.name}: unknown architecture {gpu.platform} {number}, using generic kernels; fp8 "
            "and fp4 units stay unused (2 to 4 times slower where it has them): add them to "
            "features"
        )
    clock = gpu.clock_hz or _ASSUMED_HZ
    bandwidth = gpu.bandwidth or _ASSUMED_BANDWIDTH
    if not gpu.bandwidth:
        notes.append(f"{gpu.name}: memory bandwidth assumed {_ASSUMED_BANDWIDTH / 1e9:.0f} GB/s")
    table = {
        "title": gpu.name,
        "kind": "gpu",
        "capability": f"{gpu.platform} {number}",
        "product_names": [gpu.name],
        "memory": {
            "capacity": format_quantity(gpu.memory_bytes, "size"),
            "reserved": "1.5 GB",
            "peak_bandwidth": show_quantity(bandwidth, "bandwidth"),
            "sustained_bandwidth": show_quantity(0.85 * bandwidth, "bandwidth"),
            "source": "capacity and memory clock x bus: driver; the rest assumed",
        },
        "compute": {
            **limits,
            "features": sorted(features),
            "source": "limits: driver; features: from the compute capability",
        },
        "launch": {
            "latency": "14 us",
            "kernel_floor": "1 us",
            "source": "assumed as measured on H200, 2026-11-29",
        },
        "rates": _rates(features, gpu.num_sms * clock, per_clock),
    }
    return table, notes


def _rates(
    features: tuple[str, ...], clocks: float, per_clock: tuple[int, int]
) -> dict[str, dict[str, str]]:
    """Rates of the types the matrix units take, from operations per clock."""
    most, least = per_clock
    factors = {"f32": 0.0}
    factors |= {"bf16": 1.0, "f16": 1.0} if "bf16_mma" in features else {}
    factors |= {"f8e4m3": 2.0} if "fp8_mma" in features else {}
    factors |= {"i8": 2.0} if "i8_mma" in features else {}
    factors |= {"mxfp8": 2.0} if "mma_block_scale" in features else {}
    factors |= {"mxfp4": 4.0, "nvfp4": 4.0} if "fp4_mma" in features else {}
    rates = {}
    for name, factor in factors.items():
        peak = clocks * (factor * most if factor else _F32_PER_CLOCK)
        low = clocks * _SHARE * (factor * least if factor else _F32_PER_CLOCK)
        rates[name] = {
            "peak": show_quantity(peak, "rate"),
            "sustained": show_quantity(low, "rate"),
            "source": "assumed: multiprocessors x clock x rate of the family; sustained: 0.7 of "
            "its slowest card",
        }
    return rates
