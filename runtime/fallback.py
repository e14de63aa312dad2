"""The next candidate where a kernel cannot be compiled on this machine, and a line for it.

What a plan's kernels take of a card is known when it is compiled, by another compiler maybe. Here
the compiler of this machine has the last word: as a plan is loaded (`settled`), and as a kernel is
first launched (`Standing`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from metainfer.backends.kernel import Kernel, Query
from metainfer.backends.registry import Backends
from metainfer.hardware.device import Device
from metainfer.ir.errors import CompileFailure
from metainfer.ir.graph import Choice, Graph, Module, Op
from metainfer.ir.types import TensorType

Limits = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Standbys:
    """What may stand in for a kernel that cannot be compiled.

    Attributes:
        device: where it would run.
        backends: the kernels.
        is_exact: whether only those count that add no rounding of their own.
    """

    device: Device
    backends: Backends
    is_exact: bool = False

    def of(self, op: Op, kernel: Kernel, limits: Limits, room: int | None = None) -> list[Kernel]:
        """Kernels that read the same packings and refuse nothing; made ones before generic ones.

        Args:
            op: the group.
            kernel: what cannot be compiled.
            limits: bounds of the sizes.
            room: scratch bytes that there are; None for any number.
        """
        query = Query(op, self.device, limits)
        found = [
            other
            for other in self.backends.kernels.candidates(query.kind)
            if other.name != kernel.name
            and other.backend != "cpu"
            and not other.option
            and not (self.is_exact and other.error)
            and _reads(other, op)
            and (room is None or _scratch(other, query) <= room)
            and not other.refusals(query)
        ]
        return sorted(found, key=lambda k: (k.generic, k.backend != kernel.backend, k.launches))

    def room_of(self, op: Op, kernel: Kernel, limits: Limits) -> int:
        """Scratch bytes that a kernel was planned with."""
        return _scratch(kernel, Query(op, self.device, limits))


def _reads(kernel: Kernel, op: Op) -> bool:
    """Whether operands are packed as a kernel reads them."""
    return all(
        not isinstance(v.type, TensorType) or v.type.layout == kernel.layouts.get(i, "")
        for i, v in enumerate(op.operands)
    )


def _scratch(kernel: Kernel, query: Query) -> int:
    return 0 if kernel.workspace is None else kernel.workspace(query)


def settled(module: Module, standbys: Standbys) -> tuple[Module, tuple[str, ...]]:
    """The module with other kernels for those that this machine's compiler refuses.

    Returns: the module, and a line for each kernel that was replaced.
    """
    notes: dict[str, None] = {}

    def chosen(op: Op, choice: Choice) -> Choice:
        kernel = standbys.backends.kernels.get(choice.kernel)
        limits = module.limits()
        refusals = kernel.refusals(Query(op, standbys.device, limits))
        if not refusals or kernel.fits is None or refusals[0].constraint != kernel.fits.text:
            return choice
        others = standbys.of(op, kernel, limits)
        if not others:
            return choice  # refused with its reason when kernels are checked
        notes[_note(kernel, others[0], refusals[0].found)] = None
        return replace(choice, kernel=others[0].name)

    def changed(graph: Graph) -> Graph:
        ops = (replace(op, choices=tuple(chosen(op, c) for c in op.choices)) for op in graph.ops)
        return replace(graph, ops=tuple(ops))

    made = replace(module, graphs=tuple(changed(g) for g in module.graphs))
    return (made if notes else module), tuple(notes)


def _note(kernel: Kernel, other: Kernel, reason: str) -> str:
    kind = ", a generic one," if other.generic else ""
    return f"{other.name}{kind} stands in for {kernel.name}: {reason}"


class Standing:
    """A call whose kernel is compiled when it first runs; the next candidate if that fails.

    Args:
        call: the kernel's.
        following: makes the call of the next candidate, or raises what it is given.
    """

    def __init__(
        self, call: Callable[[], None], following: Callable[[CompileFailure], "Standing"]
    ) -> None:
        self._call, self._following = call, following

    def __call__(self) -> None:
        """Run it."""
        try:
            self._call()
        except CompileFailure as error:
            self._call = self._following(error)
            self._call()


class StandIns:
    """Which kernels stand in for others in a phase, found as they are first launched.

    Args:
        standbys: the candidates; None where ranks would have to agree.
        limits: bounds of the phase's sizes.
    """

    def __init__(self, standbys: Standbys | None, limits: Limits) -> None:
        self._standbys, self._limits = standbys, limits
        self._broken: dict[str, str] = {}
        self.notes: list[str] = []

    def call(
        self, op: Op, kernel: Kernel, bind: Callable[[Kernel], Callable[[], None]],
        placed: Collection[int] = (),
    ) -> Callable[[], None]:  # fmt: skip
        """The call of a group by a kernel, or by what stands in for it.

        Args:
            op: the group.
            kernel: as planned.
            bind: makes a kernel's call.
            placed: results that lie where an operand did: what stands in must bear that, too.
        """
        standbys = self._standbys
        if standbys is None or kernel.backend != "triton":
            return bind(kernel)
        over = {r: kernel.in_place[r] for r in placed}
        return self._standing(standbys, op, kernel, kernel, bind, over)

    def _standing(
        self,
        standbys: Standbys,
        op: Op,
        planned: Kernel,
        kernel: Kernel,
        bind: Callable[[Kernel], Callable[[], None]],
        over: Mapping[int, int],
    ) -> Standing:
        def following(error: CompileFailure) -> Standing:
            is_news = kernel.name not in self._broken
            self._broken.setdefault(kernel.name, error.what)
            room = standbys.room_of(op, planned, self._limits)
            others = standbys.of(op, planned, self._limits, room)
            usable = [
                k
                for k in others
                if k.name not in self._broken and over.items() <= dict(k.in_place).items()
            ]
            if not usable:
                raise error
            if is_news:
                self.notes.append(_note(kernel, usable[0], error.what))
            return self._standing(standbys, op, planned, usable[0], bind, over)

        def refused() -> None:
            raise CompileFailure(self._broken[kernel.name])

        call = refused if kernel.name in self._broken else bind(kernel)
        return Standing(call, following)
