"""A tiny model, its plan, and a hand that damages plans so well that their hashes agree."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hf_checkpoints import make_checkpoint

import metainfer

SMALL: dict[str, Any] = {"max_tokens": 16, "max_sequences": 2, "max_context": 32}


@dataclass(frozen=True)
class Forger:
    """A copy of a plan that can be changed and sealed again."""

    path: Path

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.path / "plan.json").read_text())

    def seal(self, meta: dict[str, Any] | None = None) -> Path:
        """Write plan.json with the hashes of what lies in the folder now."""
        meta = meta or self.meta
        meta.pop("hash", None)
        files = {
            name: hashlib.sha256((self.path / name).read_bytes()).hexdigest()
            for name in sorted(p.name for p in self.path.iterdir() if p.name != "plan.json")
        }
        meta.pop("files", None)
        kept = {k: v for k, v in meta.items() if k not in ("timings", "created")}
        text = json.dumps([kept, files], sort_keys=True)
        sealed = {**meta, "files": files, "hash": hashlib.sha256(text.encode()).hexdigest()}
        (self.path / "plan.json").write_text(json.dumps(sealed))
        return self.path

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.path / name).read_text()
        assert old in text
        (self.path / name).write_text(text.replace(old, new, 1))


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
