"""One kind of device as frozen values: memory, rates, limits, features, measured curves.

Nothing here asks what a device is called: kernels and passes ask for features, rates and exact
limits. Every figure keeps the text of its source.
"""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from metainfer.hardware.vocabulary import BLOCK_RATES, FEATURES, RATE_FALLS, is_feature, nearest
from metainfer.ir.dtypes import Block, parse_dtype
from metainfer.ir.errors import HardwareError, TypeMismatch


@dataclass(frozen=True)
class Rate:
    """Arithmetic rate of one operand type, dense.

    Units: FLOP/s (one multiply-add is two), for integer types operations/s.

    Attributes:
        peak: what the units can do at best; never exceeded by a measurement.
        sustained: what a large product of good kernels reaches.
        source: where the figures come from.
        dtype: the name under which the file states them; after a fall not the name asked for.
    """

    peak: float
    sustained: float
    source: str
    dtype: str


@dataclass(frozen=True)
class Bandwidth:
    """Rate of the device's own memory.

    Units: bytes/s, reads and writes together.
    """

    peak: float
    sustained: float
    source: str


@dataclass(frozen=True)
class Curve:
    """Measured speed of one matrix product by number of rows.

    Units: points are (rows, FLOP/s), rows ascending.

    Attributes:
        kind: "gemm", "grouped_gemm" (rows summed over groups) or "fused_moe" (rows are tokens).
        dtype: operand type, a rate name.
        n: columns of the result (fused_moe: inner width on one rank).
        k: length of the sums (fused_moe: hidden width).
        groups: experts held by the rank, 1 for a plain product.
        points: the measurements.
        basis: "measured here", "measured elsewhere" or "assumed".
        source: where they come from.
    """

    kind: str
    dtype: str
    n: int
    k: int
    groups: int
    points: tuple[tuple[int, float], ...]
    basis: str
    source: str

    def flops_at(self, rows: int) -> float | None:
        """Return FLOP/s at ``rows``, interpolated in logarithms; None outside the measurements."""
        return interpolate(self.points, rows)

    def time_us(self, rows: int) -> float | None:
        """Return microseconds of a gemm or grouped gemm of ``rows``; None outside.

        Raises: HardwareError for a fused_moe curve, whose arithmetic is the caller's to count.
        """
        if self.kind == "fused_moe":
            raise HardwareError(
                "a fused_moe curve has no time of its own",
                advice="divide the FLOP of the fused expert step by flops_at(tokens)",
            )
        rate = self.flops_at(rows)
        return None if rate is None else 2.0 * rows * self.n * self.k / rate * 1e6


def interpolate(points: tuple[tuple[int, float], ...], x: float) -> float | None:
    """Return y at x, straight lines in log-log between points; None outside them."""
    if not points or not points[0][0] <= x <= points[-1][0]:
        return None
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            share = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0))
            return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))
    return points[0][1]


@dataclass(frozen=True)
class Library:
    """A kernel library on this device: its version, or why it is absent.

    Attributes:
        name: as imported ("deep_gemm").
        version: version installed or assumed, "" if not stated.
        min_version: first version that knows this device, "" if any does.
        absent: whether it must not be used here at all.
        source: where this is known from, or the reason.
    """

    name: str
    version: str
    min_version: str
    absent: bool
    source: str

    def refusal(self) -> str:
        """Return why the library cannot be used on this device, or "" if it can."""
        if self.absent:
            return f"{self.name} has no support for this device ({self.source})"
        if self.version and self.min_version and _older(self.version, self.min_version):
            return (
                f"{self.name} {self.version} is older than {self.min_version}, "
                f"the first to support this device ({self.source})"
            )
        return ""


def _older(version: str, least: str) -> bool:
    """Compare dotted versions by their leading numbers; a suffix such as +cu130 is left away."""

    def key(text: str) -> tuple[int, ...]:
        parts = []
        for part in text.split("+")[0].split("."):
            digits = "".join(c for c in part if c.isdigit())
            parts.append(int(digits or 0))
        while parts and parts[-1] == 0:
            parts.pop()
        return tuple(parts)

    return key(version) < key(least)


@dataclass(frozen=True)
class Policy:
    """One preference or prohibition, with its reason.

    Attributes:
        subject: "kernel", "rule", "collective" or "library".
        name: name of the subject, or a shell pattern: ``*_pull`` is every pull.
        stance: "prefer" or "forbid".
        phase: "prefill", "decode" or "any".
        reason: why, shown to the user.
    """

    subject: str
    name: str
    stance: str
    phase: str
    reason: str

    def applies(self, subject: str, name: str, phase: str) -> bool:
        """Whether this entry is about the named subject in this phase."""
        if subject != self.subject or self.phase not in ("any", phase):
            return False
        return fnmatchcase(name, self.name)


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Units: bytes, microseconds, watts, hertz; 0 where the file does not state a figure.

    Attributes:
        name: name of the description (not used for any decision).
        title: what a reader calls it.
        kind: "cpu" or "gpu".
        capability: what its vendor calls the architecture; informative only.
        product_names: names under which drivers report it.
        memory_bytes: memory as the driver reports it.
        reserved_bytes: what driver, context and libraries keep of it.
        memory_bandwidth: rate of its memory.
        rates: arithmetic rates.
        num_sms: multiprocessors of a GPU, cores of a CPU.
        warps_per_sm: resident warps of a multiprocessor.
        smem_per_block_bytes: shared memory one block may use.
        smem_per_sm_bytes: shared memory of a multiprocessor.
        l2_bytes: last cache before memory.
        features: what it can do; see vocabulary.FEATURES.
        launch_latency_us: time from one launch to the next, launched one by one from the host.
        kernel_floor_us: time of an empty kernel inside a captured graph.
        power_watts: board power.
        clock_hz: clock at which the peak rates hold.
        libraries: libraries known to be there or absent.
        curves: measured products.
        policy: preferences of this device.
        sources: (block, source) for the blocks memory, compute, launch, board.
    """

    name: str
    title: str
    kind: str
    capability: str
    product_names: tuple[str, ...]
    memory_bytes: int
    reserved_bytes: int
    memory_bandwidth: Bandwidth
    rates: tuple[Rate, ...]
    num_sms: int
    warps_per_sm: int
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    l2_bytes: int
    features: frozenset[str]
    launch_latency_us: float
    kernel_floor_us: float
    power_watts: float
    clock_hz: float
    libraries: tuple[Library, ...]
    curves: tuple[Curve, ...]
    policy: tuple[Policy, ...]
    sources: tuple[tuple[str, str], ...]

    @property
    def usable_bytes(self) -> int:
        """Memory left for weights, cache and buffers."""
        return self.memory_bytes - self.reserved_bytes

    def has(self, feature: str) -> bool:
        """Whether the device has a feature.

        Raises: HardwareError for a name outside the vocabulary, which could never be true.
        """
        if not is_feature(feature):
            raise HardwareError(
                f"unknown feature {feature!r}", advice=nearest(feature, list(FEATURES))
            )
        return feature in self.features

    def rate(self, dtype_name: str) -> Rate:
        """Return the rate of an operand type: a scalar type, a block format, or a rate name.

        A type without a rate of its own takes the next one of its row in
        vocabulary.RATE_FALLS; ``Rate.dtype`` then differs from the name asked for, and the caller
        reports it.

        Raises: HardwareError if the device states no rate in the whole row.
        """
        name = _rate_name(dtype_name)
        row = (name, *RATE_FALLS.get(name, ()))
        stated = {rate.dtype: rate for rate in self.rates}
        for candidate in row:
            if candidate in stated:
                return stated[candidate]
        raise HardwareError(
            f"device {self.name} states no rate for {dtype_name} (looked for {', '.join(row)})",
            advice=f"it states {', '.join(stated)}; add [rates.{name}] to its file",
        )

    def library(self, name: str) -> Library | None:
        """Return what the file says of a library, None if nothing."""
        return next((entry for entry in self.libraries if entry.name == name), None)

    def curves_of(self, kind: str, dtype_name: str) -> tuple[Curve, ...]:
        """Return the measured curves of one kind of product and operand type."""
        return tuple(c for c in self.curves if c.kind == kind and c.dtype == dtype_name)


def _rate_name(dtype_name: str) -> str:
    """Name of the rate that a type is computed at; an unlisted block format by its codes."""
    if dtype_name in BLOCK_RATES:
        return BLOCK_RATES[dtype_name]
    if "/" not in dtype_name:
        return dtype_name
    try:
        dtype = parse_dtype(dtype_name)
    except TypeMismatch as error:
        raise HardwareError(error.what, advice=error.advice) from error
    return dtype.element.name if isinstance(dtype, Block) else dtype.name
