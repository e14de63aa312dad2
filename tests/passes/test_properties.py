"""Properties of the passes on random graphs: verified, numbers kept, canonical form idempotent."""

import pytest
from hypothesis import given, settings
from pass_graphs import typed_modules
from pass_oracle import PASSES, assert_same_numbers, target_for

from metainfer.ir.graph import Module
from metainfer.ir.parser import parse_module
from metainfer.ir.printer import print_module
from metainfer.ir.verify import verify_module
from metainfer.passes.canonicalize import canonicalize


@given(typed_modules())
@settings(deadline=None)
def test_canonicalize_is_idempotent_and_keeps_numbers(module: Module) -> None:
    verify_module(module)
    once = canonicalize(module, target_for())
    verify_module(once)
    assert canonicalize(once, target_for()) == once
    assert parse_module(print_module(once)) == once
    assert_same_numbers(module, once)
    assert len(once.main.ops) <= len(module.main.ops)


@pytest.mark.parametrize("name", [n for n in PASSES if n != "canonicalize"])
@given(module=typed_modules())
@settings(deadline=None)
def test_a_pass_keeps_numbers(name: str, module: Module) -> None:
    after = PASSES[name](module, target_for())
    verify_module(after)
    assert_same_numbers(module, after)


@given(typed_modules())
@settings(deadline=None)
def test_all_passes_in_order_keep_numbers(module: Module) -> None:
    after = module
    for name in PASSES:
        after = PASSES[name](after, target_for())
        verify_module(after)
    assert_same_numbers(module, after)
