"""Scratch space of the chosen kernels."""

from metainfer.backends.kernel import Query
from metainfer.backends.registry import Backends
from metainfer.hardware.device import Device
from metainfer.ir.flatten import FlatModule
from metainfer.ir.graph import Module


def workspace_bytes(module: Module, flat: FlatModule, device: Device, backends: Backends) -> int:
    """Largest scratch space that any chosen kernel asks for, at the bounds of the sizes."""
    limits = module.limits()
    most = 0
    for item in flat.ops:
        for choice in item.op.choices:
            kernel = backends.kernels.get(choice.kernel)
            if kernel.workspace is not None:
                most = max(most, kernel.workspace(Query(item.op, device, limits)))
    return most
