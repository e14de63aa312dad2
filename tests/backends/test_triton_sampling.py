"""Tokens chosen by the GPU's kernel: those that the host chooses, from the same noise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton_worker import CARDS, interpreted

from metainfer.backends.triton.cross import faults_of, resources_of
from metainfer.backends.triton.sampling import Draw, Filters, filters_of, launches, scratch_of
from metainfer.ir.errors import MetainferError
from metainfer.runtime.device_sampling import DeviceSampler, draw_of
from metainfer.runtime.sampling import SamplingParams, sample

INF = float("inf")
NOTHING = Filters(False, False, False, False)
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
    return DeviceSampler(logits.device).start(logits, draws, names).ids().tolist()


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


# One block of a row, and several.
@pytest.mark.parametrize(("width", "dtype"), [(45, torch.float32), (9000, torch.bfloat16)])
def test_the_same_tokens_as_on_the_host(width: int, dtype: torch.dtype) -> None:
    logits = rows(width, dtype)
    assert interpreted(by_device, logits) == by_host(logits)


def alone_and_together(logits: torch.Tensor) -> tuple[list[int], list[int]]:
    """Tokens of rows by one sampler: each by itself, then all at once."""
    sampler, draws = DeviceSampler(logits.device), []
    for place, params in enumerate(PARAMS):
        own = params_of(params, place)
        draws.append(draw_of(own, own.noise()))
    alone = [
        sampler.start(logits[i : i + 1], [draw]).ids().tolist()[0] for i, draw in enumerate(draws)
    ]
    return alone, sampler.start(logits, draws).ids().tolist()


def test_a_rows_token_does_not_depend_on_the_others() -> None:
    alone, together = interpreted(alone_and_together, rows(45, torch.bfloat16))
    assert alone == together


def test_launches_are_those_that_some_row_needs() -> None:
    plain, limited = Draw(1.0), Draw(1.0, top_k=5)
    assert filters_of([Draw(), plain, Draw(0.0, 5, 0.5, 0.1)], 45) == NOTHING
    assert filters_of([plain, Draw(1.0, top_k=45)], 45) == NOTHING
    assert filters_of([limited], 45) == Filters(True, False, False, False)
    assert filters_of([replace(limited, top_p=0.5)], 45) == Filters(True, True, False, False)
    assert filters_of([Draw(1.0, top_p=0.5)], 45) == Filters(False, True, True, False)
    assert filters_of([Draw(1.0, min_p=0.5)], 45) == Filters(False, False, False, True)
    logits = torch.empty(2, 45, device="meta")
    given, ids = (torch.empty(n, dtype=torch.int32, device="meta") for n in (14, 2))
    made = launches(logits, given, ids, scratch_of(2, 45, logits.device), NOTHING)
    assert [launch.function.__name__ for launch in made] == ["race"]


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
    scratch = scratch_of(8, 128256, empty.device)
    for launch in launches(logits, draws, empty, scratch, Filters()):
        assert not faults_of(resources_of(launch, CARDS[card]), launch, CARDS[card])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [45, 4096, 151936])
def test_the_same_tokens_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    logits = rows(width, dtype)
    assert by_device(logits.cuda()) == by_host(logits)
