"""Codes and scales of safetensors files as one tensor: values, slices, what is missing."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scaled_checkpoints import CONFIGS, WRITERS, fp8_blocks, mxfp4
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from metainfer.ir.dtypes import BlockArray
from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint import Checkpoint, open_checkpoint

W = "model.layers.0.mlp.up_proj.weight"
FORMATS = {
    "deepseek": "f8e4m3/32x32:f32",
    "ue8m0": "f8e4m3/32x32:f8e8m0",
    "by_tensor": "f8e4m3/tensor:f32",
    "by_row": "f8e4m3/row:bf16",
    "packed": "f4e2m1/32:f8e8m0",
    "modelopt": "f4e2m1/16:f8e4m3*f32",
    "nvfp4_packed": "f4e2m1/16:f8e4m3*f32",
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def write(folder: Path, tensors: dict[str, torch.Tensor], config: object = None) -> Checkpoint:
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_checkpoint(folder)


def values(found: np.ndarray | BlockArray) -> np.ndarray:
    assert isinstance(found, BlockArray)
    return found.dequantize()


@pytest.mark.parametrize("kind", WRITERS)
def test_one_tensor_of_a_block_format(tmp_path: Path, kind: str) -> None:
    w = random(70, 96)
    made, wanted = WRITERS[kind](W, w)
    found = write(tmp_path, {**made, "norm": torch.ones(5)}, CONFIGS[kind])
    assert sorted(found.tensors) == sorted([W, "norm"])
    info = found.tensors[W]
    assert (str(info.dtype), info.shape) == (FORMATS[kind], (70, 96))
    np.testing.assert_array_equal(values(found.read(W)), wanted.numpy())
    np.testing.assert_array_equal(found.read("norm"), np.ones(5, np.float32))


@pytest.mark.parametrize("kind", WRITERS)
def test_slices(tmp_path: Path, kind: str) -> None:
    made, wanted = WRITERS[kind](W, random(70, 96))
    found = write(tmp_path, made, CONFIGS[kind])
    for dim, start, stop in ((0, 32, 64), (0, 64, 70), (1, 32, 96), (1, 64, 80), (1, 32, 32)):
        part = values(found.read_slice(W, dim, start, stop))
        np.testing.assert_array_equal(part, wanted.numpy().take(range(start, stop), axis=dim))
    if kind not in ("by_tensor", "by_row"):
        with pytest.raises(CheckpointError, match="begins inside a block of"):
            found.read_slice(W, 1, 8, 48)


def test_gpt_oss_experts_as_transformers_reads_them(tmp_path: Path) -> None:
    bytes_, exponents, wanted = mxfp4(random(3, 8, 64))
    blocks = bytes_.reshape(3, 8, 2, 16)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bias = torch.zeros(3, 8)
    found = write(
        tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": exponents, f"{name}_bias": bias}
    )
    assert sorted(found.tensors) == [name, f"{name}_bias"]
    oracle = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    np.testing.assert_array_equal(values(found.read(name)), oracle.transpose(1, 2).numpy())
    np.testing.assert_array_equal(values(found.read(name)), wanted.numpy())
    one = values(found.read_slice(name, 0, 1, 2))
    np.testing.assert_array_equal(one, wanted.numpy()[1:2])


def test_blocks_of_128_need_no_config(tmp_path: Path) -> None:
    codes, scales, wanted = fp8_blocks(random(300, 260), 128, 128)
    found = write(tmp_path, {W: codes, f"{W}_scale_inv": scales})
    assert str(found.tensors[W].dtype) == "f8e4m3/128x128:f32"
    np.testing.assert_array_equal(values(found.read(W)), wanted.numpy())


def test_stacked_matrices_with_scales_of_their_own(tmp_path: Path) -> None:
    parts = [fp8_blocks(random(40, 64, seed=i), 40, 64) for i in range(3)]
    codes, scales, wanted = (torch.stack(t) for t in zip(*parts, strict=True))
    found = write(tmp_path, {"experts.up": codes, "experts.up_scale": scales.reshape(3)})
    assert str(found.tensors["experts.up"].dtype) == "f8e4m3/tensor:f32"
    np.testing.assert_array_equal(values(found.read("experts.up")), wanted.numpy())


def test_plain_fp8_numbers_have_no_scales(tmp_path: Path) -> None:
    codes = random(4, 8).to(torch.float8_e4m3fn)
    found = write(tmp_path, {"a": codes})
    assert str(found.tensors["a"].dtype) == "f8e4m3"


# --- bad input -----------------------------------------------------------------------------------


def made(kind: str) -> dict[str, torch.Tensor]:
    return dict(WRITERS[kind](W, random(70, 96))[0])


@pytest.mark.parametrize("kind", ["deepseek", "by_tensor", "by_row", "packed"])
def test_a_missing_scale_is_named(tmp_path: Path, kind: str) -> None:
    tensors = made(kind)
    scale = next(n for n in tensors if n.startswith(f"{W}_scale"))
    del tensors[scale]
    with pytest.raises(CheckpointError, match=r"scales .* are missing") as refused:
        write(tmp_path, tensors, CONFIGS[kind])
    assert scale in refused.value.render()
    assert "model.safetensors" in refused.value.origin


def test_one_missing_scale_among_others_is_named_without_config(tmp_path: Path) -> None:
    other = W.replace("up", "down")
    tensors = {**made("deepseek"), other: random(4, 4).to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match=f"{other}_scale_inv' are missing"):
        write(tmp_path, tensors)


def test_missing_gpt_oss_scales(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'x_scales' are missing"):
        write(tmp_path, {"x_blocks": torch.zeros(2, 3, 16, dtype=torch.uint8)})


NVFP4 = {
    "a.weight": torch.zeros(4, 16, dtype=torch.uint8),
    "a.weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({W: made("deepseek")[W], f"{W}_scale_inv": torch.ones(5, 7)}, "do not fit the codes"),
        ({W: made("by_row")[W], f"{W}_scale": torch.ones(70, 1, dtype=torch.int32)}, "wanted fl"),
        ({**made("packed"), f"{W}_scale": torch.ones(70, 2, dtype=torch.uint8)}, "do not fit the"),
        ({**made("packed"), f"{W}_scale": torch.ones(70, 3)}, "wanted 8-bit exponents"),
        ({**made("packed"), W: torch.ones(3)}, "and its codes .* too"),
        (NVFP4, r"scales 'a.weight_scale_2' are missing"),
        ({**NVFP4, "a.weight_scale_2": torch.ones(4)}, r"f32\[4\] do not fit the codes 'a.weight'"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], what: str
) -> None:
    with pytest.raises(CheckpointError, match=what):
        write(tmp_path, tensors)


@pytest.mark.parametrize("block", [[0, 128], "128", [1.5, 2]])
def test_a_block_that_is_none(tmp_path: Path, block: object) -> None:
    with pytest.raises(CheckpointError, match="weight_block_size is"):
        write(tmp_path, made("deepseek"), {"quant_method": "fp8", "weight_block_size": block})


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read the config"):
        write(tmp_path, made("deepseek"))
