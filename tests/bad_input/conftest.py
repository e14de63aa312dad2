"""A tiny model, its plan, and copies of the plan to damage."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hf_checkpoints import make_checkpoint
from plan_forger import Forger
from refusals import Refusal, refuse

import metainfer

SMALL: dict[str, Any] = {"max_tokens": 16, "max_sequences": 2, "max_context": 32}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    return make_checkpoint("llama", path, tokenizer=True, num_hidden_layers=1)


@pytest.fixture(scope="session")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> metainfer.Plan:
    return metainfer.compile(tiny, "cpu", **SMALL)


@pytest.fixture(scope="session")
def plan(made: metainfer.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "tiny"
    made.save(path)
    return path


@pytest.fixture
def forged(plan: Path, tmp_path: Path) -> Forger:
    shutil.copytree(plan, tmp_path / "forged")
    return Forger(tmp_path / "forged")


@pytest.fixture
def listing() -> Callable[[Path], list[str]]:
    """Every name in a folder, hidden ones too."""
    return lambda folder: sorted(p.name for p in folder.iterdir())


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., Refusal]:
    """Run a verb that must be refused and leave the test's folder as it was."""
    return partial(refuse, tmp_path)


@pytest.fixture
def damaged(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return shutil.copytree(tiny, tmp_path / "damaged")
