"""The processor of this machine: cores, memory, instructions, and two quick measurements."""

import os
import platform
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metainfer.hardware.units import format_quantity, show_quantity

# Linux's names of instruction sets -> ours.
_FLAGS = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "i8mm": "i8mm",
}
_ASSUMED_HZ = 2.5e9
# Share of the peak that a large product is assumed to reach, and of memory's peak that a copy does.
_ASSUMED_SHARE = 0.7
_ASSUMED_CORE_BANDWIDTH = 13e9
_RESERVED_SHARE = 8


@dataclass(frozen=True)
class Cpu:
    """What the operating system says of its processor.

    Units: bytes, hertz (0 if not said).
    """

    model: str
    cores: int
    memory_bytes: int
    cache_bytes: int
    clock_hz: float
    features: frozenset[str]


def read_cpu() -> Cpu:
    """Read the processor that this process may use."""
    info = _read("/proc/cpuinfo")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Cpu(
        model=_field(info, "model name") or platform.processor() or platform.machine(),
        cores=cores or 1,
        memory_bytes=memory_bytes(),
        cache_bytes=_cache_bytes(),
        clock_hz=float(_field(info, "cpu MHz") or 0.0) * 1e6,
        features=parse_features(info),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(info: str, name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.+)$", info, re.MULTILINE)
    return found[1].strip() if found else ""


def parse_features(cpuinfo: str) -> frozenset[str]:
    """Return our feature names for the flags of a /proc/cpuinfo text."""
    flags = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())
    return frozenset(ours for theirs, ours in _FLAGS.items() if theirs in flags)


def memory_bytes() -> int:
    """Return the memory this process may use: the machine's, or its control group's if less."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    if found:
        total = int(found[1]) * 1024
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _cache_bytes() -> int:
    """Size of the largest cache of the first core, 0 if not said."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = _read(str(path)).strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes)


def device_table(cpu: Cpu, ranks: int, *, measure: bool) -> tuple[dict[str, Any], list[str]]:
    """Describe the share of one of ``ranks`` ranks: a device's tables, and notes to the reader."""
    cores = max(1, cpu.cores // ranks)
    memory = cpu.memory_bytes // ranks
    notes = (
        [] if cpu.features else ["the processor's instruction sets could not be read: none used"]
    )
    clock = cpu.clock_hz or _ASSUMED_HZ
    peaks = _peaks(cpu.features, cores * clock)
    if measure:
        copy, product = measure_copy() / ranks, measure_product() / ranks
        how = "measured by metainfer hw new: numpy, all threads, divided by the ranks"
    else:
        copy, product = cores * _ASSUMED_CORE_BANDWIDTH, peaks["f32"] * _ASSUMED_SHARE
        how = "assumed, not measured: 13 GB/s a core, 0.7 of the peak rate"
        notes.append("bandwidth and rates are assumed: leave --no-measure away to measure them")
    # NOTE: boost clocks lift a measurement above what the stated clock allows.
    lift = max(1.0, product / peaks["f32"])
    share = min(1.0, product / peaks["f32"])
    rates = {
        name: {
            "peak": show_quantity(peak * lift, "rate"),
            "sustained": show_quantity(peak * lift * share, "rate"),
            "source": f"peak: lanes x clock; sustained: {how}",
        }
        for name, peak in peaks.items()
    }
    table = {
        "title": cpu.model,
        "kind": "cpu",
        "capability": platform.machine(),
        "memory": {
            "capacity": format_quantity(memory, "size"),
            "reserved": format_quantity(memory // _RESERVED_SHARE, "size"),
            "peak_bandwidth": show_quantity(copy, "bandwidth"),
            "sustained_bandwidth": show_quantity(copy, "bandwidth"),
            "source": f"capacity: read; reserved: assumed an eighth; bandwidth: {how}",
        },
        "compute": {
            "sms": cores,
            "l2": format_quantity(cpu.cache_bytes, "size"),
            "features": sorted(cpu.features),
            "source": "read from /proc/cpuinfo and /sys",
        },
        "launch": {
            "latency": "2 us",
            "kernel_floor": "0.2 us",
            "source": "assumed: dispatch of a small torch operator, call of a compiled function",
        },
        "rates": rates,
    }
    return table, notes


def _peaks(features: frozenset[str], cycles: float) -> dict[str, float]:
    """Peak rates by type; ``cycles`` are cores times hertz.

    Units: FLOP/s. Two multiply-add units of the vector width are taken for all; where a design has
    one for 512 bits, the measured share corrects it.
    """
    lanes = 16 if "avx512f" in features else 8 if "avx2" in features else 4
    units = 2 if {"fma", "avx512f", "neon"} & features else 1
    f32 = lanes * units * 2 * cycles
    peaks = {"f32": f32, "f64": f32 / 2}
    if {"avx512_vnni", "avx_vnni", "i8mm"} & features:
        peaks["i8"] = 4 * f32
    if "amx_int8" in features:
        peaks["i8"] = 16 * f32
    if "avx512_bf16" in features:
        peaks["bf16"] = 2 * f32
    if "amx_bf16" in features:
        peaks["bf16"] = 8 * f32
    return peaks


def measure_copy(size_bytes: int = 2**27, repeats: int = 3) -> float:
    """Return bytes/s of a copy by all cores, read and write together, best of some."""
    threads = read_cpu().cores
    sources = np.array_split(np.ones(size_bytes // 8), threads)
    targets = [np.zeros_like(part) for part in sources]
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(np.copyto, targets, sources)), repeats)
    return 2 * size_bytes / seconds


def measure_product(size: int = 1024, repeats: int = 5) -> float:
    """Return FLOP/s of an f32 product of numpy, best of some."""
    a = np.ones((size, size), np.float32)
    return 2 * size**3 / _best(lambda: a @ a, repeats)


def _best(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
