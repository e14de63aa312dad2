"""tune: the candidates of a plan's groups, timed on the machine at hand and kept in a file."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from metainfer.backends.registry import installed
from metainfer.backends.sources import fingerprint
from metainfer.compiler.tuning.keys import device_key, library_versions
from metainfer.compiler.tuning.measure import Stopwatch
from metainfer.compiler.tuning.tasks import Task, tasks_of
from metainfer.compiler.tuning.tuned_file import FAILED, Section, read_sections, write_sections
from metainfer.compiler.tuning.worker import MakeWatch, TaskFailed, Worker
from metainfer.hardware.detect import detect_machine
from metainfer.hardware.device import Device
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import TuningError
from metainfer.ir.plan import Plan
from metainfer.runtime.load import check_machine

TASK_LIMIT_S = 120.0
_STEP_US = 1e-3
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """Which measurements of a plan.

    Attributes:
        phase: only of this phase; "" for all.
        group: only of groups whose kind or kernel matches this shell pattern; "" for all.
        limit_s: after how long no further group is begun; 0 for as long as it takes.
        threads: of the processor; 0 for as many as the plan's device has cores.
        task_limit_s: how long one measurement may take, its compiling included.
    """

    phase: str = ""
    group: str = ""
    limit_s: float = 0.0
    threads: int = 0
    task_limit_s: float = TASK_LIMIT_S

    def takes(self, task: Task) -> bool:
        """Whether a task of the phase is wanted."""
        names = (task.kind, task.kernel)
        return not self.group or any(fnmatchcase(name, self.group) for name in names)


@dataclass(frozen=True)
class Tuned:
    """What a tuning did.

    Attributes:
        section: the figures of this device and these libraries, old and new.
        tasks: all that the plan wants, of the phase that was asked for.
        measured: made now.
        known: were there already.
        failed: tasks made now that gave no time, with the reason.
        left: wanted, but not made: time was up.
        dropped: figures of kernels whose sources changed since, taken out.
        unhit: groups of the file for this device that no call of the plan computes.
    """

    section: Section
    tasks: tuple[Task, ...]
    measured: int = 0
    known: int = 0
    failed: tuple[tuple[Task, str], ...] = ()
    left: int = 0
    dropped: int = 0
    unhit: tuple[str, ...] = ()


@dataclass
class _Book:
    """The file while it grows: written anew after every measurement."""

    path: Path
    others: list[Section]
    section: Section
    dropped: int = 0
    failed: list[tuple[Task, str]] = field(default_factory=list[tuple[Task, str]])

    def knows(self, task: Task) -> bool:
        sizes = self.section.groups.get(task.group, {}).get(task.kernel, {})
        # A kernel that failed at one size is not tried at others: it would end the process again.
        return task.sizes in sizes or any(isinstance(f, str) for f in sizes.values())

    def add(self, task: Task, figure: float | str) -> None:
        kernels = self.section.groups.setdefault(task.group, {})
        kernels.setdefault(task.kernel, {})[task.sizes] = figure
        backend = installed().kernels.get(task.kernel).backend
        self.section.sources[backend] = fingerprint(backend)
        write_sections(self.path, [*self.others, self.section])


def tune(
    plan: Plan, path: Path, wanted: Wanted | None = None, *,
    progress: Progress = lambda message: None, make: MakeWatch | None = None,
) -> Tuned:  # fmt: skip
    """Time the candidates of a plan on this machine; what a file holds already is not timed again.

    Args:
        plan: whose groups.
        path: the file; it is written after each measurement, and made if it is not there.
        wanted: which measurements; all if None.
        progress: called with a line before each.
        make: makes what measures, in the child process; for tests.

    Raises: PlanError if this is not the machine that the plan is for; TuningError for a damaged
        file, a device of other limits, or a pattern that nothing matches.
    """
    wanted = wanted or Wanted()
    machine = Machine.from_dict(dict(plan.meta["machine"]))
    sections = read_sections(path) if path.exists() else []
    # Each rank does the same on a device of its own: one is enough to time that.
    check_machine(replace(machine, devices=machine.devices[:1], links=()))
    device = machine.device(0)
    here = _device_here(device)
    everything = tasks_of(plan, installed())
    tasks = tasks_of(plan, installed(), wanted.phase) if wanted.phase else everything
    chosen = [task for task in tasks if wanted.takes(task)]
    if not chosen:
        kinds = ", ".join(sorted({t.kind for t in everything}))
        raise TuningError(
            "no group of the plan is to be measured: none is of that phase and name",
            advice=f"phases: {', '.join(plan.phases)}; groups: {kinds}",
        )
    book = _opened(path, sections, device, here)
    pending = [task for task in chosen if not book.knows(task)]
    threads = wanted.threads or (device.num_sms if device.kind == "cpu" else 0)
    worker = Worker(make or partial(Stopwatch, threads), wanted.task_limit_s)
    try:
        done = _measure(pending, book, worker, wanted.limit_s, progress)
    finally:
        worker.close()
    groups = {task.group for task in everything}
    return Tuned(
        book.section, tasks, done, len(chosen) - len(pending), tuple(book.failed),
        sum(not book.knows(task) for task in pending), book.dropped,
        tuple(g for g in book.section.groups if g not in groups),
    )  # fmt: skip


def _measure(
    pending: Sequence[Task], book: _Book, worker: Worker, limit_s: float, progress: Progress
) -> int:
    begun, done, group = time.monotonic(), 0, ""
    for number, task in enumerate(pending, start=1):
        if book.knows(task):
            continue  # it failed at another size meanwhile
        # A group that is measured by half would be decided by guesses against measurements.
        is_late = bool(limit_s) and time.monotonic() - begun > limit_s
        if done and is_late and task.group != group:
            break
        group = task.group
        progress(f"{number} of {len(pending)}: {task.kernel} at {task.sizes}")
        try:
            # A clock that saw nothing pass saw less than its own step.
            book.add(task, float(f"{max(worker.measure(task), _STEP_US):.4g}"))
        except TaskFailed as failure:
            book.add(task, f"{FAILED}{failure}")
            book.failed.append((task, str(failure)))
        done += 1
    return done


def _device_here(planned: Device) -> Device:
    """The device at hand, if figures of it are figures of the planned one.

    Raises: TuningError if it has other limits.
    """
    here = detect_machine(planned.kind, 1 if planned.kind == "cpu" else None).device(0)
    if planned.kind == "cpu":
        return here  # a plan for two cores runs on two of many
    ours, theirs = device_key(planned), device_key(here)
    names = ("processors", "shared_memory_bytes")
    apart = [f"{n}: {theirs[n]}, the plan's device has {ours[n]}" for n in names]
    if any(theirs[n] != ours[n] for n in names):
        raise TuningError(
            f"here is a {here.title}, the plan is for another GPU: its times would mislead",
            text="\n".join(apart),
            advice="describe this machine (metainfer hw new) and compile for it, then tune",
        )
    return here


def _opened(path: Path, sections: Sequence[Section], device: Device, here: Device) -> _Book:
    """The section of this device and these libraries, without figures of older kernels."""
    key, libraries = device_key(device), library_versions()
    own = next((s for s in sections if s.device == key and s.libraries == libraries), None)
    others = [s for s in sections if s is not own]
    if own is None:
        return _Book(path, others, Section(key, libraries, measured_on=here.title))
    stale = {b for b, source in own.sources.items() if source != fingerprint(b)}
    kept = {
        group: {k: sizes for k, sizes in kernels.items() if not _is_stale(k, stale)}
        for group, kernels in own.groups.items()
    }
    section = replace(own, groups={g: kernels for g, kernels in kept.items() if kernels})
    return _Book(path, others, section, own.num_figures - section.num_figures)


def _is_stale(kernel: str, backends: set[str]) -> bool:
    """Whether a kernel is of one of some backends, or there is none of its name any more."""
    known = {k.name: k.backend for k in installed().kernels.all()}
    return kernel not in known or known[kernel] in backends
