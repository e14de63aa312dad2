"""Tokens chosen by the GPU's kernel: those that the host chooses, from the same noise."""

import numpy as np
import pytest
import torch
from triton_worker import CARDS, interpreted

from metainfer.backends.triton.cross import resources_of
from metainfer.backends.triton.sampling import launches
from metainfer.ir.errors import MetainferError
from metainfer.runtime.device_sampling import DeviceSampler, draw_of
from metainfer.runtime.sampling import SamplingParams, sample

INF = float("inf")
# Filters alone and together, and their ends: all, one, none of them does anything.
PARAMS = (
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.01, seed=11),
    SamplingParams(0.7, top_k=5),
    SamplingParams(1.0, top_k=1),
    SamplingParams(1.0, top_k=100),
    SamplingParams(1.3, top_p=0.6),
    SamplingParams(1.0, top_p=1e-9),
    SamplingParams(2.0, min_p=0.3),
    SamplingParams(1.0, min_p=1.0),
    SamplingParams(1.0, top_p=0.5, top_k=20, min_p=0.02),
)


def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits with many ties, one hot row, one of equal numbers, signs of zero, and -inf."""
    made = np.round(np.random.default_rng(0).standard_normal((len(PARAMS), width)) * 2, 1)
    made[2] = 0.0
    made[2, 3] = 30.0
    made[4] = 1.5
    made[6, ::2] = -INF
    made[7] = np.where(np.arange(width) % 2 == 0, -0.0, 0.0)
    return torch.from_numpy(made).to(dtype)


def by_device(logits: torch.Tensor, names: tuple[str, ...] = ()) -> list[int]:
    """What the kernel chooses, for draws that begin at different places."""
    draws = []
    for place, params in enumerate(PARAMS[: len(logits)]):
        noise = params_of(params, place).noise()
        noise.position = place
        draws.append(draw_of(params, noise))
    return DeviceSampler(logits.device).ids(logits, draws, names).tolist()


def params_of(params: SamplingParams, place: int) -> SamplingParams:
    """Every row has a seed of its own."""
    return SamplingParams(
        params.temperature, params.top_p, params.top_k, params.min_p, seed=1000 + place
    )


def by_host(logits: torch.Tensor) -> list[int]:
    params = [params_of(p, place) for place, p in enumerate(PARAMS)]
    noises = [p.noise() for p in params]
    for place, noise in enumerate(noises):
        noise.position = place
    return sample(logits.float(), params, noises).tolist()


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)]
)
def test_the_same_tokens_as_on_the_host(dtype: torch.dtype) -> None:
    logits = rows(45, dtype)
    assert interpreted(by_device, logits) == by_host(logits)


@pytest.mark.parametrize("bad", [[float("nan"), 0.0], [0.0, INF], [-INF, -INF]])
def test_rows_without_a_largest_number_name_their_sequence(bad: list[float]) -> None:
    logits = torch.tensor([[0.0, 1.0], bad])
    with pytest.raises(MetainferError, match=r"row 1 \(request 9\) are not finite"):
        interpreted(by_device, logits, ("request 4", "request 9"))


@pytest.mark.parametrize(
    ("card", "dtype"),
    [pytest.param("1xh200", torch.bfloat16, marks=pytest.mark.thorough), ("8xpcie", torch.float32)],
)
def test_it_fits_cards_that_are_not_here(card: str, dtype: torch.dtype) -> None:
    empty = torch.empty(8, dtype=torch.int32, device="meta")
    draws = torch.empty(56, dtype=torch.int32, device="meta")
    logits = torch.empty(8, 128256, dtype=dtype, device="meta")
    (launch,) = launches(logits, draws, empty)
    assert resources_of(launch, CARDS[card]).spilled_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [45, 4096, 151936])
def test_the_same_tokens_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    logits = rows(width, dtype)
    assert by_device(logits.cuda()) == by_host(logits)
