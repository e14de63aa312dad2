"""What a user forces with --pin, --forbid and --skip-pass: names and effects are checked."""

from collections.abc import Mapping

from metainfer.backends.kernel import Registry
from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Module, Op
from metainfer.ir.options import Options
from metainfer.passes.candidates import kind_of
from metainfer.passes.pipeline import pass_named


def check_overrides(options: Options, kernels: Registry) -> None:
    """Check the names before anything runs.

    Raises: PlanError for an unknown kernel, MetainferError for an unknown pass or a kernel that is
        pinned to a group that it does not implement.
    """
    for name in options.skip_passes:
        pass_named(name)
    for name in options.forbids:
        kernels.get(name)
    for group, name in options.pins:
        kernel = kernels.get(name)
        if kernel.op != group:
            able = ", ".join(k.name for k in kernels.candidates(group)) or "none"
            raise MetainferError(
                f"--pin {group}={name}: that kernel implements {kernel.op}",
                advice=f"kernels of {group}: {able}",
            )
        if name in options.forbids:
            raise MetainferError(f"{name} is both pinned and forbidden", advice="drop one of them")


def check_applied(options: Options, modules: Mapping[str, Module]) -> None:
    """Check that every pin chose a kernel somewhere: one without effect is a mistake.

    Raises: MetainferError naming the groups that there are.
    """
    chosen = {
        (kind_of(op), choice.kernel)
        for module in modules.values()
        for graph in module.graphs
        for op in graph.ops
        for choice in op.choices
    }
    for pin in options.pins:
        if pin not in chosen:
            raise MetainferError(
                f"--pin {pin[0]}={pin[1]} applies to no group of the model",
                text="\n".join(_groups(modules)),
                advice="pin one of these groups",
            )


def _groups(modules: Mapping[str, Module]) -> list[str]:
    found = {
        phase: sorted({kind_of(op) for g in m.graphs for op in g.ops if _is_group(op)})
        for phase, m in modules.items()
    }
    return [f"{phase}: {', '.join(kinds)}" for phase, kinds in found.items()]


def _is_group(op: Op) -> bool:
    return bool(op.choices)
