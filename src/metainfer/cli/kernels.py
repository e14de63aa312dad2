"""`metainfer kernels`: all kernels; the Triton ones of plans, held against their cards."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metainfer.cli.errors import GuardedGroup
from metainfer.cli.kernel_cards import list_kernels, show_kernel
from metainfer.cli.options import PlanPath, check_plan_path
from metainfer.cli.output import WIDTH, print_table, print_wrapped
from metainfer.ir.options import Options

if TYPE_CHECKING:
    from metainfer.compiler.kernels import Checked

MACHINES = ("1xh200", "8xpcie", "8xpro6000", "8xl20")
_FP8, _PLAIN = Options(weights="fp8", activations="fp8"), Options()
# What is checked without arguments: a dense and a sparse model on every card, codes by codes on one
# of each kind, the sparse ones of other shapes, and one of latents. Model, machine, options.
PLANS = (
    *(("smollm2", machine, _PLAIN) for machine in MACHINES),
    *(("smollm2", machine, _FP8) for machine in ("1xh200", "8xpro6000")),
    *(("qwen3_moe", machine, _PLAIN) for machine in ("1xh200", "8xpro6000", "8xl20")),
    ("qwen3_moe:235b", "8xpcie", _PLAIN),
    ("qwen2_moe", "8xpcie", _PLAIN),
    ("deepseek", "8xpcie", _PLAIN),
)
_KERNEL_WIDTH = 44

app = typer.Typer(
    cls=GuardedGroup,
    help="Kernels: list and show them; check the Triton ones of plans, write their sources.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command("check")
def check(
    plans: Annotated[
        list[Path] | None, typer.Argument(metavar="[PLAN]...", help="folders of plans")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="without PLAN: models to compile; may be repeated")
    ] = None,
    hw: Annotated[
        list[str] | None, typer.Option(help="without PLAN: machines; may be repeated")
    ] = None,
    tuned: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="check what was measured for the plans' groups, too"),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="write all compiled figures to a file, or by version to a folder"
        ),
    ] = None,
) -> None:
    """Compile every Triton kernel of plans for its card, and hold it against the card's limits.

    No GPU is needed. Figures are kept on disk by content. Exit code 1 if anything is wrong: too
    much shared memory, spilled registers, or another matrix instruction than was wanted.

    Example: metainfer kernels check --model smollm2 --hw 8xpcie
    """
    import metainfer
    from metainfer.backends.triton.cross import origins, write_figures
    from metainfer.compiler.kernels import Checked, check_plan, check_products
    from metainfer.compiler.tuning.choose import sections_for
    from metainfer.hardware.load import load_machine
    from metainfer.ir.plan import Plan

    found: dict[str, tuple[Checked, ...]] = {}
    asked = str(tuned or "")
    for path in plans or ():
        plan = Plan.read(path)
        found[path.name or str(path)] = check_plan(plan, sections_for(asked, plan))
    pairs = [(n, machine, _PLAIN) for machine in hw or MACHINES for n in model or ("smollm2",)]
    for name, machine, options in () if plans else (pairs if model or hw else PLANS):
        if f"products for {machine}" not in found:
            found[f"products for {machine}"] = check_products(load_machine(machine).device(0))
        plan = metainfer.compile(name, machine, options=options)
        title = f"{name}{' in fp8' if options == _FP8 else ''} for {machine}"
        found[title] = check_plan(plan, sections_for(asked, plan))
    for title, checked in found.items():
        _print(title, checked)
    if keep is not None:
        write_figures(keep)
    faulty = sum(bool(c.faults) for checked in found.values() for c in checked)
    if faulty:
        typer.echo(f"{faulty} kernels are not right for their cards")
        raise typer.Exit(1)
    typer.echo(f"figures: {', '.join(f'{count} {what}' for what, count in origins().items())}")
    typer.echo("every kernel fits its card")


def _print(title: str, checked: "tuple[Checked, ...]") -> None:
    card = checked[0] if checked else None
    limit = f", {card.limit_bytes:,} bytes of shared memory a program" if card else ""
    rows = [
        (
            _named(c),
            f"{c.resources.shared_bytes:,}" if c.resources else "",
            str(c.resources.registers) if c.resources else "",
            str(c.resources.spilled_bytes) if c.resources else "",
            _matrix(c),
            "WRONG" if c.faults else "",
        )
        for c in checked
    ]
    heads = ("kernel", "shared", "regs", "spills", "matrix", "")
    print_table(f"{title} ({card.device if card else 'no card'}{limit})", heads, rows)
    for c in checked:
        if c.faults:
            print_wrapped(f"{c.planned.kernel} in {c.planned.phase}: {c.faults}", indent=2)


def _named(checked: "Checked") -> str:
    planned = checked.planned
    function = planned.launch.function.__name__
    name = planned.kernel.removeprefix("triton.")
    if not planned.phase:
        return f"{name} {planned.group.removeprefix('linear of ')}"[:_KERNEL_WIDTH]
    return (name if name == function else f"{name} {function}")[:_KERNEL_WIDTH]


def _matrix(checked: "Checked") -> str:
    """Shape and operand type of the matrix instruction: "wgmma m64n128k16 bf16"."""
    if checked.resources is None or not checked.resources.matrix:
        return ""
    parts = checked.resources.matrix[0].split(".")
    shape = next((p for p in parts if p.startswith("m") and p[1:2].isdigit()), "")
    from metainfer.backends.triton.cross import matrix_type

    return " ".join(x for x in (parts[0], shape, matrix_type(checked.resources.matrix[0])) if x)


app.command("list")(list_kernels)
app.command("show")(show_kernel)


@app.command("sources")
def sources(
    plan: PlanPath,
    out: Annotated[Path, typer.Option(help="folder to write them to")] = Path("kernels"),
) -> None:
    """Write the Triton sources of a plan's kernels, for reading only.

    Example: metainfer kernels sources plans/smollm2-8xpcie --out kernels
    """
    check_plan_path(plan)
    from metainfer.compiler.kernels import sources_of
    from metainfer.ir.plan import Plan

    found = sources_of(Plan.read(plan))
    out.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        (out / name).write_text(text)
    typer.echo(f"wrote {len(found)} files to {out}"[:WIDTH])
