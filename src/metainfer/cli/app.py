"""The application: every verb, and the options that stand before one."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from metainfer.cli.bench import bench
from metainfer.cli.compile import compile_model
from metainfer.cli.diff import diff
from metainfer.cli.errors import GuardedGroup
from metainfer.cli.explain import explain
from metainfer.cli.opt import opt
from metainfer.cli.record import record
from metainfer.cli.run import run
from metainfer.cli.tune import tune
from metainfer.cli.verify import verify

_HW_HELP = "Descriptions of machines: list, show, check, write."
_KERNELS_HELP = "Kernels: list, show; check those of plans against their cards, write sources."


class _LazyHardware(TyperGroup):
    """`metainfer hw`, imported when it is used: its graphs and schemas take a while to import."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Hand over to the real group."""
        from metainfer.cli.hw import app as hw

        real: Any = typer.main.get_command(hw)
        return real.make_context(info_name, args, parent=parent, **extra)


class _LazyKernels(TyperGroup):
    """`metainfer kernels`, imported when it is used."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Hand over to the real group."""
        from metainfer.cli.kernels import app as kernels

        real: Any = typer.main.get_command(kernels)
        return real.make_context(info_name, args, parent=parent, **extra)


class _Verbs(GuardedGroup):
    """The verbs, with those whose import is put off."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.add_command(_LazyHardware(name="hw", help=_HW_HELP))  # type: ignore[arg-type, unused-ignore]
        self.add_command(_LazyKernels(name="kernels", help=_KERNELS_HELP))  # type: ignore[arg-type, unused-ignore]


app = typer.Typer(
    cls=_Verbs,
    help="Compile a PyTorch model for the machine you describe, and run the plan.\n\n"
    "Example: metainfer compile models/smollm2.py --hw hardware/8xpcie.toml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 100},
)


@app.callback()
def options(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="show where an error came from in the code")
    ] = False,
) -> None:
    """Options of all verbs; GuardedGroup reads them."""


def version() -> None:
    """Print the version, and those of what a plan depends on.

    Example: metainfer version
    """
    import platform
    from importlib.metadata import version as installed

    from metainfer import __version__

    typer.echo(
        f"metainfer {__version__} (torch {installed('torch')}, python {platform.python_version()})"
    )


app.command("compile")(compile_model)
app.command("run")(run)
app.command("record")(record)
app.command("bench")(bench)
app.command("tune")(tune)
app.command("explain")(explain)
app.command("diff")(diff)
app.command("verify")(verify)
app.command("opt")(opt)
app.command("version")(version)
