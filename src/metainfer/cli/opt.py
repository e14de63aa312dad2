"""`metainfer opt`: passes by hand."""

from pathlib import Path
from typing import Annotated

import typer

from metainfer.cli.options import (
    ActivationFormat,
    Forbids,
    Hardware,
    Pins,
    WeightFormat,
    read_pins,
)
from metainfer.ir.errors import MetainferError


def opt(
    file: Annotated[Path, typer.Argument(metavar="FILE.mir", help="text of a module or graph")],
    passes: Annotated[
        str, typer.Option("--passes", "-p", help="names, comma-separated, in order; all if empty")
    ] = "",
    hw: Hardware = "cpu",
    phase: Annotated[str, typer.Option(help="prefill, decode or call")] = "decode",
    weights: WeightFormat = "auto",
    activations: ActivationFormat = "f32",
    exact: Annotated[bool, typer.Option("--exact", help="only kernels without rounding")] = False,
    pin: Pins = None,
    forbid: Forbids = None,
    reasons: Annotated[
        bool, typer.Option("--reasons", help="print the decisions to stderr")
    ] = False,
) -> None:
    """Run passes on the text of a module and print the result; it is verified after each pass.

    Example: metainfer opt plans/smollm2-cpu/stage0.decode.mir -p canonicalize
    """
    text = _read(file)
    from metainfer.ir.options import Options
    from metainfer.ir.printer import print_module

    options = Options(
        activations=activations, weights=weights, exact=exact, pins=read_pins(pin),
        forbids=tuple(forbid or ()),
    )  # fmt: skip
    from metainfer.compiler.by_hand import parse_text, run_by_hand

    module = parse_text(text, str(file))
    names = [name.strip() for name in passes.split(",") if name.strip()]
    result, decisions = run_by_hand(module, names, hw, phase, options)
    typer.echo(print_module(result), nl=False)
    if reasons:
        for decision in decisions:
            typer.echo(
                f"{decision.place}: {decision.subject} -> {decision.chosen}: {decision.reason}",
                err=True,
            )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MetainferError(
            f"cannot read {file}: {error}", advice="give a file of the language's text, .mir"
        ) from error
