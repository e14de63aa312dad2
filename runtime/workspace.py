"""Scratch space of the chosen kernels, and the memory that they share with peers."""

from collections.abc import Iterable, Mapping

from metainfer.backends.kernel import Query
from metainfer.backends.registry import Backends
from metainfer.hardware.device import Device
from metainfer.ir.flatten import FlatModule
from metainfer.ir.graph import Choice, Module
from metainfer.ir.streams import meeting_of


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


def window_bytes(modules: Iterable[Module], device: Device, backends: Backends) -> int:
    """Memory shared with peers, at the bounds of the sizes.

    Windows come in powers of two, each made when it is first wanted: those below the largest of an
    axis are together as large as it.
    """
    largest: dict[str, int] = {}
    for module in modules:
        limits = module.limits()
        for graph in module.graphs:
            for op in graph.ops:
                meeting = meeting_of(op)
                for choice in op.choices if meeting is not None else ():
                    assert meeting is not None
                    kernel, axis = backends.kernels.get(choice.kernel), str(meeting.attr["axis"])
                    if kernel.window is not None:
                        size = kernel.window(Query(op, device, _up_to(choice, limits)))
                        largest[axis] = max(largest.get(axis, 0), size)
    return 2 * sum(largest.values())


def _up_to(choice: Choice, limits: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Bounds of the sizes at which a row of a table is taken."""
    found = dict(limits)
    if choice.symbol in found:
        low, high = found[choice.symbol]
        found[choice.symbol] = (low, min(high, choice.limit))
    return found
