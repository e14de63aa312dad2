"""Model arguments that cannot be compiled: what is wrong, the line, what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest

HEAD = """\
import torch
from torch import nn
from metainfer.models.spec import ModelSpec

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
"""
TAIL = """
spec = ModelSpec(
    name="model", build=Model, kind="module",
    example_inputs=lambda: (torch.ones(3, 8),), dynamic=(("B",),),
)
"""
FIRST = len(HEAD.splitlines()) + 1  # line of the body's first line


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], Path]:
    def write(body: str) -> Path:
        file = tmp_path / "model.py"
        lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
        file.write_text(HEAD + lines + TAIL)
        return file

    return write


def test_without_a_spec(refused, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\n")
    found = refused("compile", file, "--out", tmp_path / "p")
    assert found.what == "the file defines no ModelSpec at its top level"
    assert str(file) in found.text
    assert "ModelSpec(" in found.text


def test_with_a_syntax_error(refused, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\ndef build(:\n    pass\n")
    found = refused("compile", file, "--out", tmp_path / "p")
    assert "no Python" in found.what
    assert f"{file}: line 2, column 11" in found.text
    assert "def build(:\n" in found.text
    assert "            ^" in found.text


def test_that_fails_when_it_is_run(refused, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\nx = torch.ones(2) @ torch.ones(3)\n")
    found = refused("compile", file, "--out", tmp_path / "p")
    assert "RuntimeError" in found.what
    assert f"{file}:2" in found.text


def test_that_fails_when_it_is_built(refused, tmp_path: Path, model) -> None:
    file = model("return self.inner(x)")
    file.write_text(file.read_text().replace("build=Model", "build=lambda: Model(1)"))
    found = refused("compile", file, "--out", tmp_path / "p")
    assert "TypeError" in found.text
    assert "model.py" in found.text


def test_that_fails_in_forward(refused, tmp_path: Path, model) -> None:
    file = model("return self.inner(x[:, :7])")
    found = refused("compile", file, "--out", tmp_path / "p")
    assert f"model.py:{FIRST}" in found.text


@pytest.mark.parametrize(
    ("line", "op"),
    [
        ("return torch.fft.fft(self.inner(x)).abs()", "_fft_r2c"),
        ("return torch.special.bessel_j0(x)", "bessel_j0"),
        ("return torch.cummax(x, -1)[0]", "cummax"),
    ],
)
def test_an_op_that_is_not_known(refused, tmp_path: Path, model, line: str, op: str) -> None:
    found = refused("compile", model(line), "--out", tmp_path / "p")
    assert "does not know" in found.what
    assert op in found.what
    assert f"model.py:{FIRST}" in found.text
    assert "add the op" in found.advice


def test_a_transposed_convolution(refused, tmp_path: Path, model) -> None:
    line = "return torch.nn.functional.conv_transpose2d(x[None, None], x[:2, :2][None, None])"
    found = refused("compile", model(line), "--out", tmp_path / "p")
    assert found.what == "a transposed convolution"
    assert f"model.py:{FIRST}" in found.text


def test_an_op_of_someone_elses_library(refused, tmp_path: Path, model) -> None:
    file = model("return torch.ops.bad_input_test.twice(x)")
    registered = (
        "@torch.library.custom_op('bad_input_test::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        "@twice.register_fake\ndef _(x):\n    return torch.empty_like(x)\n\n"
    )
    file.write_text(file.read_text().replace("class Model", registered + "class Model"))
    found = refused("compile", file, "--out", tmp_path / "p")
    assert "bad_input_test.twice" in found.what
    assert "model.py:" in found.text


@pytest.mark.parametrize(
    "body",
    [
        "return x if x.sum() > 0 else -x",
        "if bool((x > 0).any()):\n    x = x * 2\nreturn self.inner(x)",
        "y = self.inner(x)\nwhile y.norm() > 1:\n    y = y / 2\nreturn y",
        "n = int(x[0, 0].item())\nreturn x[:n]",
    ],
)
def test_control_flow_that_depends_on_data(refused, tmp_path: Path, model, body: str) -> None:
    found = refused("compile", model(body), "--out", tmp_path / "p")
    assert "depend" in found.text
    assert "data" in found.text
    at = body.splitlines()
    places = [f"model.py:{FIRST + i}" for i in range(len(at))]
    assert any(place in found.text for place in places)
    # A remedy, not only a verdict.
    assert any(word in found.advice for word in ("torch.where", "torch.cond", "fixed"))


def test_sizes_that_depend_on_data(refused, tmp_path: Path, model) -> None:
    """Field fault B45: a loop over experts that picks its tokens by nonzero."""
    body = """
scores = self.inner(x).softmax(-1)
out = torch.zeros_like(x)
for e in range(8):
    index = (scores.argmax(-1) == e).nonzero().flatten()
    if len(index) > 0:
        out = out.index_add(0, index, x.index_select(0, index))
return out
"""
    found = refused("compile", model(body), "--out", tmp_path / "p")
    assert "depend" in found.text
    assert any(f"model.py:{FIRST + i}" in found.text for i in range(7))
    assert any(word in found.advice for word in ("experts", "pad", "fixed"))


def test_grids_read_from_a_tensor(refused, tmp_path: Path, model) -> None:
    """Field fault B82: a vision encoder reads its grid by item() and makes positions of it."""
    body = """
height, width = (int(n) for n in (x[0, 0].item(), x[0, 1].item()))
positions = torch.arange(height * width, device=x.device)
return self.inner(x) + positions.sum()
"""
    found = refused("compile", model(body), "--out", tmp_path / "p")
    assert "depend" in found.text
    assert any(f"model.py:{FIRST + i}" in found.text for i in range(3))
    # Sizes are to come as sizes, or as a fixed list.
    assert "size" in found.text


def test_a_spec_of_a_kind_that_is_not_there(refused, tmp_path: Path, model) -> None:
    file = model("return self.inner(x)")
    file.write_text(file.read_text().replace('kind="module"', 'kind="modul"'))
    found = refused("compile", file, "--out", tmp_path / "p")
    assert "'modul'" in found.what
    assert "module" in found.advice


def test_an_unknown_model_type(refused, tmp_path: Path, damaged: Path) -> None:
    config = damaged / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"transformerx"'))
    found = refused("compile", damaged, "--out", tmp_path / "p")
    assert "transformerx" in found.what
    assert "llama, mistral, mixtral, qwen2, qwen2_moe, qwen3" in found.text
    assert "ModelSpec" in found.text
    assert "config.json" in found.text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": 3}', "\x00\x01", "null"])
def test_a_config_that_is_none(refused, tmp_path: Path, damaged: Path, text: str) -> None:
    (damaged / "config.json").write_text(text)
    assert "config.json" in refused("compile", damaged, "--out", tmp_path / "p").text


@pytest.mark.parametrize("name", ["smollm3", "models/none.py", "", "no/such/folder", "none.gguf"])
def test_what_does_not_exist(refused, tmp_path: Path, name: str) -> None:
    found = refused("compile", name, "--out", tmp_path / "p")
    assert "there is no" in found.what
