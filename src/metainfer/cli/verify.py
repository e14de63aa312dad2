"""`metainfer verify`: what a plan's numbers are worth."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metainfer.cli.options import (
    Json,
    Mismatch,
    OtherCheckpoint,
    PlanPath,
    Threads,
    WeightsPath,
    check_plan_path,
)
from metainfer.cli.output import print_json, print_table, progress
from metainfer.ir.errors import MetainferError

if TYPE_CHECKING:
    from metainfer.compiler.verify import Verification

_REFERENCES = ("f32",)


def verify(
    plan: PlanPath,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="text to read; a short one of ours if none")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="at most so many of it, 0 for all")] = 256,
    reference: Annotated[str, typer.Option(help="element type of the reference")] = "f32",
    model: Annotated[
        str | None,
        typer.Option(help="the model again, if it is a Python file: a plan never makes one run"),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            "--max-kl", "--max-error", help="greatest mean divergence (module: relative error)"
        ),
    ] = None,
    weights: WeightsPath = None,
    threads: Threads = 0,
    allow_machine_mismatch: Mismatch = False,
    allow_checkpoint_mismatch: OtherCheckpoint = False,
    as_json: Json = False,
) -> None:
    """Hold a plan's numbers against float32: divergence, agreement, perplexity. Exit code 1 if far.

    Example: metainfer verify plans/smollm2-cpu --text book.txt --tokens 2000
    """
    check_plan_path(plan)
    if reference not in _REFERENCES:
        raise MetainferError(
            f"--reference {reference} is not known", advice=f"known: {', '.join(_REFERENCES)}"
        )
    read = None if text is None else _read(text)
    with progress(f"verify {plan}") as show:
        from metainfer.compiler.verify import verify as verified
        from metainfer.ir.plan import Plan

        found = verified(
            Plan.read(plan), model=model, weights=weights, text=read, tokens=tokens, limit=max_kl,
            allow_machine_mismatch=allow_machine_mismatch,
            allow_checkpoint_mismatch=allow_checkpoint_mismatch, num_threads=threads, progress=show,
        )  # fmt: skip
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    if not found.passed:
        raise typer.Exit(1)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MetainferError(
            f"cannot read {file}: {error}", advice="give a text in UTF-8"
        ) from error


def _print(found: "Verification") -> None:
    typer.echo(f"plan {found.plan_hash} against {found.reference}")
    if found.comparisons:
        _print_comparisons(found)
    for error in found.errors:
        typer.echo(
            f"{error.name}: greatest error {error.max_error:.3g}, {error.relative_error:.3g} of "
            f"the greatest result, {error.limit:g} is allowed"
        )
    allowed = f"mean KL at most {found.limit:g} is allowed" if found.comparisons else ""
    verdict = "passed" if found.passed else "FAILED"
    typer.echo(f"{verdict}: {allowed}" if allowed else verdict)


def _print_comparisons(found: "Verification") -> None:
    head = (
        "walk",
        "rows",
        "mean KL",
        "max KL",
        "same top 1",
        "max |dlogit|",
        "perplexity",
        "f32's",
    )
    rows = [
        (
            c.name, str(c.rows), f"{c.mean_kl:.3g}", f"{c.max_kl:.3g}", f"{c.agreement:.1%}",
            f"{c.max_difference:.3g}", _figure(c.perplexity), _figure(c.reference_perplexity),
        )
        for c in found.comparisons
    ]  # fmt: skip
    print_table(f"{found.tokens} tokens; divergence in nats", head, rows)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
