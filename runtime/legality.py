"""Whether a plan's kernels may run its groups: asked anew when a plan is loaded."""

from metainfer.backends.kernel import Kernel, Query
from metainfer.backends.registry import Backends
from metainfer.hardware.device import Device
from metainfer.ir.errors import PlanError
from metainfer.ir.graph import Module
from metainfer.ir.printer import print_op
from metainfer.ir.types import TensorType


def check_kernels(module: Module, device: Device, backends: Backends) -> None:
    """Require that every kernel a module names implements its group on the device.

    Kernels write by address and trust what they are given, so a plan is not taken at its word.

    Raises: PlanError naming the group, the kernel and what it wants.
    """
    limits = module.limits()
    for graph in module.graphs:
        for op in graph.ops:
            query = Query(op, device, limits)
            for choice in op.choices:
                _check(backends.kernels.get(choice.kernel), query, graph.name)


def _check(kernel: Kernel, query: Query, graph: str) -> None:
    if kernel.op != query.kind:
        wanted = f"it implements {kernel.op}, the group is {query.kind}"
    else:
        refusals = kernel.refusals(query)
        # What a repair mends, the kernel's own binding mends.
        unmended = refusals if kernel.repairs_for(refusals) is None else ()
        packings = _packings(kernel, query)
        if not unmended and not packings:
            return
        wanted = "\n".join([*map(str, unmended), *packings])
    raise PlanError(
        f"kernel {kernel.name} cannot run this group of {graph}",
        text=f"{print_op(query.op)}\n{wanted}",
        advice="compile again; decisions are changed with --pin and --forbid, not by hand",
    )


def _packings(kernel: Kernel, query: Query) -> list[str]:
    """Operands that are not packed as the kernel reads them."""
    found = []
    for index, value in enumerate(query.op.operands):
        wanted = kernel.layouts.get(index, "")
        if isinstance(value.type, TensorType) and value.type.layout != wanted:
            held = value.type.layout or "plain"
            found.append(f"wanted operand {index} as {wanted or 'plain'}, found {held}")
    return found
