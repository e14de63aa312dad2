"""The kernels and layouts of all installed backends.

Backends of other packages plug in through the entry point group ``metainfer.backends``: each names
a function ``register(kernels: Registry, layouts: LayoutRegistry) -> None``.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from metainfer.backends.kernel import Registry
from metainfer.backends.layout import LayoutRegistry

ENTRY_POINT_GROUP = "metainfer.backends"


@dataclass(frozen=True)
class Backends:
    """Everything that can be chosen."""

    kernels: Registry
    layouts: LayoutRegistry


@cache
def installed() -> Backends:
    """Register our own backends, then those of installed packages, once per process."""
    from metainfer.backends.cpu.records import register as register_cpu
    from metainfer.backends.ranks.records import register as register_ranks
    from metainfer.backends.torch.records import register as register_torch
    from metainfer.backends.triton.records import register as register_triton

    backends = Backends(Registry(), LayoutRegistry())
    register_cpu(backends.kernels, backends.layouts)
    register_torch(backends.kernels, backends.layouts)
    register_ranks(backends.kernels, backends.layouts)
    register_triton(backends.kernels, backends.layouts)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        entry.load()(backends.kernels, backends.layouts)
    return backends
