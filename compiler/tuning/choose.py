"""Which measured times a compilation uses, and what it says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from metainfer.backends.registry import Backends
from metainfer.backends.sources import fingerprint
from metainfer.compiler.job import Job
from metainfer.compiler.tuning.keys import device_key, key_of, library_versions
from metainfer.compiler.tuning.measured import ELSEWHERE, HERE, NOTHING, Measured
from metainfer.compiler.tuning.tasks import met_in, targets_of
from metainfer.compiler.tuning.tuned_file import Figures, Section, read_sections
from metainfer.hardware.detect import detect_machine
from metainfer.hardware.load import FOLDER
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import HardwareError, TuningError
from metainfer.ir.plan import Plan
from metainfer.passes.target import Decision, Report

NONE = "none"  # what --tuned says to leave a file beside the machine's alone
SUFFIX = ".tuned.json"


def file_for(asked: str, machine: Machine) -> Path | None:
    """The tuned file: the one asked for, else the one beside the machine's file.

    Raises: TuningError if the one asked for is not there.
    """
    if asked == NONE:
        return None
    if asked:
        if not Path(asked).is_file():
            raise TuningError(
                f"no tuned file at {asked}", advice="make one: metainfer tune PLAN --out FILE"
            )
        return Path(asked)
    beside = Path(machine.path).with_suffix("") if machine.path else None
    found = beside.with_name(f"{beside.name}{SUFFIX}") if beside is not None else None
    return found if found is not None and found.is_file() else None


def measured_for(
    path: Path, machine: Machine, backends: Backends, report: Report
) -> tuple[Measured, tuple[str, ...]]:
    """(times of a machine's devices, texts of the groups that they are of), with a line about them.

    Args:
        path: the tuned file.
        machine: whose devices.
        backends: today's kernels.
        report: gets the line.

    Raises: TuningError if the file is damaged.
    """
    keys = [device_key(device) for device in machine.kinds]
    found = [s for s in read_sections(path) if all(s.device == key for key in keys)]
    if not found:
        reason = "it holds nothing that was measured on a device of these features and limits"
        report.add(Decision("tuned", path.name, "not used", reason))
        return NOTHING, ()
    own = [s for s in found if s.libraries == library_versions()]
    section = max(own or found, key=lambda s: s.num_figures)
    basis = HERE if own and _is_here(section, machine) else ELSEWHERE
    stale = sorted(b for b, source in section.sources.items() if source != fingerprint(b))
    libraries = ", ".join(f"{name} {text}" for name, text in section.libraries.items())
    reason = f"{basis}: {section.measured_on}, {libraries}"
    if stale:
        reason += f"; kernels of {', '.join(stale)} changed since: tune again"
    chosen = f"{section.num_figures} figures of {len(section.groups)} groups"
    report.add(Decision("tuned", path.name, chosen, reason))
    groups = _without_old_failures(section, stale, backends)
    return Measured(groups, basis, path.name), tuple(section.groups)


def with_measured(given: Job) -> tuple[Job, tuple[str, ...]]:
    """The job with the times that were measured on such a machine, and the groups they are of.

    Raises: TuningError if the file that was asked for is not there, or is damaged.
    """
    path = file_for(given.options.tuned, given.machine)
    if path is None:
        return given, ()
    measured, groups = measured_for(path, given.machine, given.backends, given.report)
    return replace(given, measured=measured), groups


def _is_here(section: Section, machine: Machine) -> bool:
    try:
        here = detect_machine(machine.device(0).kind, None).device(0)
    except HardwareError:
        return False
    return here.title == section.measured_on


def _without_old_failures(
    section: Section, stale: Sequence[str], backends: Backends
) -> Mapping[str, Figures]:
    """Figures, without failures of kernels that changed since: these may be mended."""
    changed = {k.name for k in backends.kernels.all() if k.backend in stale}

    def kept(kernel: str, figure: float | str) -> bool:
        return not (isinstance(figure, str) and kernel in changed)

    return {
        group: {
            kernel: {sizes: f for sizes, f in figures.items() if kept(kernel, f)}
            for kernel, figures in kernels.items()
        }
        for group, kernels in section.groups.items()
    }


def with_tuned(plan: Plan, measured: Measured, groups: Sequence[str], backends: Backends) -> Plan:
    """The plan with the figures that it rests on, what was measured in vain, and what was not."""
    if not groups:
        return plan
    used: dict[str, Figures] = {}
    uncovered: list[list[str]] = []
    hit: set[str] = set()
    for target, module in targets_of(plan, backends):
        for met in met_in(module, target):
            text = key_of(met.op).text
            hit.add(text)
            if not met.calls:
                continue
            for kernel in dict.fromkeys(choice.kernel for choice in met.choices):
                figures = measured.groups.get(text, {}).get(kernel)
                entry = [target.strategy.phase, kernel, text]
                if figures:
                    used.setdefault(text, {})[kernel] = figures
                elif entry not in uncovered:
                    uncovered.append(entry)
    tuned: dict[str, Any] = {
        **replace(measured, groups=used).to_dict(),
        "unhit": [text for text in groups if text not in hit],
        "uncovered": uncovered,
    }
    return replace(plan, meta={**plan.meta, "tuned": tuned})


def sections_for(asked: str, plan: Plan) -> list[Section]:
    """What is in the tuned file asked for, or beside the file of a known machine."""
    machine = Machine.from_dict(dict(plan.meta["machine"]))
    path = file_for(asked, replace(machine, path=str(FOLDER / f"{machine.name}.toml")))
    return read_sections(path) if path is not None else []


def measured_of(plan: Plan) -> Measured:
    """The measured times that a plan rests on."""
    return Measured.from_dict(plan.meta.get("tuned", {}))
