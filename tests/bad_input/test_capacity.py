"""What does not fit: the bytes missing, the devices it would take, exit code 3."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import metainfer
from metainfer.cli.app import app
from metainfer.hardware.load import load_machine
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import CapacityError
from metainfer.runtime.load import load
from metainfer.runtime.sampling import SamplingParams

SMALL: dict[str, Any] = {"max_tokens": 16, "max_sequences": 2, "max_context": 32}


def machine_with(usable: int) -> Machine:
    machine = load_machine("cpu")
    place = machine.devices[0]
    device = replace(place.device, memory_bytes=usable + place.device.reserved_bytes)
    return replace(machine, devices=(replace(place, device=device),))


@pytest.mark.parametrize("usable", [50_000, 150_000, 230_000])
def test_a_model_that_does_not_fit(tiny: Path, made, tmp_path: Path, listing, usable: int) -> None:
    capacity = made.meta["capacity"]
    terms = {t["name"]: t["bytes"] for t in capacity["terms"]}
    # All but the pages, and the pages of one sequence of max_context and the null one.
    pages = 32 // capacity["page_size"] + 1
    needed = sum(terms.values()) - terms["kv pages"] + pages * capacity["page_bytes"]
    budget = int(usable * 0.9)
    with pytest.raises(CapacityError) as caught:
        metainfer.compile(tiny, machine_with(usable), out=tmp_path / "plan", **SMALL)
    error = caught.value
    assert error.exit_code == 3
    found = re.search(r"does not fit on x86_v3: ([\d,]+) bytes missing", error.what)
    assert found is not None, error.what
    assert int(found.group(1).replace(",", "")) == needed - budget
    assert f"would fit over {math.ceil(needed / budget)} such devices" in error.advice
    assert "--weights int4" in error.advice
    assert "weights" in error.text
    assert "activations" in error.text
    assert listing(tmp_path) == []


def test_the_least_memory_that_is_said_to_fit_does_fit(tiny: Path) -> None:
    usable = 200_000
    with pytest.raises(CapacityError) as caught:
        metainfer.compile(tiny, machine_with(usable), memory_fraction=1.0, **SMALL)
    found = re.search(r"([\d,]+) bytes missing", caught.value.what)
    assert found is not None
    least = usable + int(found.group(1).replace(",", ""))
    with pytest.raises(CapacityError) as caught:
        metainfer.compile(tiny, machine_with(least - 1), memory_fraction=1.0, **SMALL)
    assert ": 1 bytes missing" in caught.value.what
    plan = metainfer.compile(tiny, machine_with(least), memory_fraction=1.0, **SMALL)
    assert plan.meta["capacity"]["max_context"] == 32
    assert plan.meta["capacity"]["full_sequences"] == 1


def test_the_command_ends_with_3_and_writes_nothing(tiny: Path, tmp_path: Path, listing) -> None:
    arguments = ["compile", str(tiny), "--memory-fraction", "0.00001", "--out"]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "plan")])
    assert result.exit_code == 3
    assert re.search(r"[\d,]+ bytes missing", result.stderr)
    assert re.search(r"over \d+ such devices", result.stderr)
    assert listing(tmp_path) == []


def test_a_prompt_longer_than_the_capacity(plan: Path) -> None:
    engine = load(plan, allow_machine_mismatch=True).engine()
    with pytest.raises(CapacityError) as caught:
        engine.generate([[1] * 40], SamplingParams(max_tokens=4))
    assert caught.value.exit_code == 3
    assert "40" in str(caught.value)
    assert "32" in str(caught.value)
    assert "larger max_context" in caught.value.advice
    answers = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert 1 <= len(answers[0].token_ids) <= 2


def test_the_command_refuses_a_long_prompt_with_3(plan: Path) -> None:
    arguments = ["run", str(plan), "x" * 40, "--allow-machine-mismatch"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3, result.stderr
    assert "larger max_context" in result.stderr
    assert result.stdout == ""


def test_a_context_that_memory_cuts_is_told(tiny: Path) -> None:
    """The model knows more positions than fit: the account says so, and by how much."""
    whole = metainfer.compile(tiny, "cpu", max_tokens=16, max_sequences=2).meta["capacity"]
    pages = {t["name"]: t for t in whole["terms"]}["kv pages"]
    assert "cut" not in pages["detail"]
    fixed = whole["total_bytes"] - pages["bytes"]
    machine = machine_with(fixed + 3 * whole["page_bytes"])
    cut = metainfer.compile(
        tiny, machine, max_tokens=16, max_sequences=2, memory_fraction=1.0
    ).meta["capacity"]
    assert cut["max_context"] == 2 * cut["page_size"] < whole["max_context"]
    detail = {t["name"]: t for t in cut["terms"]}["kv pages"]["detail"]
    assert f"cut from {whole['max_context']:,} to {cut['max_context']:,} tokens" in detail
