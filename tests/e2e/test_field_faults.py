"""Field faults B42 and B47: fused groups at odd sizes, and memory that is what was planned."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_checkpoints import make_case
from lm_steps import Sequences, load_plan
from torch import Tensor, nn

import metainfer
from metainfer.runtime.load import LoadedModel

# --- B42 ----------------------------------------------------------------------------------------


class EmbedProjectNorm(nn.Module):
    """Embeddings, a linear, an RMS norm with a float32 weight, and the residual kept beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.project = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        y = x + F.silu(self.project(x))
        wide = y.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y, (normed * self.scale.float()).to(y.dtype) + x


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("width", [192, 33, 1])
@torch.no_grad()
def test_buffers_are_not_shared_across_types(activations: str, width: int) -> None:
    """bf16 values beside float32 ones, at batch 96 and length 8, then at other sizes."""
    torch.manual_seed(0)
    module = EmbedProjectNorm(width)
    plan = metainfer.compile(
        module, "cpu", activations=activations, example_inputs=(torch.zeros(3, 5).long(),),
        dynamic=(("B", "S"),), bounds={"B": (1, 96), "S": (1, 16)},
    )  # fmt: skip
    if activations == "bf16":
        # The caller's module is as it was; converted, it is the reference, and has the weights.
        module = module.to(torch.bfloat16)
    model = load_plan(plan, weights=module.state_dict())
    bound = 1e-4 if activations == "f32" else 0.06  # a few units in the last place of bf16
    for batch, length in ((96, 8), (1, 1), (7, 16), (96, 8)):
        ids = torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(batch))
        for found, wanted in zip(model(ids), module(ids), strict=True):
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, atol=bound, rtol=1e-2)


# --- B47 ----------------------------------------------------------------------------------------


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor that an object holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, np.ndarray):
        yield torch.from_numpy(value)
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def bytes_of(value: Any) -> int:
    """Bytes of all tensors, each storage once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(value)
    }
    return sum(storages.values())


def check_memory(model: LoadedModel) -> None:
    capacity = model.plan.meta["capacity"]
    terms = {t["name"]: t["bytes"] for t in capacity["terms"]}
    assert sum(terms.values()) == capacity["total_bytes"] <= capacity["budget_bytes"]
    storage = model._storage
    weights = bytes_of([storage.weights_of(phase) for phase in model.plan.phases])
    assert weights == pytest.approx(terms["weights"], rel=0.03)
    assert bytes_of(storage.states) == terms["kv pages"]
    assert storage.arena.nbytes == pytest.approx(terms["activations"] + terms["scratch"], abs=4096)
    assert bytes_of(storage._tables) == terms.get("rope tables", 0)


def run_full_steps(model: LoadedModel) -> None:
    """A prefill of the largest chunk, then a decode of all sequences."""
    sequences = Sequences(model)
    chunk = min(model.max_tokens, model.max_context - 1)
    sequences.run("prefill", {0: [1] * chunk})
    others = range(1, model.max_sequences)
    sequences.run("prefill", {i: [2] for i in others})
    sequences.run("decode", {i: [3] for i in range(model.max_sequences)})


def test_smollm2_takes_the_memory_that_its_plan_states() -> None:
    model = load_plan(metainfer.compile("smollm2", "cpu", max_context=512))
    run_full_steps(model)
    check_memory(model)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"memory_fraction": 0.98},
        {"page_size": 64},
        pytest.param({"skip_passes": ("fuse",)}, marks=pytest.mark.thorough),
    ],
)
def test_tiny_models_take_it_too(tmp_path: Path, options: dict[str, Any]) -> None:
    model = load_plan(metainfer.compile(make_case("llama_biases", tmp_path), "cpu", **options))
    run_full_steps(model)
    check_memory(model)
