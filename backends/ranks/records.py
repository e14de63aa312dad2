"""Records of the collectives' algorithms, and of what needs a rank's own number only."""

from typing import Any

from metainfer.backends.kernel import Efficiency, Kernel, Registry
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.ranks.algorithms import (
    ALGORITHMS,
    COMPRESSED,
    FP8_ERROR,
    LIBRARY_ERROR,
    OWN,
    guarded,
)
from metainfer.backends.ranks.constraints import requires_of, window_of_query
from metainfer.backends.ranks.fused import register_fused
from metainfer.backends.torch.call import TorchBinder

# Sums that are rounded to the element type, or to codes, on the way.
_ERRORS = {
    ("all_reduce", "library"): LIBRARY_ERROR,
    ("all_reduce", "islands"): LIBRARY_ERROR,
    ("all_reduce", COMPRESSED): FP8_ERROR,
}
# Codes are made and read by torch's own ops, in f32: so many launches, and passes over the data.
_COMPRESSED: dict[str, Any] = {
    "option": "compress_collectives=fp8", "launches": 30, "extra_bytes": 20.0,
}  # fmt: skip


def register(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Register ``ranks.<op>_<algorithm>`` for every collective, and the ops of a rank's own."""
    for name, algorithms in ALGORITHMS.items():
        for algorithm, run in algorithms.items():
            kernels.add(
                Kernel(
                    f"ranks.{name}_{algorithm}", name, "ranks",
                    requires=requires_of(algorithm),
                    error=_ERRORS.get((name, algorithm), 0.0),
                    window=window_of_query(algorithm),
                    **(_COMPRESSED if algorithm == COMPRESSED else {}),
                    binder=TorchBinder(guarded(name, run)),
                )
            )  # fmt: skip
    register_fused(kernels)
    for name, run in OWN.items():
        kernels.add(
            Kernel(
                f"ranks.{name}", name, "ranks",
                efficiency=Efficiency(0.5, source="as other copies by torch"),
                binder=TorchBinder(run),
            )
        )  # fmt: skip


def algorithm_of(kernel: Kernel) -> str:
    """The algorithm by the name that `hardware.collective_cost` prices it under."""
    return kernel.name.removeprefix(f"{kernel.backend}.{kernel.op}_")
