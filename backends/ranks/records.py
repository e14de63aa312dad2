"""Records of the collectives' algorithms, and of what needs a rank's own number only."""

from metainfer.backends.kernel import Efficiency, Kernel, Registry
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.ranks.algorithms import ALGORITHMS, LIBRARY_ERROR, OWN, guarded
from metainfer.backends.ranks.fused import register_fused
from metainfer.backends.torch.call import TorchBinder


def register(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Register ``ranks.<op>_<algorithm>`` for every collective, and the ops of a rank's own."""
    for name, algorithms in ALGORITHMS.items():
        for algorithm, run in algorithms.items():
            kernels.add(
                Kernel(
                    f"ranks.{name}_{algorithm}", name, "ranks",
                    error=LIBRARY_ERROR if (name, algorithm) == ("all_reduce", "library") else 0.0,
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
