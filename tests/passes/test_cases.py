"""Every text case of every pass: text and numbers at once.

A case is a header (``# pass: fuse   hw: cpu   phase: decode``), a graph or module, ``# -----``, and
what the passes make of it.
"""

import re
from pathlib import Path

import pytest
from pass_oracle import PASSES, ROUNDING, assert_same_numbers, parse_any, print_any, target_for

from metainfer.compiler.by_hand import CASE_LINE, Case, read_case
from metainfer.ir.graph import Module
from metainfer.ir.verify import verify_module

CASES = Path(__file__).parent / "cases"


def run(case: Case) -> tuple[Module, Module, str]:
    module = parse_any(case.before)
    target = target_for(case.header.get("hw", "cpu"), case.header.get("phase", "decode"))
    made = module
    verify_module(module)
    for name in case.header["pass"].split(","):
        made = PASSES[name](made, target)
        verify_module(made)
    is_module = re.search(r"^module\b", case.before, re.MULTILINE) is not None
    text = print_any(made, bare=not is_module and not made.loads)
    return module, made, text


FILES = sorted(CASES.glob("*/*.mir"))


def test_every_folder_is_a_pass_and_none_is_empty() -> None:
    folders = {path.parent.name for path in FILES}
    assert folders == set(PASSES)
    assert len(FILES) >= 35


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_case(path: Path, update_golden: bool) -> None:
    case = read_case(path.read_text())
    before, after, text = run(case)
    if update_golden:
        path.write_text(case.before + CASE_LINE + text)
        case = read_case(path.read_text())
    assert text == case.after
    assert parse_any(text) == after
    rounding = max(ROUNDING.get(name, 0.0) for name in case.header["pass"].split(","))
    assert_same_numbers(before, after, rounding=rounding)
