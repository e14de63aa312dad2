"""`metainfer diff`: two plans beside each other."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from metainfer.cli.options import Json, check_plan_path
from metainfer.cli.output import print_json, print_wrapped


def diff(
    plan_a: Annotated[Path, typer.Argument(metavar="PLAN_A", help="folder of a plan")],
    plan_b: Annotated[Path, typer.Argument(metavar="PLAN_B", help="folder of another")],
    text: Annotated[
        bool, typer.Option("--text", help="print the difference of the modules' texts")
    ] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="leave with 1 if they differ, as git does")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two plans: options, machine, formats, kernels, predicted times, memory.

    Example: metainfer diff plans/smollm2-cpu plans/smollm2-int8
    """
    check_plan_path(plan_a)
    check_plan_path(plan_b)
    from metainfer.compiler.difference import compare_plans, text_difference
    from metainfer.ir.plan import Plan

    first, second = Plan.read(plan_a), Plan.read(plan_b)
    rows = compare_plans(first, second)
    if as_json:
        print_json({"plans": [first.hash, second.hash], "rows": [asdict(row) for row in rows]})
    elif text:
        found = text_difference(first, second)
        typer.echo(found, nl=bool(found))
    elif not rows:
        typer.echo(f"the plans are equal: {first.hash}")
    else:
        typer.echo(f"a {first.hash} {plan_a}\nb {second.hash} {plan_b}")
        for section in dict.fromkeys(row.section for row in rows):
            typer.echo(f"\n{section}")
            for row in rows:
                if row.section == section:
                    _print_row(row.name, row.first, row.second)
    if exit_code and rows:
        raise typer.Exit(1)


def _print_row(name: str, first: str, second: str) -> None:
    line = f"{name}: {first} -> {second}"
    if len(line) <= 96:
        print_wrapped(line, indent=2)
        return
    print_wrapped(f"{name}:", indent=2)
    print_wrapped(f"a {first}", indent=4)
    print_wrapped(f"b {second}", indent=4)
