"""`metainfer kernels list | show`: every registered kernel, and all that is known of one."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from metainfer.cli.options import Json
from metainfer.cli.output import print_json, print_table, print_wrapped
from metainfer.ir.errors import MetainferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from metainfer.compiler.kernel_cards import Card
    from metainfer.hardware.device import Device

_OP, _NEEDS, _FORMATS = 24, 18, 22  # columns; the rest is the kernel's name
HwOption = Annotated[
    str, typer.Option("--hw", metavar="HW", help="a machine: could its device run them?")
]


def list_kernels(
    op: Annotated[str, typer.Option(help="only those of this op or kind of group")] = "",
    backend: Annotated[str, typer.Option(help="only those of this backend")] = "",
    hw: HwOption = "",
    as_json: Json = False,
) -> None:
    """List every kernel: what it implements, what a device must have, which formats it reads.

    Example: metainfer kernels list --op linear --hw 8xpcie
    """
    from metainfer.compiler.kernel_cards import cards

    found = cards(op, backend)
    if not found:
        raise MetainferError(
            "no kernel is of that op and backend",
            advice=f"backends: {', '.join(_backends())}; ops: metainfer kernels list",
        )
    device = _device(hw)
    if as_json:
        print_json({"kernels": [_plain(card, device) for card in found]})
        return
    third = f"on {hw}" if device is not None else "needs"
    print_table(
        f"{len(found)} kernels", ("op", "kernel", third, "formats"), _rows(found, device), left=4
    )
    if device is not None:
        able = sum(not card.lacks(device) for card in found)
        typer.echo(f"{able} of {len(found)} could run on {device.title}")


def _backends() -> list[str]:
    from metainfer.compiler.kernel_cards import cards

    return sorted({card.kernel.backend for card in cards()})


def _device(hw: str) -> "Device | None":
    if not hw:
        return None
    from metainfer.hardware.load import load_machine

    return load_machine(hw).device(0)


def _rows(found: "Sequence[Card]", device: "Device | None") -> list[tuple[str, ...]]:
    """By op, each named once."""
    rows: list[tuple[str, ...]] = []
    last = ""
    for card in sorted(found, key=lambda c: c.kernel.op):
        kernel = card.kernel
        name = "" if kernel.op == last else kernel.op
        last = kernel.op
        lacks = card.lacks(device) if device is not None else card.needs
        told = ", ".join(t.removeprefix("feature ").removeprefix("device is a ") for t in lacks)
        if device is not None:
            told = f"no: {told}" if lacks else "yes"
        types = [t.removeprefix("operand ") for t in card.formats if not t.endswith("a weight")]
        formats = "; ".join(types)
        rows.append((_cut(name, _OP), kernel.name, _cut(told, _NEEDS), _cut(formats, _FORMATS)))
    return rows


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]}.."


def _plain(card: "Card", device: "Device | None") -> dict[str, Any]:
    kernel = card.kernel
    found: dict[str, Any] = {
        "name": kernel.name, "op": kernel.op, "backend": kernel.backend,
        "needs": list(card.needs), "formats": list(card.formats), "requires": list(card.others),
        "layouts": {str(i): name for i, name in kernel.layouts.items()},
        "error": kernel.error, "generic": kernel.generic,
    }  # fmt: skip
    if device is not None:
        found["lacks"] = list(card.lacks(device))
    return found


def show_kernel(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of a kernel")],
    hw: HwOption = "",
    source: Annotated[bool, typer.Option(help="print the source it runs")] = True,
) -> None:
    """Show a kernel: constraints, repairs, efficiency and whence that is known, source, figures.

    Example: metainfer kernels show triton.linear_plain_m64 --hw 8xpcie
    """
    from metainfer.backends.registry import installed
    from metainfer.compiler.kernel_cards import card_of, constraints_of

    kernel = installed().kernels.get(name)
    device = _device(hw)
    typer.echo(f"{kernel.name}: {kernel.op} by {kernel.backend}")
    lacks = card_of(kernel).lacks(device) if device is not None else ()
    for constraint in constraints_of(kernel):
        missing = " (this device does not)" if constraint.text in lacks else ""
        print_wrapped(f"requires {constraint.text}{missing}", indent=2)
    for repair in kernel.repairs:
        print_wrapped(f"repaired by {repair.text}, where {repair.fixes} fails", indent=2)
    for operand, layout in kernel.layouts.items():
        print_wrapped(f"reads operand {operand} packed as {layout}", indent=2)
    _print_costs(kernel)
    if device is not None:
        verdict = f"lacks {', '.join(lacks)}" if lacks else "could run it"
        print_wrapped(f"{device.title}: {verdict}", indent=2)
        _print_figures(kernel, device)
    if source:
        _print_sources(kernel)


def _print_costs(kernel: Any) -> None:
    e = kernel.efficiency
    rate = f"the rate of {e.rate}" if e.rate else "the rate of its operands' type"
    print_wrapped(
        f"reaches {e.memory:.0%} of the memory's bandwidth, {e.compute:.0%} of {rate} ({e.source})",
        indent=2,
    )
    facts = [f"{kernel.launches} launch{'es' * (kernel.launches != 1)}"]
    if kernel.in_place:
        places = ", ".join(map(str, kernel.in_place.values()))
        facts.append(f"its result may take the place of operand {places}")
    if kernel.extra_bytes:
        facts.append(f"{kernel.extra_bytes:g} times its compulsory bytes beside them")
    if kernel.error:
        facts.append(f"adds a relative error of up to {kernel.error:.1e}")
    if kernel.generic:
        facts.append("generic: taken where no made kernel fits")
    if kernel.option:
        facts.append(f"only with --{kernel.option.replace('_', '-').replace('=', ' ')}")
    print_wrapped("; ".join(facts), indent=2)


def _print_figures(kernel: Any, device: "Device") -> None:
    """Registers and shared memory of a product's tiles; other kernels need a plan's groups."""
    from metainfer.compiler.kernel_cards import figures_of

    for checked in figures_of(kernel, device):
        taken = checked.resources
        text = checked.faults
        if taken is not None:
            instructions = ", ".join(taken.matrix) or "no matrix instruction"
            text = (
                f"{taken.shared_bytes:,} bytes of shared memory, {taken.registers} registers, "
                f"{taken.spilled_bytes} bytes spilled, {instructions}"
            )
            text += f"; WRONG: {checked.faults}" if checked.faults else ""
        print_wrapped(f"compiled, {checked.planned.group}: {text}", indent=2)


def _print_sources(kernel: Any) -> None:
    from metainfer.compiler.kernel_cards import sources_of_kernel

    for source in sources_of_kernel(kernel):
        place = f" ({source.place})" if source.place else ""
        typer.echo(f"\n# {source.what}{place}")
        typer.echo(source.text.rstrip())
