"""`metainfer hw`: list, show, check and write descriptions of machines."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from metainfer.cli.errors import report
from metainfer.hardware.detect import Description, describe_answers, describe_here
from metainfer.hardware.device import Device
from metainfer.hardware.fabric import LINKS
from metainfer.hardware.load import known_devices, known_machines, load_device, load_machine
from metainfer.hardware.machine import Link, Machine
from metainfer.hardware.toml_text import to_toml
from metainfer.hardware.units import show_quantity
from metainfer.ir.errors import HardwareError, MetainferError
from metainfer.ir.whole_file import write_file

app = typer.Typer(
    help="Descriptions of machines: list, show, check, write.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_WIDTH = 100


def _console() -> Console:
    """Console of at most the house's 100 columns, and of just that where there is no terminal."""
    console = Console(highlight=False)
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    return console


@app.command("list")
def list_machines() -> None:
    """List the machines and devices that come with metainfer.

    Example: metainfer hw list
    """
    try:
        machines = [load_machine(name) for name in known_machines()]
        devices = [load_device(name) for name in known_devices()]
    except MetainferError as error:
        report(error)
    table = Table(
        "machine", "ranks", "what it is", title="Machines (--hw NAME)", title_justify="left"
    )
    for machine in machines:
        table.add_row(machine.name, str(machine.num_devices), machine.title)
    kinds = Table("device", "memory", "what it is", title="Devices", title_justify="left")
    for device in devices:
        memory = show_quantity(device.memory_bytes, "size")
        kinds.add_row(device.name, memory, device.title)
    console = _console()
    console.print(table)
    console.print(kinds)


@app.command()
def show(
    machine: Annotated[str, typer.Argument(help="name of a known machine, or path of a file")],
    as_json: Annotated[
        bool, typer.Option("--json", help="print the whole machine as JSON")
    ] = False,
) -> None:
    """Draw a machine: its topology, its devices and what they reach.

    Example: metainfer hw show 8xpcie
    """
    try:
        loaded = load_machine(machine)
    except MetainferError as error:
        report(error)
    if as_json:
        typer.echo(json.dumps({**loaded.to_dict(), "hash": loaded.machine_hash()}, indent=2))
        return
    console = _console()
    console.print(_topology_tree(loaded))
    for device in loaded.kinds:
        console.print(_device_table(device))
        console.print(_rates_table(device))
    if loaded.num_devices > 1:
        console.print(_reach_table(loaded))
    for line in _remarks(loaded):
        console.print(Text(line))


def _topology_tree(machine: Machine) -> Tree:
    """Hosts with sockets, roots, switches and devices below the things they hang on."""
    tree = Tree(Text(f"{machine.name}: {machine.title}"))
    for node in machine.nodes:
        memory = f", {show_quantity(node.memory_bytes, 'size')}" if node.memory_bytes else ""
        branch = tree.add(Text(f"host {node.name}{memory}"))
        drawn: set[str] = set()
        for socket in machine.sockets:
            if socket.node != node.name:
                continue
            text = f"socket {socket.name} (numa {socket.numa})"
            _hang(machine, branch.add(Text(text)), socket.name, drawn)
        for switch in machine.switches:
            if switch.node == node.name and switch.name not in drawn:
                _hang(machine, branch.add(Text(f"switch {switch.name}")), switch.name, set())
    for switch in machine.switches:
        if not switch.node:
            _hang(machine, tree.add(Text(f"network {switch.name}")), switch.name, set())
    return tree


def _hang(machine: Machine, branch: Tree, name: str, drawn: set[str]) -> None:
    """Add what is linked to a vertex from below; links between sockets as a remark."""
    drawn.add(name)
    sockets = {socket.name for socket in machine.sockets}
    for link in machine.links:
        if name not in link.ends:
            continue
        other = link.ends[0] if link.ends[1] == name else link.ends[1]
        if name in sockets and other in sockets:
            branch.add(Text(f"to {other}: {_link_text(link)}"))
            continue
        if link.ends[1] != name:
            continue
        label = f"{other}  {_link_text(link)}"
        _hang(machine, branch.add(Text(label)), other, drawn)


def _link_text(link: Link) -> str:
    lanes = f" {link.generation}" if link.generation else ""
    lanes += f" x{link.width}" if link.width else ""
    read, write = show_quantity(link.read, "bandwidth"), show_quantity(link.write, "bandwidth")
    peer = "" if link.p2p else ", no peer access"
    return f"{link.kind}{lanes}: read {read}, write {write}{peer} ({link.basis})"


def _device_table(device: Device) -> Table:
    table = Table(title=f"{device.name}: {device.title}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    bandwidth = device.memory_bandwidth
    rows = [
        (
            "memory",
            f"{show_quantity(device.memory_bytes, 'size')}, usable "
            f"{show_quantity(device.usable_bytes, 'size')}",
        ),
        (
            "bandwidth",
            f"peak {show_quantity(bandwidth.peak, 'bandwidth')}, sustained "
            f"{show_quantity(bandwidth.sustained, 'bandwidth')}",
        ),
        ("units", f"{device.num_sms} {'cores' if device.kind == 'cpu' else 'multiprocessors'}"),
        ("shared memory", _size_or_unknown(device.smem_per_block_bytes, "a block")),
        ("last cache", _size_or_unknown(device.l2_bytes, "")),
        ("kernel", f"launch {device.launch_latency_us:g} us, floor {device.kernel_floor_us:g} us"),
        ("features", " ".join(sorted(device.features))),
    ]
    if device.kind == "cpu":
        rows = [row for row in rows if row[0] != "shared memory"]
    for entry in device.libraries:
        rows.append((entry.name, entry.refusal() or entry.version or "usable"))
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _size_or_unknown(size: int, suffix: str) -> str:
    return f"{show_quantity(size, 'size')} {suffix}".rstrip() if size else "not stated"


def _rates_table(device: Device) -> Table:
    table = Table("rate", "peak", "sustained", "share", "source", title_justify="left")
    table.columns[-1].overflow = "fold"
    for rate in device.rates:
        table.add_row(
            rate.dtype,
            show_quantity(rate.peak, "rate"),
            show_quantity(rate.sustained, "rate"),
            f"{rate.sustained / rate.peak:.2f}",
            Text(rate.source),
        )
    return table


def _reach_table(machine: Machine) -> Table:
    """Ways between ranks, equal ones once."""
    topology = machine.topology()
    table = Table("ranks", "write", "read", "one way", "peer", "crosses", title_justify="left")
    seen: dict[tuple[Any, ...], str] = {}
    for b in range(1, machine.num_devices):
        path = topology.path(0, b)
        crosses = "network" if path.crosses_node else "socket" if path.crosses_socket else ""
        row = (
            show_quantity(path.write, "bandwidth"),
            show_quantity(path.read, "bandwidth"),
            f"{path.write_latency_us:.3g} us",
            "direct" if path.direct else "through the host",
            crosses,
        )
        seen[row] = f"{seen[row]},{b}" if row in seen else f"0-{b}"
    for row, ranks in seen.items():
        table.add_row(ranks, *row)
    return table


def _remarks(machine: Machine) -> list[str]:
    islands = " ".join(
        "{" + ",".join(map(str, part)) + "}" for part in machine.topology().islands()
    )
    lines = [f"islands: {islands}"] if machine.num_devices > 1 else []
    for switch in machine.switches:
        rule = switch.posted_write_collapse
        if rule is not None:
            total = show_quantity(rule.total, "bandwidth")
            lines.append(
                f"{switch.name}: {rule.writers} writers to {rule.roots} roots collapse to {total}"
            )
    lines += [
        f"collective {c.op} over {c.ranks}, {c.algorithm}: {c.basis}" for c in machine.collectives
    ]
    lines += [f"setting {o.name}={o.value}: {o.reason}" for o in machine.communicator]
    entries = dict.fromkeys((*machine.policy, *(p for d in machine.kinds for p in d.policy)))
    lines += [f"policy: {p.stance} {p.subject} {p.name} ({p.phase}): {p.reason}" for p in entries]
    return lines


@app.command()
def check(
    paths: Annotated[list[str], typer.Argument(help="machine files, or names of known machines")],
) -> None:
    """Check machine files: keys, units, references, physics. Exit code 2 if one is wrong.

    Example: metainfer hw check my_box.toml
    """
    failed = 0
    for path in paths:
        try:
            machine = load_machine(path)
        except MetainferError as error:
            sys.stderr.write(f"error: {error.render()}\n")
            failed = max(failed, error.exit_code)
            continue
        rates = sum(len(device.rates) for device in machine.kinds)
        curves = sum(len(device.curves) for device in machine.kinds)
        typer.echo(
            f"{path}: good. Checked {machine.num_devices} devices of {len(machine.kinds)} kinds, "
            f"{rates} rates, {curves} curves, {len(machine.links)} links, "
            f"{len(machine.collectives)} collectives"
        )
    if failed:
        raise typer.Exit(failed)


@app.command()
def new(
    path: Annotated[Path, typer.Argument(help="file to write, ending in .toml")],
    name: Annotated[
        str | None, typer.Option(help="name of the machine; the file's stem if not given")
    ] = None,
    device_kind: Annotated[
        str, typer.Option(help="'here' or 'cpu' reads this machine; else a device of `hw list`")
    ] = "here",
    devices: Annotated[int | None, typer.Option(min=1, help="number of devices")] = None,
    link: Annotated[
        str | None, typer.Option(help=f"how they are joined: {', '.join(LINKS)}")
    ] = None,
    sockets: Annotated[int, typer.Option(min=1, help="processors of the host")] = 1,
    measure: Annotated[
        bool, typer.Option(help="time the processor for a second (this machine only)")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="overwrite the file")] = False,
) -> None:
    """Write a commented machine file: from the machine it runs on, or from a few answers.

    Example: metainfer hw new my_box.toml --device-kind rtx_6000d --devices 8 --link pcie5x16
    --sockets 2
    """
    try:
        _refuse_path(path, force)
        machine_name = name or path.stem
        if device_kind in ("here", "cpu"):
            kind = "auto" if device_kind == "here" else "cpu"
            found = describe_here(kind, devices, measure=measure, name=machine_name)
        else:
            found = _ask(machine_name, device_kind, devices, link, sockets)
        found.machine(str(path))
        _write(path, _file_text(found))
    except MetainferError as error:
        report(error)
    typer.echo(f"wrote {path}")
    for note in found.notes:
        typer.echo(f"note: {note}")


def _refuse_path(path: Path, force: bool) -> None:
    if path.suffix != ".toml":
        raise HardwareError(f"{path} does not end in .toml", advice="name the file so")
    if path.exists() and not force:
        raise HardwareError(
            f"{path} exists", advice="give --force to overwrite it, or name another file"
        )
    if not path.parent.is_dir():
        raise HardwareError(f"there is no folder {path.parent}", advice="make it first")


def _ask(
    name: str, device_kind: str, devices: int | None, link: str | None, sockets: int
) -> Description:
    """Take the answers given as options; ask for the others if a person is there to answer."""
    load_device(device_kind)
    missing = [o for o, v in (("--devices", devices), ("--link", link)) if v is None]
    if missing and not sys.stdin.isatty():
        raise HardwareError(
            f"{' and '.join(missing)} not given, and nobody to ask",
            advice=f"give {' and '.join(missing)}",
        )
    count = devices or typer.prompt("Number of devices", type=int)
    joined = link or typer.prompt(f"Joined by ({', '.join(LINKS)})")
    return describe_answers(name, device_kind, count, joined, sockets)


_COMMENTS = {
    "": "Written by `metainfer hw new`. Every figure carries its unit and every block its source:\n"
    "when you replace a figure, replace its source. GB is 10^9 bytes, GiB 2^30; bandwidths of\n"
    "links are of ONE direction. Check it with `metainfer hw check`, draw it with `hw show`.",
    "nodes": "Hosts. memory is of the host, not of its devices.",
    "sockets": "Processors of a host; the ports that devices hang on belong to one.",
    "devices": "Devices in rank order. type is a known device, devices/TYPE.toml beside\n"
    "this file, or [types.TYPE] below.",
    "switches": "Switches. One whose cards' writes collapse says so: posted_write_collapse.",
    "links": "One link from each of `from` to `to`. read and write are of one flow in one\n"
    "direction; total (all flows, one direction) and both_ways may be added. p2p: whether\n"
    "devices may reach each other's memory across it. basis: measured here,\n"
    "measured elsewhere, datasheet, assumed.",
    "host": "The way through host memory, where devices cannot reach each other.",
    "types": "Devices described in this file.",
}


def _file_text(found: Description) -> str:
    """Text of a description with its comments, and its notes at the head."""
    comments = dict(_COMMENTS)
    for note in found.notes:
        comments[""] += f"\nNOTE: {note}."
    return to_toml(found.data, comments)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        write_file(path, text.encode())
    except OSError as error:
        raise HardwareError(
            f"cannot write {path}: {error.strerror}", advice="name a folder you may write to"
        ) from error
