"""Time on a GPU: lines of reports, shares of kernels, measured ceilings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from metainfer.backends.triton.launch import Launch
from metainfer.runtime.timing import captured_us, events_ms

__all__ = [
    "Ceilings", "Row", "Share", "announce", "captured_us", "ceilings", "events_ms", "run_all",
    "shares",
]  # fmt: skip
_COPY_BYTES = 2 << 30
_GEMM = 8192


def run_all(launches: Sequence[Launch]) -> Callable[[], None]:
    """One function for all launches of a call."""

    def run() -> None:
        for launch in launches:
            launch.run()

    return run


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches here and now.

    Units: bytes a second (the better of a copy, read + write, and a read), operations a second
    (bf16 product).
    """

    bandwidth: float
    bf16: float

    def roofline_us(self, moved: float, flops: float) -> float:
        """Microseconds that no kernel can beat, by these ceilings."""
        return max(moved / self.bandwidth, flops / self.bf16) * 1e6


@dataclass(frozen=True)
class Row:
    """One line of a report."""

    case: str
    what: str
    us: float
    moved: float
    flops: float

    def text(self, ceilings: Ceilings) -> str:
        """Time, both rates, and the fraction of the roofline."""
        bound = ceilings.roofline_us(self.moved, self.flops)
        rates = (
            f"{self.moved / self.us * 1e-6:7.3f} TB/s {self.flops / self.us * 1e-6:7.1f} TFLOP/s"
        )
        return (
            f"{self.case:34s} {self.what:34s} {self.us:9.1f} us  {rates}  "
            f"roofline {bound:8.1f} us  {100 * bound / self.us:5.1f}%"
        )


@dataclass(frozen=True)
class Share:
    """What the launches of one kernel take of a run: how many, and microseconds in all.

    `us` counts a kernel from its start, which may be early: while the one in front still runs.
    `added` is what it ends later than all in front of it have: what the step waits for it.
    """

    kernel: str
    count: int
    us: float
    added: float


def shares(run: Callable[[], object]) -> tuple[list[Share], float]:
    """Time of each kernel in a run, the most first, and microseconds from the first to the last.

    What kernels add makes the whole, the processors' time in front of each included.
    """
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    found = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    first = ended = min(e.time_range.start for e in found)
    sums: dict[str, Share] = {}
    for event in sorted(found, key=lambda e: e.time_range.end):
        known = sums.get(event.name, Share(event.name, 0, 0.0, 0.0))
        taken = event.time_range.end - event.time_range.start
        added = event.time_range.end - ended
        ended = event.time_range.end
        sums[event.name] = Share(event.name, known.count + 1, known.us + taken, known.added + added)
    return sorted(sums.values(), key=lambda share: -share.added), ended - first


def ceilings() -> Ceilings:
    """Measure a copy, a read and a square bf16 product on random data.

    The bandwidth is the better of the two: reads alone go faster than reads and writes in turn.
    """
    source = torch.randn(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy = captured_us([lambda: target.copy_(source)])
    total = torch.empty((), device="cuda")
    read = captured_us([lambda: torch.sum(source, (0,), out=total)])
    bandwidth = max(2 * _COPY_BYTES / copy, _COPY_BYTES / read) * 1e6
    a, b = (torch.randn(_GEMM, _GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = captured_us([lambda: torch.mm(a, b, out=out)] * 4)
    return Ceilings(bandwidth, 2 * _GEMM**3 / product * 1e6)


def announce(found: Ceilings) -> None:
    """Print the machine and its ceilings."""
    import triton

    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    print(
        f"memory {found.bandwidth * 1e-12:.2f} TB/s, bf16 product {found.bf16 * 1e-12:.0f} TFLOP/s"
    )
