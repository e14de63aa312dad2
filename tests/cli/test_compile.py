import json
import re
from pathlib import Path

import pytest

from metainfer.ir.plan import Plan

SMALL = ("--max-tokens", "32", "--max-sequences", "2", "--max-context", "96")


def test_summary_has_formats_times_and_memory(cli, tiny: Path, tmp_path: Path) -> None:
    result = cli("compile", tiny, *SMALL, "--out", tmp_path / "p")
    assert result.code == 0
    assert "(causal_lm) for cpu" in result.out
    assert "formats: activations f32; weights " in result.out
    for word in ("prefill", "decode", "tok/s", "roofline", "kv pages", "total", "weights"):
        assert word in result.out
    own = re.search(r"the compiler's own part ([\d.]+) s", result.out)
    assert own is not None
    assert 0 <= float(own[1]) < 60
    assert f"plan {Plan.read(tmp_path / 'p').hash}" in result.out
    assert all(len(line.rstrip()) <= 100 for line in result.out.splitlines() if "wrote" not in line)


def test_json_is_one_object_and_adds_up(cli, tiny: Path, tmp_path: Path) -> None:
    result = cli("compile", tiny, *SMALL, "--out", tmp_path / "p", "--json")
    data = json.loads(result.out)
    assert data["plan_hash"] == Plan.read(tmp_path / "p").hash
    memory = data["memory"]
    assert memory["total_bytes"] == sum(t["bytes"] for t in memory["terms"])
    assert memory["total_bytes"] <= memory["budget_bytes"]
    assert [p["name"] for p in data["phases"]] == ["prefill", "decode"]
    seconds = data["seconds"]
    assert seconds["own"] + seconds["capture"] + seconds["torch"] == pytest.approx(seconds["wall"])


def test_equal_input_gives_an_equal_plan(cli, tiny: Path, plan: Path, tmp_path: Path) -> None:
    cli("compile", tiny, *SMALL, "--out", tmp_path / "p")
    assert Plan.read(tmp_path / "p").hash == Plan.read(plan).hash


def test_a_plan_is_replaced_only_by_force(cli, tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "p"
    assert cli("compile", tiny, *SMALL, "--out", place).code == 0
    first = Plan.read(place).hash
    refused = cli("compile", tiny, *SMALL, "--exact", "--out", place)
    assert refused.code == 2
    assert f"{place} exists already" in refused.err
    assert Plan.read(place).hash == first
    assert cli("compile", tiny, *SMALL, "--exact", "--out", place, "--force").code == 0
    assert Plan.read(place).hash != first


def test_force_never_replaces_what_is_no_plan(cli, tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "precious"
    place.mkdir()
    (place / "file").write_text("kept")
    assert cli("compile", tiny, *SMALL, "--out", place, "--force").code == 2
    assert (place / "file").read_text() == "kept"


def test_default_place_is_named_after_model_and_machine(
    cli, module_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("compile", module_file).code == 0
    assert Plan.read(Path("plans/mlp-cpu")).meta["model"]["name"] == "mlp"


def test_strict_passes_on_the_cpu(cli, tiny: Path, tmp_path: Path) -> None:
    result = cli("compile", tiny, *SMALL, "--strict", "--out", tmp_path / "p")
    assert result.code == 0, result.err
    assert "no fallback" in result.out


def test_strict_lists_the_generic_groups_and_writes_nothing(
    cli, tiny: Path, tmp_path: Path
) -> None:
    arguments = ("compile", tiny, *SMALL, "--hw", "8xpcie", "--out", tmp_path / "p")
    result = cli(*arguments, "--strict")
    assert result.code == 3
    assert "the prefill plan for rtx_6000d falls back" in result.err
    assert re.search(r"falls back: \d+ groups? with only a generic kernel\n", result.err)
    assert re.search(r"select layer: \S+ %\S+ -> torch\.\w+_plain", result.err)
    assert "without --strict" in result.err
    assert list(tmp_path.iterdir()) == []
    accepted = cli(*arguments)
    assert accepted.code == 0
    assert re.search(r"decode: \d+ fallbacks, about .+ a step", accepted.out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pin", "linear"), ["--pin linear is not GROUP=KERNEL", "--pin linear=cpu.linear_w4"]),
        (("--pin", "linear=cpu.nothing"), ["unknown kernel 'cpu.nothing'"]),
        (("--pin", "linear=cpu.add"), ["that kernel implements add", "kernels of linear: "]),
        (("--pin", "a=b", "--pin", "a=c"), ["--pin a is given twice"]),
        (("--forbid", "cpu.ad"), ["unknown kernel 'cpu.ad'", "did you mean"]),
        (("--skip-pass", "fise"), ["unknown pass 'fise'", "known, in order"]),
        (("--weights", "int3"), ["weights = 'int3' is not known", "int8"]),
        (("--hw", "8xpci"), ["unknown machine '8xpci'", "did you mean '8xpcie'?"]),
        (("--max-sequences", "99", "--max-tokens", "9"), ["max_sequences = 99 is more than"]),
        (("--memory-fraction", "2"), ["memory_fraction = 2.0"]),
    ],
)
def test_bad_options_end_with_2_and_write_nothing(
    cli, tiny: Path, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    result = cli("compile", tiny, "--out", tmp_path / "p", *arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert all(word in result.err for word in words)
    assert list(tmp_path.iterdir()) == []


def test_a_pin_that_changes_nothing_is_an_error(cli, tiny: Path, tmp_path: Path) -> None:
    result = cli(
        "compile", tiny, *SMALL, "--out", tmp_path / "p", "--pin", "layer_norm=cpu.layer_norm"
    )
    assert result.code == 2
    assert "applies to no group of the model" in result.err
    assert "decode: " in result.err


def test_a_model_too_large_says_what_is_missing(cli, tiny: Path, tmp_path: Path) -> None:
    result = cli(
        "compile", tiny, *SMALL, "--out", tmp_path / "p", "--memory-fraction", "0.00000001"
    )
    assert result.code == 3
    assert re.search(r"does not fit on \S+: [\d,]+ bytes missing", result.err)
    assert "devices" in result.err
    assert list(tmp_path.iterdir()) == []
