"""Every Triton kernel of a plan, compiled for its card and held against it, without the card.

Shared memory, registers, spills and the matrix instructions are read from the code that Triton
makes; a kernel that is over its card's limits, or that wants one instruction and got another, is a
fault. `metainfer kernels check` prints them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from metainfer.backends.kernel import Kernel, Query
from metainfer.backends.registry import Backends, installed
from metainfer.backends.triton.cross import Resources, faults_of, resources_of
from metainfer.backends.triton.fits import typed_call
from metainfer.backends.triton.launch import Launch, TritonBinder
from metainfer.backends.triton.records_linear import (
    GATED_KIND,
    ROUNDED_KIND,
    sample_gated,
    sample_product,
)
from metainfer.compiler.tuning.keys import device_key, key_of
from metainfer.compiler.tuning.measured import parse_sizes
from metainfer.compiler.tuning.tasks import met_in, targets_of
from metainfer.compiler.tuning.tuned_file import Section
from metainfer.hardware.device import Device
from metainfer.hardware.machine import Machine
from metainfer.ir.dtypes import BF16, FP8_BLOCK, FP8_GROUP, parse_dtype
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Module, Op
from metainfer.ir.plan import Plan
from metainfer.ir.types import tensor
from metainfer.passes.candidates import kind_of

# Weights that the product template is compiled for, whatever the plans have.
FORMATS = ("bf16", "f8e4m3/128x128:f32", "f4e2m1/32:f8e8m0", "u4/32:f16+f16", "i8/32:f16")


@dataclass(frozen=True)
class Planned:
    """One launch that a plan makes.

    Attributes:
        kernel: name of its kernel.
        group: kind of the group that it runs.
        phase: of the plan.
        size: symbol and value that its row of the kernel table ends at ("T=16"), "" for all.
        launch: the launch, without contents.
    """

    kernel: str
    group: str
    phase: str
    size: str
    launch: Launch


@dataclass(frozen=True)
class Checked:
    """One launch, compiled.

    Attributes:
        planned: what was compiled.
        device: name of the card.
        limit_bytes: shared memory that a program may take there.
        resources: what it takes; None if Triton refuses it.
        faults: what is wrong, "" if nothing.
    """

    planned: Planned
    device: str
    limit_bytes: int
    resources: Resources | None
    faults: str


def planned_launches(plan: Plan) -> Iterator[Planned]:
    """All launches of a plan's Triton kernels, equal ones of several layers once."""
    device = Machine.from_dict(dict(plan.meta["machine"])).device(0)
    backends = installed()
    for phase in plan.phases:
        for stage in range(plan.layout.pp):
            yield from _of_module(plan.module(phase, stage), phase, device, backends)


def _of_module(module: Module, phase: str, device: Device, backends: Backends) -> Iterator[Planned]:
    limits = module.limits()
    for graph in module.graphs:
        for op in graph.ops:
            for choice in op.choices:
                kernel = backends.kernels.get(choice.kernel)
                if not isinstance(kernel.binder, TritonBinder):
                    continue
                env = {name: high for name, (_, high) in limits.items()}
                size = f"{choice.symbol}={choice.limit}" if choice.symbol else ""
                if choice.symbol:
                    env[choice.symbol] = choice.limit
                for launch in launches_of(kernel, op, device, env, backends):
                    yield Planned(kernel.name, kind_of(op), phase, size, launch)


def launches_of(
    kernel: Kernel, op: Op, device: Device, env: dict[str, int], backends: Backends
) -> tuple[Launch, ...]:
    """Launches of one group by a Triton kernel, without contents."""
    query = Query(op, device, {name: (size, size) for name, size in env.items()})
    scratch = kernel.workspace(query) if kernel.workspace is not None else 0
    call = typed_call(op, env, kernel.layouts, backends.layouts, scratch)
    return tuple(kernel.binder.launches(call))


def tuned_launches(plan: Plan, sections: Sequence[Section]) -> Iterator[Planned]:
    """Launches of the Triton kernels that were measured for a plan's groups, at those sizes.

    A tuned file may turn any choice to one of these.
    """
    device, backends = Machine.from_dict(dict(plan.meta["machine"])).device(0), installed()
    known = {kernel.name: kernel for kernel in backends.kernels.all()}
    own = [s for s in sections if s.device == device_key(device)]
    for target, module in targets_of(plan, backends):
        highs = {name: high for name, (_, high) in module.limits().items()}
        for met in met_in(module, target):
            key = key_of(met.op)
            figures = [p for s in own for p in s.groups.get(key.text, {}).items()]
            for name, sizes in figures:
                if name not in known or not isinstance(known[name].binder, TritonBinder):
                    continue
                times = [text for text, figure in sizes.items() if not isinstance(figure, str)]
                for text in times:
                    env = key.env(dict(parse_sizes(text)), highs)
                    for launch in launches_of(known[name], met.op, device, env, backends):
                        yield Planned(name, kind_of(met.op), target.strategy.phase, text, launch)


def check_plan(plan: Plan, sections: Sequence[Section] = ()) -> tuple[Checked, ...]:
    """Compile a plan's Triton kernels for its card; equal code is shown once.

    Args:
        plan: the plan.
        sections: of tuned files: what was measured for the plan's groups is compiled, too.
    """
    device = Machine.from_dict(dict(plan.meta["machine"])).device(0)
    found: dict[tuple[object, ...], Checked] = {}
    for planned in chain(planned_launches(plan), tuned_launches(plan, sections)):
        checked = check_launch(planned, device)
        key = (planned.kernel, planned.launch.function.__name__, checked.resources, checked.faults)
        found.setdefault(key, checked)
    return tuple(found.values())


def check_products(device: Device, only: str = "") -> tuple[Checked, ...]:
    """Compile the product template for a card, for each format and tile that it has.

    Args:
        device: the card.
        only: name of the one kernel that is asked about; "" for all.
    """
    found: list[Checked] = []
    for text in FORMATS:
        op = sample_product(BF16, tensor(parse_dtype(text), 1, 1))
        found += _check_candidates("linear", op, f"linear of {text}", device, only)
    weight, title = tensor(FP8_BLOCK, 1, 1), "linear of fp8 by fp8"
    found += _check_candidates("linear", sample_product(FP8_GROUP, weight), title, device, only)
    for rounded, kind in ((False, GATED_KIND), (True, ROUNDED_KIND)):
        op = sample_gated(FP8_GROUP, weight, rounded=rounded)
        found += _check_candidates(kind, op, title, device, only)
    return tuple(found)


def _check_candidates(
    kind: str, op: Op, title: str, device: Device, only: str
) -> Iterator[Checked]:
    backends, query = installed(), Query(op, device, {})
    for kernel in backends.kernels.candidates(kind):
        if kernel.backend != "triton" or only not in ("", kernel.name):
            continue
        if replace(kernel, fits=None).refusals(query):
            continue
        for launch in launches_of(kernel, op, device, {}, backends):
            yield check_launch(Planned(kernel.name, title, "", "", launch), device)


def check_launch(planned: Planned, device: Device) -> Checked:
    """Compile one launch and hold it against a card."""
    limit = device.smem_per_block_bytes
    try:
        taken = resources_of(planned.launch, device)
    except Unsupported as error:
        return Checked(planned, device.name, limit, None, f"{error.what}: {error.text}")
    faults = "; ".join(faults_of(taken, planned.launch, device))
    return Checked(planned, device.name, limit, taken, faults)


def sources_of(plan: Plan) -> dict[str, str]:
    """Texts of the modules that a plan's launches come from, by file name."""
    found: dict[str, str] = {}
    for planned in planned_launches(plan):
        functions = [planned.launch.function, *planned.launch.constants.values()]
        for function in functions:
            file = getattr(getattr(function, "fn", None), "__code__", None)
            if file is not None:
                path = Path(file.co_filename)
                found[path.name] = path.read_text()
    return dict(sorted(found.items()))
