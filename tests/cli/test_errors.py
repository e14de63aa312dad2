"""Exit codes and messages, where it matters in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import metainfer.compiler.explain
from metainfer.cli.app import app
from metainfer.ir.errors import CapacityError

VERBS = ("compile", "run", "bench", "explain", "diff", "verify", "opt", "version", "hw")


def start(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "metainfer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert "Example: metainfer" in result.stdout or verb == "hw"


def test_help_imports_no_torch() -> None:
    code = (
        "import sys, metainfer.cli.app as a\n"
        "from typer.testing import CliRunner\n"
        "assert 'Commands' in CliRunner().invoke(a.app, ['--help']).stdout\n"
        "heavy = {'torch', 'numpy', 'networkx', 'pydantic', 'lark'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_bad_input_ends_with_2_and_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("this is no python\n")
    result = start("compile", file, "--out", tmp_path / "p")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: the model file is no Python")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "p").exists()


def test_traceback_on_demand_at_either_end(tmp_path: Path) -> None:
    for arguments in (("--traceback", "explain", "x"), ("explain", "x", "--traceback")):
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 2
        assert "Traceback (most recent call last)" in result.stderr
    assert "Traceback" not in CliRunner().invoke(app, ["explain", "x"]).stderr


def test_errors_carry_their_own_code(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CapacityError("too small", advice="buy more")

    monkeypatch.setattr(metainfer.compiler.explain, "explain", fail)
    result = CliRunner().invoke(app, ["explain", str(plan)])
    assert result.exit_code == 3
    assert result.stderr == "error: too small\n  buy more\n"


def test_a_fault_of_ours_is_one_line(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(metainfer.compiler.explain, "explain", fail)
    result = CliRunner().invoke(app, ["explain", str(plan)])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "internal error: KeyError: 'lost'",
        "  run it again with --traceback and report what it prints",
    ]


def test_interruption_ends_with_130() -> None:
    # Whoever runs the tests in the background has them ignore interruptions: heed them first, and
    # not by a function between fork and exec, which threads of the tests' libraries forbid.
    heed = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.executable, [sys.executable, '-m', 'metainfer', 'opt', '/dev/stdin'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", heed],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        time.sleep(5)  # it must have begun to read, on a busy machine too
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "interrupted\n"


def test_a_tampered_plan_is_refused(cli, plan: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "p"
    shutil.copytree(plan, copy)
    text = copy / "stage0.decode.mir"
    text.write_text(text.read_text() + "# harmless?\n")
    for verb in ("run", "explain", "verify", "bench"):
        result = cli(verb, copy, *(["x"] if verb == "run" else []))
        assert result.code == 2
        assert "was changed after the plan was made" in result.err


def test_a_plan_of_another_machine_is_refused(cli, tiny: Path, tmp_path: Path) -> None:
    small = ("--max-tokens", "16", "--max-sequences", "2", "--max-context", "32")
    result = cli("compile", tiny, "--hw", "1xh200", *small, "--out", tmp_path / "p")
    assert result.code == 0, result.err
    refused = cli("run", tmp_path / "p", "abc")
    assert refused.code == 2
    assert "1xh200" in refused.err


def test_a_closed_pipe_is_no_fault(plan: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "metainfer", "explain", str(plan)]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert result.returncode == 1
    assert "internal error" not in result.stderr
    assert "Traceback" not in result.stderr
