"""What happens to errors: the message on stderr, an exit code, never a traceback unasked.

Exit codes: 0 done, 1 fault of ours (or a check that failed), 2 bad input, 3 does not fit or is
refused under --strict, 130 interrupted.
"""

import errno
import sys
import traceback
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from metainfer.ir.errors import MetainferError

_TRACEBACK = "--traceback"
COMMAND = "command"  # where the context keeps the arguments as they were given
FAULT, INTERRUPTED = 1, 130


def report(error: MetainferError) -> NoReturn:
    """Print an error to stderr without a traceback and leave with its exit code.

    Raises: typer.Exit always.
    """
    sys.stderr.write(f"error: {error.render()}\n")
    raise typer.Exit(error.exit_code)


class GuardedGroup(TyperGroup):
    """A group of verbs whose errors end as messages and exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take --traceback wherever it stands before a ``--``."""
        end = args.index("--") if "--" in args else len(args)
        # Ranks are started by the same command.
        ctx.meta[COMMAND] = tuple(args)
        if _TRACEBACK in args[:end]:
            args = [*(a for a in args[:end] if a != _TRACEBACK), *args[end:]]
            ctx.meta[_TRACEBACK] = True
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb.

        Raises: typer.Exit with the exit code of the error; errors of usage as they come.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            raise typer.Exit(INTERRUPTED) from None
        except MetainferError as error:
            self._print_traceback(ctx)
            report(error)
        except Exception as error:
            if _belongs_to_typer(error):
                raise
            self._print_traceback(ctx)
            sys.stderr.write(_fault_text(error, shown=_TRACEBACK in ctx.meta))
            raise typer.Exit(FAULT) from error

    def _print_traceback(self, ctx: Any) -> None:
        if _TRACEBACK in ctx.meta:
            traceback.print_exc(file=sys.stderr)


def _belongs_to_typer(error: Exception) -> bool:
    """Whether typer itself knows what to do: errors of usage, exits, a reader that went away."""
    if isinstance(error, OSError):
        return error.errno == errno.EPIPE
    is_usage = hasattr(error, "format_message")
    return is_usage or isinstance(error, typer.Exit | typer.Abort | EOFError)


def _fault_text(error: Exception, *, shown: bool) -> str:
    kind = type(error).__name__
    lines = str(error).splitlines() or ["no message"]
    advice = "" if shown else "  run it again with --traceback and report what it prints\n"
    return f"internal error: {kind}: {lines[0]}\n{advice}"
