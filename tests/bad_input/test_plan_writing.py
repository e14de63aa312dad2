"""A plan is written whole or not at all: full disks, refused renames, kills."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import metainfer
from metainfer.cli.app import app
from metainfer.ir.errors import PlanError
from metainfer.ir.plan import Plan

SMALL: dict[str, Any] = {"max_tokens": 16, "max_sequences": 2, "max_context": 32}
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_at(monkeypatch: pytest.MonkeyPatch, function: str, call: int) -> None:
    """Let the given call of a function of `os` fail as on a full disk."""
    real, calls = getattr(os, function), iter(range(1, 100))

    def failing(*arguments: object, **options: object) -> object:
        if next(calls) == call:
            raise FULL
        return real(*arguments, **options)

    monkeypatch.setattr(os, function, failing)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system itself refuses to write more to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize(
    ("function", "call"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("rename", 1), ("chmod", 1)]
)
def test_a_full_disk_leaves_nothing(
    made: Plan, tmp_path: Path, listing, monkeypatch, function: str, call: int
) -> None:
    fail_at(monkeypatch, function, call)
    with pytest.raises(PlanError) as caught:
        made.save(tmp_path / "plan")
    assert caught.value.exit_code == 2
    assert f"could not be written to {tmp_path / 'plan'}: No space left" in caught.value.what
    assert "free space or choose another --out" in caught.value.advice
    assert listing(tmp_path) == []
    monkeypatch.undo()
    made.save(tmp_path / "plan")
    assert Plan.read(tmp_path / "plan").hash == made.hash


def test_a_refusal_of_the_system_leaves_nothing(made: Plan, tmp_path: Path, listing) -> None:
    with files_of_at_most(1000), pytest.raises(PlanError, match="File too large"):
        made.save(tmp_path / "plan")
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("function", "call"), [("fsync", 1), ("fsync", 3), ("rename", 1), ("rename", 2)]
)
def test_the_old_plan_survives_a_failing_replacement(
    made: Plan, tiny: Path, tmp_path: Path, listing, monkeypatch, function: str, call: int
) -> None:
    other = metainfer.compile(tiny, "cpu", **{**SMALL, "max_context": 16})
    other.save(tmp_path / "plan")
    fail_at(monkeypatch, function, call)
    with pytest.raises(PlanError, match="No space left"):
        made.save(tmp_path / "plan", overwrite=True)
    monkeypatch.undo()
    assert listing(tmp_path) == ["plan"]
    assert Plan.read(tmp_path / "plan").hash == other.hash != made.hash
    made.save(tmp_path / "plan", overwrite=True)
    assert listing(tmp_path) == ["plan"]
    assert Plan.read(tmp_path / "plan").hash == made.hash


def test_an_interruption_leaves_nothing(made: Plan, tmp_path: Path, listing, monkeypatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.save(tmp_path / "plan")
    assert listing(tmp_path) == []


def test_the_command_on_a_full_disk(tiny: Path, tmp_path: Path, listing, monkeypatch) -> None:
    fail_at(monkeypatch, "fsync", 2)
    arguments = ["compile", str(tiny), "--max-context", "32", "--out", str(tmp_path / "plan")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "could not be written" in result.stderr
    assert "No space left" in result.stderr
    assert listing(tmp_path) == []


def test_what_is_no_plan_is_never_replaced(made: Plan, tmp_path: Path, listing) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    (tmp_path / "file").write_text("more of it")
    for name in ("thesis", "file"):
        for overwrite in (False, True):
            with pytest.raises(PlanError, match="exists already") as caught:
                made.save(tmp_path / name, overwrite=overwrite)
            assert "--force" in caught.value.advice
    assert listing(tmp_path) == ["file", "thesis"]
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"


def test_a_parent_that_is_a_file(made: Plan, tmp_path: Path, listing) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="could not be written"):
        made.save(tmp_path / "file" / "plan")
    assert listing(tmp_path) == ["file"]


KILLED = """\
import os, sys, time
from pathlib import Path
from metainfer.ir.plan import Plan
plan, calls, sync = Plan.read(Path(sys.argv[1])), iter(range(9)), os.fsync
def slow(descriptor):
    sync(descriptor)
    if next(calls) == 1:
        Path(sys.argv[3]).touch()
        time.sleep(60)
os.fsync = slow
plan.save(Path(sys.argv[2]), overwrite=True)
"""


def kill_while_writing(plan: Path, to: Path, mark: Path) -> None:
    """Start a process that writes a plan and kill it in the middle of its second file."""
    command = [sys.executable, "-c", KILLED, str(plan), str(to), str(mark)]
    with subprocess.Popen(command) as process:
        until = time.monotonic() + 60
        while not mark.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert mark.exists()


def test_a_kill_leaves_no_plan_and_does_not_stand_in_the_way(
    plan: Path, tiny: Path, tmp_path: Path, listing
) -> None:
    place = tmp_path / "out" / "plan"
    kill_while_writing(plan, place, tmp_path / "mark")
    assert not place.exists()
    (left,) = listing(place.parent)
    assert left.startswith(".plan.new.")
    with pytest.raises(PlanError, match="no plan at"):
        Plan.read(place)
    metainfer.compile(tiny, "cpu", out=place, **SMALL)
    assert Plan.read(place).hash == Plan.read(plan).hash
    assert listing(place.parent) == ["plan"]


def test_a_kill_while_replacing_leaves_the_old_plan(plan: Path, tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "out" / "plan"
    old = metainfer.compile(tiny, "cpu", out=place, **{**SMALL, "max_context": 16})
    kill_while_writing(plan, place, tmp_path / "mark")
    assert Plan.read(place).hash == old.hash


def test_only_what_dead_processes_left_of_the_same_folder_is_swept(
    made: Plan, tmp_path: Path, listing
) -> None:
    others = [".plan.2.new.abcdefgh", ".plan.new", ".planet.new.abcdefgh", ".plan.new.new.abcdefgh"]
    for name in (*others, ".plan.new.abcdefgh", ".plan.old.abcdefgh", ".plan.new.12345678"):
        (tmp_path / name).mkdir()
    (tmp_path / ".plan.new.abcdefgh" / "plan.json").write_text("half")
    living = os.open(tmp_path / ".plan.new.12345678", os.O_RDONLY)
    fcntl.flock(living, fcntl.LOCK_EX)  # as the process holds it that writes there
    made.save(tmp_path / "plan")
    assert listing(tmp_path) == sorted([*others, ".plan.new.12345678", "plan"])
    os.close(living)
    made.save(tmp_path / "plan", overwrite=True)
    assert listing(tmp_path) == sorted([*others, "plan"])


def test_a_plan_that_a_kill_left_aside_comes_back(made: Plan, tmp_path: Path, listing) -> None:
    """Killed between the two renames of a replacement: the old plan is hidden, not lost."""
    made.save(tmp_path / ".plan.old.abcdefgh" / "plan")
    with pytest.raises(PlanError, match="exists already"):
        made.save(tmp_path / "plan")
    assert listing(tmp_path) == ["plan"]
    assert Plan.read(tmp_path / "plan").hash == made.hash


def test_a_folder_that_cannot_be_locked_is_written(made: Plan, tmp_path: Path, monkeypatch) -> None:
    def unsupported(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / ".plan.new.abcdefgh").mkdir()
    made.save(tmp_path / "plan")
    assert Plan.read(tmp_path / "plan").hash == made.hash
    # Nobody knows whether its process lives.
    assert (tmp_path / ".plan.new.abcdefgh").exists()
