"""Commands of several ranks: what is refused before any is started, and a run from end to end."""

import json
import os
import subprocess
import sys
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
@pytest.mark.parametrize("verb", ["run"])
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
