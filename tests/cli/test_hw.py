import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from metainfer.cli.hw import app
from metainfer.hardware import known_machines, load_machine

runner = CliRunner()


def test_list_names_every_machine() -> None:
    result = runner.invoke(app, ["list"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in known_machines())
    assert "rtx_6000d" in result.stdout


@pytest.mark.parametrize("name", known_machines())
def test_show_draws_within_100_columns(name: str) -> None:
    result = runner.invoke(app, ["show", name])
    assert result.exit_code == 0
    assert all(len(line.rstrip()) <= 100 for line in result.stdout.splitlines())
    machine = load_machine(name)
    assert all(f"{instance.name} " in result.stdout for instance in machine.devices)
    assert all(rate.dtype in result.stdout for rate in machine.device(0).rates)


def test_show_tells_what_hurts() -> None:
    out = runner.invoke(app, ["show", "8xpro6000"]).stdout
    assert "islands: {0,1,2,3} {4,5,6,7}" in out
    assert "switch0: 2 writers to 2 roots collapse to 2.7 GB/s" in out
    assert "NCCL_P2P_LEVEL=SYS" in out
    assert "not stated" in runner.invoke(app, ["show", "8xpcie"]).stdout
    assert "through the host" in runner.invoke(app, ["show", "8x4090"]).stdout


def test_show_json_is_the_machine() -> None:
    result = runner.invoke(app, ["show", "8xpcie", "--json"])
    data = json.loads(result.stdout)
    machine = load_machine("8xpcie")
    assert data.pop("hash") == machine.machine_hash()
    assert data == machine.to_dict()


def test_errors_go_to_stderr_with_exit_code_2() -> None:
    result = runner.invoke(app, ["show", "8xpci"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: unknown machine '8xpci'\n")
    assert "did you mean '8xpcie'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_check_goes_through_all_files(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text('name = "bad"\n')
    result = runner.invoke(app, ["check", str(bad), "cpu", "8xpcie"])
    assert result.exit_code == 2
    assert f"{bad}:1" in result.stderr
    assert "8xpcie: good. Checked 8 devices of 1 kinds, 9 rates" in result.stdout
    assert runner.invoke(app, ["check", *known_machines()]).exit_code == 0


def test_new_writes_a_file_that_checks(tmp_path: Path) -> None:
    path = tmp_path / "my_box.toml"
    answers = ["--device-kind", "rtx_6000d", "--devices", "8", "--link", "pcie5x16"]
    result = runner.invoke(app, ["new", str(path), *answers, "--sockets", "2"])
    assert result.exit_code == 0, result.stderr
    machine = load_machine(str(path))
    assert machine.name == "my_box"
    assert machine.topology().islands() == ((0, 1, 2, 3), (4, 5, 6, 7))
    text = path.read_text()
    assert "# One link from each of `from` to `to`" in text
    assert "# NOTE: links are assumed" in text
    assert list(tmp_path.iterdir()) == [path]


def test_new_describes_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    options = ["--device-kind", "cpu", "--no-measure", "--name", "laptop"]
    result = runner.invoke(app, ["new", str(path), *options])
    assert result.exit_code == 0, result.stderr
    assert load_machine(str(path)).name == "laptop"
    assert "note:" in result.stdout


def test_new_does_not_overwrite_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text("mine")
    options = ["new", str(path), "--device-kind", "cpu", "--no-measure"]
    result = runner.invoke(app, options)
    assert result.exit_code == 2
    assert "exists" in result.stderr
    assert path.read_text() == "mine"
    assert runner.invoke(app, [*options, "--force"]).exit_code == 0
    assert load_machine(str(path)).num_devices == 1


def test_new_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    result = runner.invoke(app, ["new", str(tmp_path / "box.txt")])
    assert result.exit_code == 2
    assert "does not end in .toml" in result.stderr
    result = runner.invoke(app, ["new", str(tmp_path / "no" / "box.toml")])
    assert "there is no folder" in result.stderr
    result = runner.invoke(app, ["new", str(tmp_path / "box.toml"), "--device-kind", "l20"])
    assert result.exit_code == 2
    assert "--devices and --link not given" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["list", "show", "check", "new"])
def test_every_verb_has_an_example(verb: str) -> None:
    result = runner.invoke(app, [verb, "--help"])
    assert f"Example: metainfer hw {verb}" in result.stdout
