"""Published shapes with random weights, for benchmarks of whole models."""

import dataclasses
from typing import Any

import numpy as np
import torch

from metainfer.compiler.check import checkpoint_types
from metainfer.ir.dtypes import Scalar
from metainfer.ir.plan import Plan
from metainfer.ir.rope import Rope
from metainfer.ir.types import TensorType
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.qwen2_moe import config_a2_7b
from metainfer.models.qwen3_moe import config_30b
from metainfer.models.spec import ModelSpec
from metainfer.runtime.parts import Region, region_shape

LLAMA_8B = DecoderConfig(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256,
    max_positions=8192, eps=1e-5, rope=Rope(theta=5e5),
)  # fmt: skip
LLAMA_70B = dataclasses.replace(LLAMA_8B, hidden=8192, layers=80, heads=64, intermediate=28672)
CONFIGS = {
    "llama:8b": LLAMA_8B, "llama:70b": LLAMA_70B, "qwen3_moe:30b": config_30b,
    "qwen2_moe:a2.7b": config_a2_7b,
}  # fmt: skip
_BLOCK = 1 << 24  # numbers drawn; larger tensors repeat them


def spec_of(name: str, layers: int) -> ModelSpec:
    """A model of a published shape.

    Args:
        name: of `CONFIGS`.
        layers: how many of its layers; 0 for all.
    """
    config = CONFIGS[name]
    if layers:
        config = dataclasses.replace(config, layers=layers)
    return decoder_spec(name.replace(":", "_").replace(".", "_"), config, dtype="bf16")


class RandomWeights:
    """Normal numbers of the size that a trained model's have, by the fan-in of each weight."""

    def __init__(self, plan: Plan) -> None:
        self._types: dict[str, TensorType] = {}
        for phase in plan.phases:
            for stage in range(plan.layout.pp):
                self._types.update(checkpoint_types(plan.module(phase, stage)))
        self._normal = np.random.default_rng(0).standard_normal(_BLOCK).astype(np.float32)
        self._blocks: dict[tuple[int, str], np.ndarray] = {}

    def __call__(self, name: str) -> np.ndarray:
        """A whole tensor."""
        return self._drawn(name, self.find(name)[0])

    def find(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and element type of a tensor."""
        type_ = self._types[name]
        assert isinstance(type_.dtype, Scalar)
        return tuple(n.static for n in type_.shape), str(type_.dtype.numpy)

    def region(self, name: str, region: Region) -> np.ndarray:
        """A region of a tensor; no more is drawn."""
        return self._drawn(name, region_shape(self.find(name)[0], region))

    def _drawn(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        whole, dtype = self.find(name)
        if len(whole) == 1:
            return np.ones(shape, dtype)
        key = (whole[-1], dtype)
        if key not in self._blocks:
            self._blocks[key] = (self._normal / np.sqrt(whole[-1])).astype(dtype)
        return np.resize(self._blocks[key], shape)


def step_of(batch: int, new: int, context: int, page: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Each of ``batch`` sequences gets ``new`` tokens and then has ``context``."""
    most = -(-context // page)
    pages = 1 + np.arange(batch * most).reshape(batch, most)
    at = np.arange(context - new, context)
    slots = np.concatenate([pages[b, at // page] * page + at % page for b in range(batch)])
    starts = np.arange(batch + 1) * new
    fields = {
        "positions": np.tile(at, batch), "slots": slots, "starts": starts,
        "lengths": np.full(batch, context), "pages": pages, "sample_rows": starts[1:] - 1,
        "num_valid": np.array([batch * new, batch]),
    }  # fmt: skip
    tokens = np.random.default_rng(1).integers(0, 1000, batch * new)
    return tokens.astype(np.int32), {k: v.astype(np.int32) for k, v in fields.items()}


def fill_random(field: torch.Tensor) -> None:
    """Random keys and values, or codes of them; scales near those that such numbers have."""
    if field.dtype == torch.float8_e8m0fnu:
        field.view(torch.uint8).fill_(120)
    elif field.dtype == torch.float8_e4m3fn:
        for page in field:
            page.copy_((torch.randn(page.shape, device=page.device) * 100).to(field.dtype))
    else:
        field.normal_()
