import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hf_checkpoints import make_checkpoint
from typer.testing import CliRunner

from metainfer.cli.app import app

SMALL = ("--max-tokens", "32", "--max-sequences", "2", "--max-context", "96")
MODULE = """\
import torch
from torch import nn
from metainfer.models.spec import ModelSpec

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x)))

spec = ModelSpec(
    name="mlp",
    build=Mlp,
    kind="module",
    checkpoint="mlp.safetensors",
    example_inputs=lambda: (torch.linspace(-1, 1, 3 * 16).reshape(3, 16),),
    dynamic=(("B",),),
    bounds={"B": (1, 8)},
)
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture(scope="session")
def cli() -> Cli:
    def call(*arguments: object) -> Outcome:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers with a byte-level tokenizer."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "tiny", tokenizer=True)


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="session")
def plan(cli: Cli, tiny: Path, plans: Path) -> Path:
    """The tiny model compiled for this machine."""
    assert cli("compile", tiny, *SMALL, "--out", plans / "plain").code == 0
    return plans / "plain"


@pytest.fixture(scope="session")
def module_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model.py of kind module with its checkpoint beside it."""
    from safetensors.numpy import save_file

    file = tmp_path_factory.mktemp("module") / "mlp.py"
    file.write_text(MODULE)
    rng = np.random.default_rng(0)
    shapes = {
        "first.weight": (32, 16),
        "first.bias": (32,),
        "second.weight": (4, 32),
        "second.bias": (4,),
    }
    tensors = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    save_file(tensors, os.fspath(file.with_name("mlp.safetensors")))
    return file


@pytest.fixture(scope="session")
def module_plan(cli: Cli, module_file: Path, plans: Path) -> Path:
    assert cli("compile", module_file, "--out", plans / "mlp").code == 0
    return plans / "mlp"
