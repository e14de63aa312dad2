"""The choice of experts by corrected scores: numbers interpreted and on a GPU, fit of the cards."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_samples import scalar
from triton_worker import check_compiles, check_interpreted, check_on_gpu, refused

from metainfer.backends.torch.check import make_op
from metainfer.ir.graph import Op
from metainfer.ir.types import tensor

NAME = "triton.choose_experts"
V3: dict[str, Any] = {"k": 8, "groups": 8, "chosen_groups": 4, "scaling": 2.5}
CASES: dict[str, tuple[int, int, dict[str, Any], str]] = {
    "DeepSeek-V3": (5, 256, V3, "bf16"),
    "no groups, one token": (1, 60, {"k": 4, "renormalise": False}, "f32"),
    "groups of 6 in 3": (7, 18, {"k": 5, "groups": 3, "chosen_groups": 2}, "f16"),
}


def case(name: str) -> tuple[Op, list[Any]]:
    """The op and its data: multiples of 1/8, so that scores are equal often."""
    tokens, num, attrs, dtype = CASES[name]
    rng = np.random.default_rng(3)
    types = [tensor(scalar(dtype), tokens, num), tensor(scalar("f32"), num)]
    logits = (np.round(rng.standard_normal((tokens, num)) * 8) / 8).astype(scalar(dtype).numpy)
    correction = (np.round(rng.standard_normal(num) * 8) / 8).astype(np.float32)
    return make_op("choose_experts", types, attrs), [logits, correction]


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str) -> None:
    check_interpreted(NAME, *case(name))


def test_it_fits_both_cards() -> None:
    check_compiles(NAME, case("DeepSeek-V3")[0])


def test_what_it_refuses() -> None:
    wide = make_op(
        "choose_experts", [tensor(scalar("f32"), 3, 1030), tensor(scalar("f32"), 1030)], {"k": 2}
    )
    assert "<= 1024, found 2048" in " ".join(refused(NAME, wide))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    check_on_gpu(NAME, *case(name))
