"""`metainfer opt`: passes by hand."""

from pathlib import Path
from typing import Annotated

import typer

from metainfer.cli.options import (
    ActivationFormat,
    Forbids,
    Pins,
    WeightFormat,
    read_pins,
)
from metainfer.ir.errors import MetainferError


def opt(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.mir", help="text of a module or graph, or a test case"),
    ],
    passes: Annotated[
        str, typer.Option("--passes", "-p", help="names, comma-separated, in order; all if empty")
    ] = "",
    hw: Annotated[
        str, typer.Option("--hw", metavar="HW", help="a machine; cpu, or the case's, if empty")
    ] = "",
    phase: Annotated[
        str, typer.Option(help="prefill, decode or call; decode, or the case's, if empty")
    ] = "",
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

    Of a test case the first half is read; its header says passes, machine and phase.

    Example: metainfer opt plans/smollm2-cpu/stage0.decode.mir -p canonicalize
    """
    text = _read(file)
    from metainfer.ir.options import Options
    from metainfer.ir.printer import print_module

    options = Options(
        activations=activations, weights=weights, exact=exact, pins=read_pins(pin),
        forbids=tuple(forbid or ()),
    )  # fmt: skip
    from metainfer.compiler.by_hand import parse_text, read_case, run_by_hand

    case = read_case(text)
    module = parse_text(case.before, str(file))
    wanted = passes or case.header.get("pass", "")
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    machine, chosen = hw or case.header.get("hw", "cpu"), phase or case.header.get("phase", "")
    result, decisions = run_by_hand(module, names, machine, chosen or "decode", options)
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
