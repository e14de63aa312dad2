"""`metainfer tune`: the candidates of a plan's groups, timed on the machine at hand."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metainfer.cli.options import Json, PlanPath, Threads, check_plan_path
from metainfer.cli.output import print_json, print_table, print_wrapped, progress

if TYPE_CHECKING:
    from metainfer.compiler.tuning.tune import Tuned

_GROUP_WIDTH = 34
_NAMED = 5  # before the rest is counted


def tune(
    plan: PlanPath,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="tuned file to extend; MACHINE.tuned.json if not given"),
    ] = None,
    phase: Annotated[str, typer.Option(help="only this phase: prefill, decode, call")] = "",
    group: Annotated[
        str, typer.Option(metavar="PATTERN", help="only groups of this kind, or this kernel")
    ] = "",
    time_limit: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="begin no group after that, 0: all")
    ] = 0.0,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Time the kernels that a plan's groups may take, here, and keep the times in a file.

    The file is written after every measurement: a tuner that is stopped goes on from there. A
    kernel that fails, or takes the process down, is a line in the file and not tried again.
    Compile with --tuned FILE to choose by what was measured.

    Example: metainfer tune plans/smollm2-cpu --out cpu.tuned.json
    """
    check_plan_path(plan)
    with progress(f"tuning for {plan}") as show:
        show("importing torch")
        from metainfer.compiler.tuning.tune import Wanted
        from metainfer.compiler.tuning.tune import tune as tuned_by
        from metainfer.ir.plan import Plan

        given = Plan.read(plan)
        path = out or Path(f"{given.meta['machine']['name']}.tuned.json")
        wanted = Wanted(phase, group, time_limit, threads)
        found = tuned_by(given, path, wanted, progress=show)
    if as_json:
        print_json(_plain(found, path))
    else:
        _print(found, path)


def _plain(found: "Tuned", path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "measured": found.measured,
        "known": found.known,
        "left": found.left,
        "dropped": found.dropped,
        "failed": [
            {"group": t.group, "kernel": t.kernel, "sizes": t.sizes, "why": why}
            for t, why in found.failed
        ],
        "unhit": list(found.unhit),
        "section": found.section.to_dict(),
    }


def _print(found: "Tuned", path: Path) -> None:
    head = ("group", "sizes", "fastest", "us", "predicted best", "its us")
    print_table(f"Measured on {found.section.measured_on}", head, _rows(found), left=3)
    for task, why in found.failed:
        print_wrapped(f"failed: {task.kernel} at {task.sizes} in {task.kind}: {why}", indent=2)
    if found.dropped:
        typer.echo(f"dropped {found.dropped} figures of kernels that changed since")
    if found.unhit:
        more = len(found.unhit) - _NAMED
        typer.echo(f"{len(found.unhit)} groups of the file are no groups of this plan:")
        for text in found.unhit[:_NAMED]:
            print_wrapped(text, indent=2)
        if more > 0:
            typer.echo(f"  and {more} more")
    left = f", {found.left} left: run it again to go on" if found.left else ""
    typer.echo(f"measured {found.measured}, {found.known} were known{left}")
    print_wrapped(f"wrote {path}: metainfer compile MODEL --hw HW --tuned {path}")


def _rows(found: "Tuned") -> list[tuple[str, ...]]:
    """Of each group of the plan and size: the fastest kernel, and the one that was predicted so."""
    rows: list[tuple[str, ...]] = []
    by_place: dict[tuple[str, str], list[Any]] = {}
    for task in found.tasks:
        if task.share_us:
            by_place.setdefault((task.group, task.sizes), []).append(task)
    last = ""
    for (group, sizes), tasks in by_place.items():
        timed = {t.kernel: _us(found, t) for t in tasks}
        known = {kernel: us for kernel, us in timed.items() if us is not None}
        if not known:
            continue
        best = min(known, key=lambda kernel: known[kernel])
        guess = min(tasks, key=lambda t: t.predicted_us).kernel
        own = known.get(guess)
        name = "" if group == last else _short(tasks[0])
        is_same = guess == best
        rows.append(
            (
                name, sizes, best, f"{known[best]:.1f}", "the same" if is_same else guess,
                "" if is_same else ("failed" if own is None else f"{own:.1f}"),
            )
        )  # fmt: skip
        last = group
    return rows


def _us(found: "Tuned", task: Any) -> float | None:
    figure = found.section.groups.get(task.group, {}).get(task.kernel, {}).get(task.sizes)
    return float(figure) if isinstance(figure, int | float) else None


def _short(task: Any) -> str:
    """The group's kind, and the type of what it makes."""
    return f"{task.kind} {task.group.rpartition(' : ')[2]}"[:_GROUP_WIDTH]
