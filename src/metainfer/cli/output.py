"""Printing: tables within 100 columns, JSON for machines, progress for people at a terminal."""

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from metainfer.cli.ranks import is_quiet

WIDTH = 100


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout."""
    typer.echo(json.dumps(data, indent=2, sort_keys=True))


def print_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> None:
    """Print a table to stdout: ``left`` columns of text, then figures, set to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, file=sys.stdout)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(head):
        is_text = number < left or (number == len(head) - 1 and name in ("", "detail", "reason"))
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def print_wrapped(text: str, *, indent: int = 0, hanging: int = 2) -> None:
    """Print lines to stdout, those longer than 100 columns folded under their begin."""
    for line in text.splitlines():
        folded = textwrap.wrap(
            line,
            WIDTH,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hanging),
            break_on_hyphens=False,
        )
        typer.echo("\n".join(folded))


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show what long work is at, on stderr, if that is a terminal."""
    if is_quiet() or not sys.stderr.isatty():
        yield lambda message: None
        return
    from rich.console import Console

    with Console(stderr=True).status(title) as status:
        yield lambda message: status.update(f"{title}: {message}")


def show_notes(notes: Sequence[str]) -> None:
    """Print to stderr where something runs otherwise than planned."""
    for note in () if is_quiet() else notes:
        typer.echo(f"note: {note}", err=True)


def show_seconds(seconds: float) -> str:
    """A duration in the unit that fits it."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def show_bytes(count: int) -> str:
    """A size in the unit that fits it."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:,.2f} {unit}"
    return f"{count} B"


def show_rate(per_second: float) -> str:
    """A rate of tokens, with as many digits as mean something."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
