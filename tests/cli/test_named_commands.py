"""Commands that messages, comments and pages name are commands that exist."""

import re
from pathlib import Path

import typer

from metainfer.cli.app import app
from metainfer.cli.hw import app as hw

ROOT = Path(__file__).parents[2]
FOLDERS = ("backends", "compiler", "hardware", "ir", "models", "passes", "runtime", "src")
FILES = sorted(
    {
        *ROOT.glob("*.md"),
        *(p for f in FOLDERS for kind in ("py", "toml") for p in (ROOT / f).rglob(f"*.{kind}")),
    }
)
NAMED = re.compile(r"(?:`|^\s*|Example: )metainfer (hw [a-z]+|[a-z]+)", re.MULTILINE)


def known() -> set[str]:
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    return verbs | {f"hw {verb}" for verb in typer.main.get_command(hw).commands}  # type: ignore[attr-defined]


def test_the_pattern_finds_commands() -> None:
    text = "note: use `metainfer hw probe`\n    metainfer compile x\nmetainfer loads"
    assert NAMED.findall(text) == ["hw probe", "compile", "loads"]


def test_named_commands_exist() -> None:
    there = known()
    named = {str(p.relative_to(ROOT)): set(NAMED.findall(p.read_text("utf-8"))) for p in FILES}
    assert {"hw new", "compile"} <= set.union(*named.values())
    assert {file: found - there for file, found in named.items() if found - there} == {}
