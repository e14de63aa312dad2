"""Hardware files that are wrong, where a user meets them: in `compile --hw`."""

from pathlib import Path

import pytest

CPU = Path(__file__).parents[2] / "hardware" / "cpu.toml"
PCIE = Path(__file__).parents[2] / "hardware" / "8xpcie.toml"


@pytest.mark.parametrize(
    ("base", "old", "new", "words", "line"),
    [
        (CPU, "cores = 2", "cors = 2", ["unknown key", "cors", "cores"], "cors"),
        (CPU, 'read = "26 GB/s"', "read = 26", ["has no unit", "26"], "read"),
        (CPU, '"16 GiB"', '"16"', ["has no unit"], "memory"),
        (CPU, 'read = "26 GB/s"', 'read = "26 GB"', ["bandwidth"], "read"),
        (PCIE, 'write = "53 GB/s"', 'write = "130 GB/s"', ["63.01 GB/s", "generation 5"], "write"),
        (PCIE, '"gpu0", "gpu1"', '"gpu0", "gpu0"', ["'gpu0' is given twice"], "names"),
        (PCIE, 'name = "socket1"', 'name = "socket0"', ["socket0"], "name"),
        (CPU, 'type = "x86_v3"', 'type = "x86_v9"', ["unknown device type", "x86_v3"], "type"),
        (CPU, 'name = "host0"', 'name = "host0', [], "name"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 24 else "",
)
def test_a_wrong_file(
    refused, tiny: Path, tmp_path: Path, base: Path, old: str, new: str, words: list[str], line: str
) -> None:
    text = base.read_text()
    assert old in text
    file = tmp_path / "box.toml"
    file.write_text(text.replace(old, new, 1))
    found = refused("compile", tiny, "--hw", file, "--out", tmp_path / "p")
    for word in words:
        assert word in found.text
    number = next(
        int(part.split(":")[1].split(",")[0].split()[0])
        for part in [found.text[found.text.index("box.toml") :]]
    )
    assert line in file.read_text().splitlines()[number - 1]


@pytest.mark.parametrize("name", ["8xpci", "none.toml", "", "hardware"])
def test_a_machine_that_is_not_there(refused, tiny: Path, tmp_path: Path, name: str) -> None:
    found = refused("compile", tiny, "--hw", name, "--out", tmp_path / "p")
    assert repr(name) in found.text or name in found.text


def test_an_architecture_that_nobody_knows(tiny: Path, tmp_path: Path) -> None:
    """Field fault B10: the plan works from the capabilities that are stated, and says so."""
    from typer.testing import CliRunner

    from metainfer.cli.app import app
    from metainfer.ir.plan import Plan

    text = PCIE.read_text().replace('type = "rtx_6000d"', 'type = "rtx_9999"')
    inline = """
[types.rtx_9999]
extends = "rtx_6000d"
title = "a card of tomorrow"
capability = "sm_199"
"""
    file = tmp_path / "tomorrow.toml"
    file.write_text(text + inline)
    out = tmp_path / "p"
    result = CliRunner().invoke(app, ["compile", str(tiny), "--hw", str(file), "--out", str(out)])
    assert result.exit_code == 0, result.output
    plan = Plan.read(out)
    same = CliRunner().invoke(
        app, ["compile", str(tiny), "--hw", "8xpcie", "--out", str(tmp_path / "q")]
    )
    assert same.exit_code == 0

    def kernels(read: Plan) -> list[str]:
        module = read.module("decode")
        return [c.kernel for g in module.graphs for op in g.ops for c in op.choices]

    # Never a worse kernel for the name alone.
    assert kernels(plan) == kernels(Plan.read(tmp_path / "q"))
