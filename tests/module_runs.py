"""Modules compiled as functions, and held against themselves."""

from typing import Any

import torch
from lm_steps import EXACT, load_plan
from torch import Tensor, nn

import metainfer
from metainfer.runtime.load import LoadedModel

BOUND = 1e-4


def seeded(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Normal numbers, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compiled(
    module: nn.Module, inputs: tuple[Tensor, ...], dynamic: Any = (), **options: Any
) -> LoadedModel:
    """The module's plan for a CPU, with the module's own weights."""
    options = {**EXACT, **options}
    plan = metainfer.compile(module, "cpu", example_inputs=inputs, dynamic=dynamic, **options)
    return load_plan(plan, weights=module.state_dict())


@torch.no_grad()
def check(model: LoadedModel, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """The plan's results are the module's."""
    found, wanted = model(*inputs), module(*inputs)
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
    for a, b in pairs:
        assert isinstance(a, Tensor)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=BOUND, rtol=1e-5, equal_nan=True)
