"""The record of a kernel: what it implements, what it requires, what repairs a refusal, its cost.

A kernel is one of many candidates for a group of ops. It never falls back by itself: `check` says
which of its requirements an op on a device fails, and the compiler repairs, takes another, or
reports. Execution is bound by the backend that registered the kernel (`Kernel.binder`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metainfer.hardware.device import Device
from metainfer.hardware.machine import Machine
from metainfer.ir.dims import Dim
from metainfer.ir.dtypes import DType
from metainfer.ir.errors import MetainferError, PlanError
from metainfer.ir.graph import Op
from metainfer.ir.ops.record import attr_value
from metainfer.ir.types import StateType, TensorType


@dataclass(frozen=True)
class Query:
    """An op (or fused group) on a device, with bounds of its sizes.

    Attributes:
        op: the group; a fused one carries its body.
        device: where it would run.
        limits: inclusive bounds of the size symbols in this phase.
        strided: operands that are views without dense rows (after a transpose, say).
        machine: where ranks meet; None where nobody asks about that.
        groups: the machine's ranks that meet in the op, group by group.
    """

    op: Op
    device: Device
    limits: Mapping[str, tuple[int, int]]
    strided: frozenset[int] = frozenset()
    machine: Machine | None = None
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def kind(self) -> str:
        """What kernels register for: the op's name, or the fused group's kind."""
        return str(self.op.attr["kind"]) if self.op.name == "fused" else self.op.name

    def tensor(self, operand: int) -> TensorType:
        """Type of a tensor operand."""
        return self.op.operands[operand].tensor

    def dtype(self, operand: int) -> DType:
        """Element type of a tensor operand."""
        return self.tensor(operand).dtype

    def size(self, operand: int, dim: int) -> int:
        """A size of an operand, at its upper bound."""
        return self.upper(self.tensor(operand).shape[dim])

    def upper(self, size: Dim) -> int:
        """Upper bound of a size."""
        return size.bounds(self.limits)[1]


@dataclass(frozen=True)
class Constraint:
    """One requirement of a kernel.

    Attributes:
        text: how explain names it ("K % 32 == 0").
        check: returns None where it holds, else what was found ("K = 576").
    """

    text: str
    check: Callable[[Query], str | None]


@dataclass(frozen=True)
class Refusal:
    """A requirement that failed: the constraint, and what was found instead."""

    kernel: str
    constraint: str
    found: str

    def __str__(self) -> str:
        """Print ``wanted K % 32 == 0, found K = 576``."""
        return f"wanted {self.constraint}, found {self.found}"


@dataclass(frozen=True)
class Repair:
    """A change that makes a kernel's failed requirement hold, without changing any number.

    Attributes:
        text: what is done ("pad K to 64").
        fixes: text of the constraint that holds afterwards.
        waste: extra work as a fraction of the group's work (0.11 = 11% more), at given bounds.
    """

    text: str
    fixes: str
    waste: Callable[[Query], float]


@dataclass(frozen=True)
class Cost:
    """Predicted time of one group.

    Units: seconds; flops are operations, bytes are memory traffic.

    Attributes:
        seconds: launch included.
        flops: arithmetic.
        bytes: compulsory traffic.
        bound: "memory", "compute" or "latency": the largest term.
        basis: "measured here", "measured elsewhere" or "analytic".
    """

    seconds: float
    flops: int
    bytes: int
    bound: str
    basis: str = "analytic"


@dataclass(frozen=True)
class Efficiency:
    """Which part of the device's rates a kernel reaches.

    Attributes:
        memory: of the sustained memory bandwidth.
        compute: of the sustained rate of ``rate``.
        rate: name of the arithmetic rate ("" = that of the first operand's type).
        source: where the fractions come from.
    """

    memory: float = 0.8
    compute: float = 0.6
    rate: str = ""
    source: str = "assumed"


Effort = Callable[[Op, Device, Mapping[str, int]], float]


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op or of a kind of fused group.

    Attributes:
        name: "<backend>.<op>_<variant>", unique.
        op: op name, or kind of the fused group.
        backend: which executor binds it ("cpu", "torch", "cuda", "triton").
        requires: constraints, all of which must hold.
        repairs: changes that make a failing constraint hold.
        layouts: operand number -> packing that the kernel reads; others are plain row-major.
        efficiency: fractions of the device's rates, by phase-independent default.
        launches: how many device launches one call makes.
        in_place: result number -> number of the operand whose place it may take: every number of
            that operand is read by who writes the same number of the result, before it is written;
            others may read it, too, if they drop what they read.
        starts_as_copy: whether a result that did not get that place is a copy of the operand
            first: a launch and two passes over it that are not counted elsewhere.
        generic: a plain composition that stands in where no made kernel fits; refused by --strict.
        error: relative error that the kernel adds to its op's own rounding (0 = none).
        workspace: scratch bytes at the bounds of the query.
        window: bytes of memory shared with peers at those bounds (`backends.ranks.windows`).
        option: "field=value" of `ir.options.Options` without which it is never taken; "" for all
            but those that change numbers more than rounding does.
        extra_bytes: traffic beyond the compulsory one, as a fraction.
        effort: arithmetic done at concrete sizes over what the op needs (tiles that hang over,
            processors left idle); None counts as 1.
        fits: a constraint whose answer takes a compile: asked only where all others hold.
        binder: made by the backend; opaque to the compiler.
    """

    name: str
    op: str
    backend: str
    requires: tuple[Constraint, ...] = ()
    repairs: tuple[Repair, ...] = ()
    layouts: Mapping[int, str] = field(default_factory=dict[int, str])
    efficiency: Efficiency = field(default_factory=Efficiency)
    launches: int = 1
    in_place: Mapping[int, int] = field(default_factory=dict[int, int])
    starts_as_copy: bool = False
    generic: bool = False
    error: float = 0.0
    workspace: Callable[[Query], int] | None = None
    window: Callable[[Query], int] | None = None
    option: str = ""
    extra_bytes: float = 0.0
    effort: Effort | None = None
    fits: Constraint | None = None
    binder: Any = None

    def refusals(self, query: Query) -> tuple[Refusal, ...]:
        """Requirements that the op on this device fails."""
        found: list[Refusal] = []
        for constraint in self.requires:
            reason = _checked(constraint, query)
            if reason is not None:
                found.append(Refusal(self.name, constraint.text, reason))
        if not found and self.fits is not None:
            reason = _checked(self.fits, query)
            if reason is not None:
                found.append(Refusal(self.name, self.fits.text, reason))
        return tuple(found)

    def repairs_for(self, refusals: Sequence[Refusal]) -> tuple[Repair, ...] | None:
        """Repairs that undo all refusals, or None if one has none."""
        chosen: list[Repair] = []
        for refusal in refusals:
            repair = next((r for r in self.repairs if r.fixes == refusal.constraint), None)
            if repair is None:
                return None
            chosen.append(repair)
        return tuple(chosen)


def _checked(constraint: Constraint, query: Query) -> str | None:
    try:
        return constraint.check(query)
    except MetainferError as error:
        # A size that is symbolic where the constraint needs a number is a refusal, not a fault.
        return error.what


class Registry:
    """Kernels by name and by what they implement."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}

    def add(self, kernel: Kernel) -> Kernel:
        """Register a kernel.

        Raises: ValueError if the name is taken.
        """
        if kernel.name in self._kernels:
            raise ValueError(f"kernel {kernel.name!r} is registered twice")
        self._kernels[kernel.name] = kernel
        return kernel

    def get(self, name: str) -> Kernel:
        """A kernel by name.

        Raises: PlanError if it is unknown.
        """
        found = self._kernels.get(name)
        if found is None:
            import difflib

            near = ", ".join(difflib.get_close_matches(name, self._kernels, n=3))
            advice = f"did you mean {near}?" if near else ""
            raise PlanError(f"unknown kernel {name!r}", advice=advice)
        return found

    def candidates(self, op: str) -> tuple[Kernel, ...]:
        """Kernels that implement an op, in order of registration."""
        return tuple(k for k in self._kernels.values() if k.op == op)

    def all(self) -> tuple[Kernel, ...]:
        """All kernels."""
        return tuple(self._kernels.values())


# --- the vocabulary of constraints -----------------------------------------------------------


def feature(name: str) -> Constraint:
    """The device has a feature."""

    def check(query: Query) -> str | None:
        return None if query.device.has(name) else f"{query.device.name} lacks it"

    return Constraint(f"feature {name}", check)


def device_kind(kind: str) -> Constraint:
    """The device is a cpu or a gpu."""

    def check(query: Query) -> str | None:
        return None if query.device.kind == kind else f"a {query.device.kind}"

    return Constraint(f"device is a {kind}", check)


def dtype(operand: int, *names: str) -> Constraint:
    """An operand has one of the element types (text forms)."""

    def check(query: Query) -> str | None:
        if operand >= len(query.op.operands):
            return None
        found = str(query.dtype(operand))
        return None if found in names else found

    return Constraint(f"operand {operand} is {' or '.join(names)}", check)


def multiple_of(operand: int, dim: int, divisor: int, name: str = "") -> Constraint:
    """A static size of an operand is divisible."""

    def check(query: Query) -> str | None:
        size = query.tensor(operand).shape[dim].static
        return None if size % divisor == 0 else f"{size}"

    return Constraint(f"{name or f'dim {dim} of operand {operand}'} % {divisor} == 0", check)


def at_most(operand: int, dim: int, limit: int, name: str = "") -> Constraint:
    """A size of an operand is bounded."""

    def check(query: Query) -> str | None:
        size = query.size(operand, dim)
        return None if size <= limit else f"up to {size}"

    return Constraint(f"{name or f'dim {dim} of operand {operand}'} <= {limit}", check)


def attr_is(name: str, *values: Any) -> Constraint:
    """An attribute has one of the values; an absent one has the default of the op's record."""

    def check(query: Query) -> str | None:
        found = attr_value(query.op, name)
        return None if found in values else f"{found}"

    return Constraint(f"{name} is {' or '.join(map(str, values))}", check)


def page_size_in(state_operand: int, *sizes: int) -> Constraint:
    """The state's page size is one of those that the kernel is built for; 0 is still open."""

    def check(query: Query) -> str | None:
        type_ = query.op.operands[state_operand].type
        found = type_.page_size if isinstance(type_, StateType) else -1
        return None if found in (0, *sizes) else f"{found}"

    return Constraint(f"page size in {{{', '.join(map(str, sizes))}}}", check)


def dense(*operands: int) -> Constraint:
    """Operands are stored densely, not views with gaps (no list: all of them)."""

    def check(query: Query) -> str | None:
        bad = sorted(query.strided & set(operands)) if operands else sorted(query.strided)
        return f"operand {bad[0]} is a strided view" if bad else None

    return Constraint("dense operands", check)


def weight_operand(operand: int) -> Constraint:
    """An operand is a weight (known at load time, so that it can be packed)."""

    def check(query: Query) -> str | None:
        return None if query.op.operands[operand].is_weight else query.op.operands[operand].name

    return Constraint(f"operand {operand} is a weight", check)


def operand_count(*counts: int) -> Constraint:
    """The op has one of these numbers of operands."""

    def check(query: Query) -> str | None:
        found = len(query.op.operands)
        return None if found in counts else f"{found}"

    return Constraint(f"{' or '.join(map(str, counts))} operands", check)


def library(name: str) -> Constraint:
    """A library is usable on this device, as its description says."""

    def check(query: Query) -> str | None:
        found = query.device.library(name)
        return (found.refusal() or None) if found else None

    return Constraint(f"library {name}", check)
