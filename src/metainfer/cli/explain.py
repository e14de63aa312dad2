"""`metainfer explain`: which kernel each group got, what else there was, and what it costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metainfer.cli.compile import print_memory
from metainfer.cli.options import Json, PlanPath, check_plan_path
from metainfer.cli.output import (
    WIDTH,
    print_json,
    print_table,
    print_wrapped,
    show_bytes,
    show_seconds,
)

if TYPE_CHECKING:
    from metainfer.compiler.explain import Explanation, GroupReport, Note, SizeRow
    from metainfer.compiler.schedules import ScheduleReport
    from metainfer.ir.plan import Plan

_SUBJECTS = 6  # named before the rest is counted


def explain(
    plan: PlanPath,
    phase: Annotated[str, typer.Option(help="only this phase: prefill, decode, call")] = "",
    group: Annotated[
        str, typer.Option(metavar="PATTERN", help="only groups of this kind, result or kernel")
    ] = "",
    stage: Annotated[int, typer.Option(help="pipeline stage, from 0")] = 0,
    timeline: Annotated[
        Path | None, typer.Option(help="write the predicted steps as a trace for Perfetto")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a plan: kernels with the next best and the refused ones, formats, memory.

    Example: metainfer explain plans/smollm2-cpu --phase decode --group 'linear*'
    """
    check_plan_path(plan)
    from metainfer.compiler.explain import explain as explained
    from metainfer.ir.plan import Plan

    found = Plan.read(plan)
    explanation = explained(found, phase, group, stage)
    if timeline is not None:
        _write_timeline(found, phase, stage, timeline)
    if as_json:
        print_json(explanation.to_dict())
        return
    typer.echo(f"plan {explanation.plan_hash}: {found.meta['model']['name']}{_stage(found, stage)}")
    if not group:
        _print_notes(explanation.notes)
        _print_tuned(found)
        for schedule in explanation.schedules:
            _print_schedule(schedule)
    for name in dict.fromkeys(g.phase for g in explanation.groups):
        _print_phase(found, name, explanation)
    if not group:
        typer.echo()
        print_memory(explanation.memory)
        _print_fallbacks(explanation)


def _write_timeline(plan: "Plan", phase: str, stage: int, file: Path) -> None:
    from metainfer.compiler.explain import ordered_phases
    from metainfer.compiler.schedules import predicted_trace
    from metainfer.runtime.trace import write_trace

    phases = (phase,) if phase else ordered_phases(plan)
    write_trace(file, predicted_trace(plan, phases, stage))
    typer.echo(f"wrote {file}", err=True)


def _stage(plan: "Plan", stage: int) -> str:
    stages = plan.layout.pp
    return f", stage {stage} of {stages} (--stage for the others)" if stages > 1 else ""


def _print_notes(notes: "tuple[Note, ...]") -> None:
    """Formats and rewrites, with reasons."""
    typer.echo("\nformats and rewrites")
    for note in notes:
        named = ", ".join(note.subjects[:_SUBJECTS])
        more = len(note.subjects) - _SUBJECTS
        rest = f" and {more} more" if more > 0 else ""
        mark = "" if note.severity == "info" else f" [{note.severity}]"
        where = f" ({', '.join(note.phases)})"
        print_wrapped(f"{note.place}: {named}{rest} -> {note.chosen}{mark}{where}", indent=2)
        print_wrapped(f"because {note.reason}", indent=6)


def _print_tuned(plan: "Plan") -> None:
    """What of the tuned file this plan does not use, and what of this plan nobody measured."""
    tuned = plan.meta.get("tuned")
    if not tuned:
        return
    typer.echo(f"\ntuned: {len(tuned['groups'])} groups by the times of {tuned['source']}")
    parts = (
        ("no call of this plan is", tuned["unhit"]),
        ("not measured:", [f"{kernel} in {phase}: {text}" for phase, kernel, text in
                           tuned["uncovered"]]),
    )  # fmt: skip
    for what, texts in parts:
        for text in texts[:_SUBJECTS]:
            print_wrapped(f"{what} {text}", indent=2)
        if len(texts) > _SUBJECTS:
            typer.echo(f"  {what} {len(texts) - _SUBJECTS} more")


def _print_schedule(schedule: "ScheduleReport") -> None:
    """A block on several streams: what that saves, what is hidden, what decides the time."""
    sizes = ", ".join(f"{name}={size}" for name, size in schedule.sizes.items())
    typer.echo(f"\nschedule of {schedule.graph} in {schedule.phase}, at {sizes}")
    print_wrapped(schedule.chosen, indent=2)
    hidden = schedule.hidden_seconds / schedule.meeting_seconds if schedule.meeting_seconds else 0.0
    _line(
        "takes",
        f"{show_seconds(schedule.seconds)}, one stream {show_seconds(schedule.serial_seconds)}; "
        f"run {_times(schedule.calls)} a step",
    )
    _line(
        "hides",
        f"{show_seconds(schedule.hidden_seconds)} of {show_seconds(schedule.meeting_seconds)} of "
        f"communication, {hidden:.0%}",
    )
    for stream in schedule.streams:
        share, busy = stream.busy_seconds / schedule.seconds, show_seconds(stream.busy_seconds)
        _line("stream", f"{stream.name}: {stream.tasks} ops, busy {busy}, {share:.0%}")
    _line("path", " -> ".join(schedule.critical_path))
    _line("shared", schedule.source)


def _print_phase(plan: "Plan", phase: str, explanation: "Explanation") -> None:
    groups = [g for g in explanation.groups if g.phase == phase]
    strategy = plan.meta["phases"][phase]["strategy"]
    typer.echo(f"\n{phase}: activations {strategy['activations']}, {_judged(phase)}")
    for graph in dict.fromkeys(g.graph for g in groups):
        members = [g for g in groups if g.graph == graph]
        calls = members[0].calls
        seconds = sum(g.seconds for g in members)
        typer.echo(f"\n{graph}, run {_times(calls)} a step, {show_seconds(seconds)} each time")
        _print_savings(members)
        for member in members:
            _print_group(member)


def _print_savings(groups: "Sequence[GroupReport]") -> None:
    """Groups of several operators, and what each saves beside them, in a table."""
    fused = [g for g in groups if g.num_operators > 1]
    if not fused:
        return
    figures = [(g.num_operators, g.saved_bytes, g.saved_launches) for g in fused]
    together = [sum(column) for column in zip(*figures, strict=True)]
    names = [*(f"{g.kind} {g.result}" for g in fused), "all"]
    print_table(
        f"{together[0]} operators in {len(fused)} group{'s' * (len(fused) != 1)}",
        ("group", "operators", "bytes saved", "launches saved"),
        [(n, *(f"{f:,}" for f in row)) for n, row in zip(names, [*figures, together], strict=True)],
    )


def _judged(phase: str) -> str:
    return "judged at one token of one sequence" if phase == "decode" else "judged at full size"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _print_group(group: "GroupReport") -> None:
    where = f"  {group.source}" if group.source else ""
    typer.echo(f"  {group.kind} {group.result}{where}")
    if group.op != group.kind:
        typer.echo(_cut(f"      {group.op}"))
    if group.body:
        _line("fuses", ", ".join(group.body))
    if group.num_operators > 1:
        _line("saves", f"{group.saved_bytes:,} bytes and {_launches(group)}")
    share = group.roofline_seconds / group.seconds if group.seconds else 1.0
    _line(
        "takes",
        f"{group.kernel}: {show_seconds(group.seconds)}, {group.bound}-bound, {share:.0%} of the "
        f"roofline, {group.basis}",
    )
    if group.crossovers:
        _print_crossovers(group)
    elif len(group.table) > 1:
        _line("by size", "; ".join(map(_size_text, group.table)))
    if group.generic:
        lost = show_seconds(group.loss_seconds)
        _line("fallback", f"a generic kernel: about {lost} a step over the roofline")
    for repair in group.repairs:
        _line("repair", repair)
    if group.unforced:
        lost = show_seconds(group.forced_seconds)
        _line("forced", f"{group.unforced} would take {lost} less without --pin and --forbid")
    _line("next", _next_text(group))
    for refused in group.refused:
        _line("refused", f"{', '.join(refused.kernels)}: {refused.reason}")


def _print_crossovers(group: "GroupReport") -> None:
    """From which size on which algorithm is taken, what is next there, whence the figures come."""
    stem = f"ranks.{group.kind}_"
    rows = [("payload of a rank", "algorithm", "predicted", "next best, at the end of the row")]
    for row in group.crossovers:
        last = show_seconds(row.last_seconds)
        is_one = row.from_bytes == row.to_bytes
        rows.append(
            (
                _span(show_bytes(row.from_bytes), show_bytes(row.to_bytes), is_one=is_one),
                row.kernel.removeprefix(stem),
                _span(show_seconds(row.first_seconds), last, is_one=is_one),
                f"{row.next_best.removeprefix(stem)} +{show_seconds(row.gap_seconds)}"
                if row.next_best
                else "none",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        typer.echo(f"      {line}".rstrip())
    bases: dict[str, list[str]] = {}
    for row in group.crossovers:
        names = bases.setdefault(row.basis, [])
        names += [n for n in [row.kernel.removeprefix(stem)] if n not in names]
    for basis, names in bases.items():
        _line("basis", f"{', '.join(names)}: {basis}")


def _span(first: str, last: str, *, is_one: bool) -> str:
    return last if is_one else f"{first} to {last}"


def _launches(group: "GroupReport") -> str:
    return f"{group.saved_launches} launch{'es' * (group.saved_launches != 1)}"


def _next_text(group: "GroupReport") -> str:
    if not group.next_best:
        return "no other kernel applies"
    gap = f"{'+' if group.gap_seconds >= 0 else '-'}{show_seconds(abs(group.gap_seconds))}"
    return f"{group.next_best}, {gap}"


def _size_text(row: "SizeRow") -> str:
    first, last = show_seconds(row.first_seconds), show_seconds(row.last_seconds)
    span = first if first == last else f"{first} to {last}"
    basis = f", {row.basis}" if "measured" in row.basis else ""
    return f"{row.sizes} {row.kernel} ({span}{basis})"


def _line(label: str, text: str) -> None:
    print_wrapped(f"{label:<9}{text}".rstrip(), indent=6, hanging=9)


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _print_fallbacks(explanation: "Explanation") -> None:
    for note in explanation.notes:
        if note.severity == "fallback":
            what = f"{', '.join(note.subjects[:_SUBJECTS])} -> {note.chosen}"
            print_wrapped(f"fallback of {note.place} ({', '.join(note.phases)}): {what}")
    fallbacks = [g for g in explanation.groups if g.generic]
    if not fallbacks:
        typer.echo("no group fell back to a generic kernel")
        return
    typer.echo(f"{len(fallbacks)} groups fell back to a generic kernel:")
    for group in sorted(fallbacks, key=lambda g: -g.loss_seconds):
        lost = show_seconds(group.loss_seconds)
        print_wrapped(
            f"{group.phase} {group.graph}: {group.kind} {group.result} -> {group.kernel}, "
            f"{_times(group.calls)} a step, about {lost} lost",
            indent=2,
        )
