"""A checkpoint with an expert missing: the error of compile names it."""

from pathlib import Path

import pytest
from hf_checkpoints import make_case
from safetensors.torch import load_file, save_file

import metainfer
from metainfer.ir.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.2.down_proj.weight"),
        ("mixtral_window", "model.layers.2.block_sparse_moe.experts.3.w1.weight"),
    ],
)
def test_compile_names_the_missing_expert(tmp_path: Path, name: str, tensor: str) -> None:
    path = make_case(name, tmp_path)
    held = load_file(path / "model.safetensors")
    del held[tensor]
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="1 missing, 0 extra, 0 misshapen") as error:
        metainfer.compile(path, "cpu")
    assert f"missing: {tensor}" in str(error.value)
