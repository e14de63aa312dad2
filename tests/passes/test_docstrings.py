"""What a pass says it does, in the text of its docstring, is what it does."""

import inspect
from textwrap import dedent

import pytest
from pass_oracle import PASSES, ROUNDING, assert_same_numbers, parse_any, target_for

from metainfer.ir.verify import verify_module


@pytest.mark.parametrize("name", PASSES)
def test_docstring_shows_before_and_after(name: str) -> None:
    text = inspect.getdoc(PASSES[name]) or ""
    before_text, after_text = text.partition("Before::")[2].split("After::")
    before, wanted = parse_any(dedent(before_text)), parse_any(dedent(after_text))
    verify_module(before)
    after = PASSES[name](before, target_for("1xh200" if name in ROUNDING else "cpu"))
    assert after == wanted
    assert_same_numbers(before, after, rounding=ROUNDING.get(name, 0.0))
