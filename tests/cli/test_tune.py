"""`metainfer tune`: times here, a file that is gone on with, bad input."""

import json
from pathlib import Path

import pytest


def test_a_module_is_tuned_and_compiled_by_its_times(
    cli, module_file: Path, module_plan: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cpu.tuned.json"
    first = cli("tune", module_plan, "--group", "gelu", "--out", path)
    assert first.code == 0, first.err
    assert "fastest" in first.out
    assert max(map(len, first.out.splitlines())) <= 100
    groups = json.loads(path.read_text())["sections"][0]["groups"]
    ((text, kernels),) = groups.items()
    assert text == "gelu(f32[T,32]) : f32[T,32]"
    assert set(kernels["cpu.gelu_erf"]) == {"T=1", "T=2", "T=4", "T=8"}
    assert all(us > 0 for sizes in kernels.values() for us in sizes.values())
    again = json.loads(cli("tune", module_plan, "--group", "gelu", "--out", path, "--json").out)
    assert (again["measured"], again["known"]) == (0, sum(map(len, kernels.values())))
    out = tmp_path / "plan"
    assert cli("compile", module_file, "--tuned", path, "--out", out).code == 0
    told = cli("explain", out).out
    assert "measured here" in told
    assert "not measured: cpu.linear_f32 in call: linear(" in " ".join(told.split())


@pytest.mark.parametrize("verb", ["tune", "compile"])
def test_a_damaged_file_is_refused_by_line(
    cli, verb: str, module_file: Path, module_plan: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"schema": 1,\n "sections": [{"device": 3}]}')
    if verb == "tune":
        result = cli("tune", module_plan, "--out", path)
    else:
        result = cli("compile", module_file, "--tuned", path, "--out", tmp_path / "p")
    assert result.code == 2
    assert "damaged at sections[0].device: a dict is wanted, found 3" in result.err
    assert f"{path}:2" in result.err
    assert not (tmp_path / "p").exists()


def test_a_tuned_file_that_is_not_there(cli, module_file: Path, tmp_path: Path) -> None:
    result = cli("compile", module_file, "--tuned", tmp_path / "none", "--out", tmp_path / "p")
    assert result.code == 2
    assert "metainfer tune PLAN --out FILE" in result.err
