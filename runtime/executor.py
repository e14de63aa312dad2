"""The executor: runs one phase of a plan over an arena.

Neighbouring CPU kernels become one command list, run by one C++ call; torch kernels are called one
by one on views of the arena. A kernel table is resolved once per row of sizes, and views once per
combination of sizes.
"""

import bisect
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from metainfer.backends.cpu.emit import ProgramDims
from metainfer.backends.cpu.program import Program, ProgramBuilder
from metainfer.backends.kernel import Kernel
from metainfer.backends.registry import Backends
from metainfer.ir.arena import Arena
from metainfer.ir.errors import PlanError
from metainfer.ir.flatten import FlatModule, FlatOp
from metainfer.ir.graph import Module, Value
from metainfer.ir.streams import is_empty
from metainfer.ir.views import is_view, strided_values
from metainfer.runtime.bind import CpuEmitter, TorchEmitter
from metainfer.runtime.fallback import Standbys, StandIns
from metainfer.runtime.storage import Storage
from metainfer.runtime.streams import Call, Issuer

_VIEW_CACHE = 16  # combinations of sizes whose views are kept
Env = Mapping[str, int]
Observer = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class CpuSegment:
    """Consecutive CPU kernels as one program; ``counts`` commands belong to each op."""

    program: Program
    dims: ProgramDims
    ops: tuple[FlatOp, ...]
    kernels: tuple[str, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class TorchSegment:
    """Consecutive torch kernels (and copies that views need)."""

    ops: tuple[FlatOp, ...]
    kernels: tuple[Kernel | None, ...]


Segment = CpuSegment | TorchSegment


@dataclass(frozen=True)
class Measured:
    """One group of a traced step.

    Units: microseconds from the start of the step.
    """

    item: FlatOp
    kernel: str
    start_us: float
    duration_us: float


class PhaseExecutor:
    """Runs one phase.

    Args:
        module: compiled module of the phase.
        flat: the same, flattened.
        arena: offsets of its values.
        storage: memory, weights, states, step fields.
        backends: kernels by name.
        phase: its name; weights are kept by phase and name.
        standbys: what may stand in for kernels that cannot be compiled; None for nothing.
    """

    def __init__(
        self, module: Module, flat: FlatModule, arena: Arena, storage: Storage, backends: Backends,
        phase: str, standbys: Standbys | None = None,
    ) -> None:  # fmt: skip
        self.module = module
        self.flat = flat
        self._storage = storage
        self._weights = storage.weights_of(phase)
        self._backends = backends
        self._arena = arena
        self._limits = module.limits()
        self._stand_ins = StandIns(standbys, self._limits)
        self._strided = strided_values(item.op for item in flat.ops)
        self._tables = _thresholds(flat)
        self._issuer = Issuer([item.op for item in flat.ops], storage.device)
        self._variants: dict[tuple[tuple[int, ...], frozenset[str]], list[Segment]] = {}
        self._bound: OrderedDict[tuple[Any, ...], list[list[Callable[[], None]]]] = OrderedDict()

    def run(self, env: Env) -> None:
        """Run the phase once; inputs and outputs lie in the storage."""
        for step in self.launches(env):
            step()

    def observe(self, env: Env, watched: Mapping[str, Value], seen: Observer) -> None:
        """Run once, showing values right before the ops that read them.

        Args:
            env: sizes of the step.
            watched: the value to show before an op, by the name of the op's first result.
            seen: gets that name and the value, a view that holds until it returns.
        """
        views = self._views(env)
        for segment in self._segments(env, frozenset(watched)):
            name = segment.ops[0].op.results[0].name
            if name in watched:
                seen(name, views.tensor(watched[name]))
            for call in self._calls(segment, env, views):
                call()

    def trace(self, env: Env) -> list[Measured]:
        """Run once, timing every group by itself."""
        segments = self._segments(env)
        bound = self._bind(segments, env)
        begun = time.perf_counter()
        found: list[Measured] = []
        for segment, calls in zip(segments, bound, strict=True):
            if isinstance(segment, CpuSegment):
                found += _trace_program(segment, env, begun)
                continue
            for item, kernel, call in zip(segment.ops, segment.kernels, calls, strict=True):
                start = time.perf_counter()
                call()
                now = time.perf_counter()
                name = kernel.name if kernel else "copy"
                found.append(Measured(item, name, (start - begun) * 1e6, (now - start) * 1e6))
        return found

    def kernels_at(self, env: Env) -> list[tuple[FlatOp, str]]:
        """Which kernel each group takes at concrete sizes."""
        variant = self._variant(env)
        return [
            (item, kernel.name)
            for item in self.flat.ops
            if (kernel := self._kernel(item, variant)) is not None
        ]

    @property
    def num_streams(self) -> int:
        """How many streams a step runs on, as planned."""
        return self._issuer.num_streams

    # --- preparation ---------------------------------------------------------------------------

    def launches(self, env: Env) -> list[Callable[[], None]]:
        """The phase at these sizes, launch by launch, on buffers that stay where they are."""
        bound = self._bind(self._segments(env), env)
        return [*self._issuer.begin(), *(call for calls in bound for call in calls)]

    def _variant(self, env: Env) -> tuple[int, ...]:
        return tuple(bisect.bisect_left(limits, env[s]) for s, limits in self._tables)

    def _segments(self, env: Env, cuts: frozenset[str] = frozenset()) -> list[Segment]:
        """Segments of a variant; the ops named in ``cuts`` begin one each."""
        key = (self._variant(env), cuts)
        if key not in self._variants:
            self._variants[key] = self._build(*key)
        return self._variants[key]

    def _kernel(self, item: FlatOp, variant: tuple[int, ...]) -> Kernel | None:
        """The kernel of a group in a variant, None for views and copies."""
        if not item.op.choices:
            return None
        sizes = {
            symbol: limits[number] if number < len(limits) else None
            for (symbol, limits), number in zip(self._tables, variant, strict=True)
        }
        for choice in item.op.choices:
            bound = sizes.get(choice.symbol)
            if not choice.symbol or (bound is not None and bound <= choice.limit):
                return self._backends.kernels.get(choice.kernel)
        raise PlanError(f"the kernel table of {item.op.name} has no row for this size")

    def _build(self, variant: tuple[int, ...], cuts: frozenset[str]) -> list[Segment]:
        segments: list[Segment] = []
        pending: list[tuple[FlatOp, Kernel | None]] = []
        for item in self.flat.ops:
            if is_view(item.op, self._strided):
                continue
            kernel = self._kernel(item, variant)
            is_cut = item.op.results[0].name in cuts
            if pending and (is_cut or _is_cpu(pending[-1][1]) != _is_cpu(kernel)):
                segments.append(self._segment(pending))
                pending = []
            pending.append((item, kernel))
        if pending:
            segments.append(self._segment(pending))
        return segments

    def _segment(self, pending: Sequence[tuple[FlatOp, Kernel | None]]) -> Segment:
        ops = tuple(item for item, _ in pending)
        if not _is_cpu(pending[0][1]):
            return TorchSegment(ops, tuple(kernel for _, kernel in pending))
        builder, dims, counts = ProgramBuilder(), ProgramDims(), []
        emitter = CpuEmitter(self._storage, self._weights, self.flat, self._arena, self._limits)
        for item, kernel in pending:
            assert kernel is not None
            before = len(builder)
            emitter.emit(item, kernel, builder, dims)
            counts.append(len(builder) - before)
        names = tuple(kernel.name for _, kernel in pending if kernel is not None)
        return CpuSegment(builder.build(), dims, ops, names, tuple(counts))

    def _bind(self, segments: Sequence[Segment], env: Env) -> list[list[Callable[[], None]]]:
        key = (self._variant(env), tuple(sorted(env.items())))
        if key in self._bound:
            self._bound.move_to_end(key)
            return self._bound[key]
        views = self._views(env)
        bound = [self._issued(segment, self._calls(segment, env, views)) for segment in segments]
        self._bound[key] = bound
        if len(self._bound) > _VIEW_CACHE:
            self._bound.popitem(last=False)
        return bound

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each kernel that another one stands in for, as far as steps ran."""
        return tuple(self._stand_ins.notes)

    def _calls(self, segment: Segment, env: Env, views: TorchEmitter) -> list[Call]:
        """Functions without arguments that run a segment at concrete sizes."""
        if isinstance(segment, CpuSegment):
            return [_program_call(segment.program, segment.dims.evaluate(env))]
        return [
            self._bound_call(item, kernel, env, views)
            for item, kernel in zip(segment.ops, segment.kernels, strict=True)
        ]

    def _bound_call(
        self, item: FlatOp, kernel: Kernel | None, env: Env, views: TorchEmitter
    ) -> Call:
        if is_empty(item.op, env):
            return _nothing
        if kernel is None:
            return views.bind(item, None)
        placed = [i for i, v in enumerate(item.op.results) if v.name in self._arena.in_place]
        return self._stand_ins.call(item.op, kernel, partial(views.bind, item), placed)

    def _issued(self, segment: Segment, calls: list[Call]) -> list[Call]:
        if isinstance(segment, CpuSegment):
            return calls
        pairs = zip(segment.ops, calls, strict=True)
        return [self._issuer.issued(item.op, call) for item, call in pairs]

    def _views(self, env: Env) -> TorchEmitter:
        return TorchEmitter(self._storage, self._weights, self.flat, self._arena, env)

    def output(self, index: int, env: Env) -> torch.Tensor:
        """An output of the last run, a view of the arena."""
        views = self._views(env)
        return views.tensor(self.flat.outputs[index])

    def input(self, index: int, env: Env) -> torch.Tensor:
        """Where an input of the next run goes, a view of the arena."""
        views = self._views(env)
        return views.tensor(self.flat.inputs[index])


def _is_cpu(kernel: Kernel | None) -> bool:
    return kernel is not None and kernel.backend == "cpu"


def _thresholds(flat: FlatModule) -> tuple[tuple[str, list[int]], ...]:
    """Ascending limits of each symbol over all kernel tables."""
    found: dict[str, set[int]] = {}
    for item in flat.ops:
        for choice in item.op.choices:
            if choice.symbol:
                found.setdefault(choice.symbol, set()).add(choice.limit)
    return tuple((symbol, sorted(limits)) for symbol, limits in sorted(found.items()))


def _nothing() -> None:
    """A part of the rows that there is none of: ranks skip it alike, since they agree on sizes."""


def _program_call(program: Program, dims: list[int]) -> Callable[[], None]:
    return lambda: program.run(dims)


def _trace_program(segment: CpuSegment, env: Env, begun: float) -> list[Measured]:
    at = (time.perf_counter() - begun) * 1e6
    commands = [duration for _, duration in segment.program.profile(segment.dims.evaluate(env))]
    found: list[Measured] = []
    position = 0
    for item, kernel, count in zip(segment.ops, segment.kernels, segment.counts, strict=True):
        duration = float(np.sum(commands[position : position + count]))
        found.append(Measured(item, kernel, at, duration))
        at += duration
        position += count
    return found
