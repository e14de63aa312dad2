"""Stacked tensors: one name for the tensors of all experts, read part by part."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from metainfer.ir.dtypes import Block, BlockArray, parse_dtype, quantize
from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint import (
    Checkpoint,
    TensorSource,
    check_tensors,
    expand,
    open_checkpoint,
)
from metainfer.runtime.checkpoint.stacked import stack
from metainfer.runtime.weights import CheckpointProvider, state_dict_provider

NAME = "layers.3.experts.*.up.weight"


def tensors(count: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    experts = {
        NAME.replace("*", str(n)): torch.randn(4, 6, generator=generator) for n in range(count)
    }
    return {**experts, "layers.3.experts.0.down.weight": torch.ones(6, 4), "norm": torch.ones(6)}


def opened(folder: Path, held: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(held, folder / "m.safetensors")
    return open_checkpoint(folder / "m.safetensors")


@dataclass
class Watched:
    """A checkpoint that notes which tensors are read."""

    inner: Checkpoint
    read_names: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> object:
        return self.inner.tensors

    def read(self, name: str) -> object:
        self.read_names.append(name)
        return self.inner.read(name)


def test_all_experts_are_one_tensor(tmp_path: Path) -> None:
    held = tensors()
    source = TensorSource(opened(tmp_path, held))
    # Ten comes after nine, not after one.
    wanted = np.stack([held[NAME.replace("*", str(n))].numpy() for n in range(12)])
    assert source.find(NAME) == ((12, 4, 6), parse_dtype("f32"))
    np.testing.assert_array_equal(source.read(NAME), wanted)
    np.testing.assert_array_equal(source.read_slice(NAME, 2, 1, 4), wanted[:, :, 1:4])
    np.testing.assert_array_equal(source.read_slice(NAME, -2, 1, 4), wanted[:, 1:4])
    assert source.find("norm") == ((6,), parse_dtype("f32"))
    assert source.find("layers.3.experts.*.gate.weight") is None


def test_a_slice_of_experts_reads_only_their_tensors(tmp_path: Path) -> None:
    held = tensors()
    watched = Watched(opened(tmp_path, held))
    provider = CheckpointProvider(TensorSource(watched), {"mine": NAME})  # type: ignore[arg-type]
    part = provider.region("mine", {0: (4, 7)})
    assert watched.read_names == [NAME.replace("*", str(n)) for n in (4, 5, 6)]
    np.testing.assert_array_equal(part, provider("mine")[4:7])  # type: ignore[index]


def test_a_constant_is_cut_like_a_tensor(tmp_path: Path) -> None:
    table = np.arange(12.0).reshape(3, 4)
    provider = CheckpointProvider(TensorSource(opened(tmp_path, tensors())), {}, {"table": table})
    np.testing.assert_array_equal(provider.region("table", {1: (1, 3)}), table[:, 1:3])
    np.testing.assert_array_equal(provider.region("norm", {0: (1, 3)}), np.ones(2))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    held = tensors()
    del held[NAME.replace("*", "5")]
    checkpoint = opened(tmp_path, held)
    source = TensorSource(checkpoint)
    for ask in (source.find, source.read, lambda n: source.read_slice(n, 0, 0, 2)):
        with pytest.raises(CheckpointError, match=r"layers\.3\.experts\.5\.up\.weight is missing"):
            ask(NAME)
    with pytest.raises(CheckpointError, match=r"there is no tensor 'layers\.3\.experts\.0\.gate"):
        source.read("layers.3.experts.*.gate.weight")
    wanted = {NAME: (12, 4, 6), "layers.3.experts.*.down.weight": (1, 6, 4), "norm": (6,)}
    with pytest.raises(CheckpointError, match="1 missing, 0 extra") as error:
        check_tensors(checkpoint, expand(wanted))
    assert "missing: layers.3.experts.5.up.weight [4, 6]" in str(error.value)


def test_unlike_experts_are_refused(tmp_path: Path) -> None:
    held = tensors()
    held[NAME.replace("*", "7")] = torch.ones(4, 6, dtype=torch.bfloat16)
    source = TensorSource(opened(tmp_path, held))
    with pytest.raises(CheckpointError, match=r"7\.up\.weight is bf16\[4, 6\], .*0\.up.* f32"):
        source.find(NAME)


def test_a_slice_outside_is_refused(tmp_path: Path) -> None:
    source = TensorSource(opened(tmp_path, tensors()))
    with pytest.raises(CheckpointError, match="slice 8:13 of the 12 tensors"):
        source.read_slice(NAME, 0, 8, 13)
    with pytest.raises(CheckpointError, match="stands for several tensors, but has no dims"):
        expand({NAME: ()})


@pytest.mark.parametrize("format", ["i8/32:f16", "u4/32:f16+f16", "f8e4m3/4x4:f32"])
def test_block_formats_are_stacked_code_by_code(format: str) -> None:
    block = parse_dtype(format)
    assert isinstance(block, Block)
    values = np.random.default_rng(0).standard_normal((3, 8, 64)).astype(np.float32)
    made = stack([quantize(v, block) for v in values])
    assert isinstance(made, BlockArray)
    whole = quantize(values, block)
    np.testing.assert_array_equal(made.codes, whole.codes)
    np.testing.assert_array_equal(made.dequantize(), whole.dequantize())


def test_a_state_dict_holds_experts_together_or_apart() -> None:
    held = tensors(3)
    together = {NAME: torch.stack([held[NAME.replace("*", str(n))] for n in range(3)])}
    whole, apart = (state_dict_provider(t, {})(NAME) for t in (together, held))
    np.testing.assert_array_equal(whole, apart)
