"""Commands of several ranks: what is refused before any is started, and a run from end to end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hf_checkpoints import make_checkpoint

import metainfer

SMALL: dict[str, Any] = {"max_tokens": 32, "max_sequences": 2, "max_context": 64}
EXACT: dict[str, Any] = {"activations": "f32", "weights": "f32", "exact": True}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    model = make_checkpoint("llama", folder / "model", tokenizer=True, num_hidden_layers=2)
    metainfer.compile(str(model), "2xcpu", out=folder / "tp2", tp=2, **EXACT, **SMALL)
    metainfer.compile(str(model), "cpu", out=folder / "one", **EXACT, **SMALL)
    return folder


def command(
    *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "metainfer", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **(env or {})},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "more", "said"),
    [
        ("tp2", [], ["is for 2 ranks (tp=2), this is one process", "add --nproc 2"]),
        ("tp2", ["--nproc", 3], ["is for 2 ranks (tp=2), --nproc asks for 3", "give --nproc 2"]),
        ("one", ["--nproc", 2], ["is for 1 ranks (one rank), --nproc asks for 2"]),
    ],
)
@pytest.mark.parametrize("verb", ["run", "bench"])
def test_another_number_of_ranks_is_refused_at_once(
    plan: Path, cli: Any, verb: str, folder: str, more: list[object], said: list[str]
) -> None:
    prompt = ["hello"] if verb == "run" else []
    found = cli(verb, plan / folder, *prompt, *more)
    assert found.code == 2
    assert found.out == ""
    for words in said:
        assert words in found.err


def test_two_ranks_answer_what_one_answers(plan: Path, cli: Any) -> None:
    asked = ("--max-new-tokens", 8, "--json")
    wanted = json.loads(cli("run", plan / "one", "hello", *asked).out)
    found = command("run", plan / "tp2", "hello", *asked, "--nproc", 2)
    assert found.returncode == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer["token_ids"] == wanted["token_ids"]
    assert answer["plan_hash"] != wanted["plan_hash"]


# --- ranks that fail ---------------------------------------------------------------------------


class Running:
    """`bench` on two ranks, which goes on until something ends it."""

    def __init__(self, plan: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "metainfer", "bench", str(plan), "--nproc", "2", "--repeat",
             "1000000", "--prompt-tokens", "8", "--new-tokens", "4"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.ranks = self._found()

    def _found(self) -> dict[str, int]:
        """Process of each rank, once all of them work."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            ranks = {rank: pid for pid in self._children() if (rank := self._rank(pid))}
            if len(ranks) == 2 and all(self._has_sockets(pid) for pid in ranks.values()):
                return ranks
            time.sleep(0.2)
        pytest.fail(f"no ranks came up: {self.process.communicate(timeout=10)}")

    def _children(self) -> list[int]:
        pid = self.process.pid
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for one in lists for child in one.read_text().split()]

    def _rank(self, pid: int) -> str:
        environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return next((e.removeprefix("RANK=") for e in environ if e.startswith("RANK=")), "")

    def _has_sockets(self, pid: int) -> bool:
        """Whether it has begun to meet others."""
        names = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())
        return any(name.startswith("socket:") for name in names)

    def outcome(self, limit_s: float) -> tuple[int, str]:
        """Exit code and errors; everything must have ended by then."""
        _, errors = self.process.communicate(timeout=limit_s)
        assert not any(Path(f"/proc/{pid}").exists() for pid in self.ranks.values())
        return self.process.returncode, errors


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("killed", [pytest.param("0", marks=pytest.mark.thorough), "1"])
def test_a_killed_rank_ends_the_command(plan: Path, killed: str) -> None:
    running = Running(plan / "tp2")
    os.kill(running.ranks[killed], signal.SIGKILL)
    code, errors = running.outcome(10)
    assert code == 1
    assert errors.startswith(f"error: rank {killed} was ended by signal 9 (SIGKILL)")


# Rank 1 takes no orders, and does not end when it is told to.
_DEAF = """\
import os
if os.environ.get("RANK") == "1":
    import signal, time
    from metainfer.runtime.ranked import RankedModel
    def follow(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    RankedModel.follow = follow
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_a_rank_that_hangs_is_an_error_within_its_limit(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_DEAF)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    asked = ("--nproc", 2, "--time-limit", 2, "--prompt-tokens", 8, "--new-tokens", 4)
    found = command("bench", plan / "tp2", *asked, env={"PYTHONPATH": path})
    assert found.returncode == 1
    assert found.stderr.startswith("error: rank 0: the order of a step with 1 did not end within 2")
    assert "--time-limit" in found.stderr
