"""Compressed collectives' codes: launches make what torch's operations make."""

import numpy as np
import pytest
import torch
from triton_worker import CARDS, interpreted
from wire_runs import passes

from metainfer.backends.ranks import wire_codes
from metainfer.backends.torch.quantize import quantize
from metainfer.backends.triton.cross import faults_of, resources_of
from metainfer.hardware.load import load_machine
from metainfer.ir.dtypes import FP8_GROUP

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many sizes, a group of zeros among them, and what rounds up to the largest code."""
    rng = np.random.default_rng(count)
    x = rng.normal(size=count) * 10.0 ** rng.integers(-6, 4, count)
    x[: min(count, 128)] = 0
    return torch.from_numpy(x).to(dtype)


# A part that ends within a group, several programs a row, fewer numbers than ranks.
SIZES = [(1000, 3), (6 * 2048, 2), (2, 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "ranks"), SIZES)
def test_launches_make_the_same_bytes(count: int, ranks: int, dtype: torch.dtype) -> None:
    x = numbers(count, dtype)
    found = interpreted(passes, x, ranks, launched=True)
    for made, wanted in zip(found, passes(x, ranks, launched=False), strict=True):
        np.testing.assert_array_equal(made, wanted)


def test_what_comes_back_is_near_what_was_sent() -> None:
    x = numbers(1000, torch.float32)
    *_, out = passes(x, 3, launched=False)
    largest = np.abs(np.pad(x.numpy(), (0, 24)).reshape(-1, 128)).max(1).repeat(128)[:1000]
    assert (np.abs(out - x.numpy()) <= largest * 2.0**-4).all()


@pytest.mark.parametrize("machine", [*CARDS, "8xl20"])
@pytest.mark.parametrize("function", ["encode", "add", "decode"])
def test_they_compile_for_cards_that_are_not_here(function: str, machine: str) -> None:
    card, part = load_machine(machine).device(0), wire_codes.part_of(1 << 20, 4)
    rows, total = (torch.empty(n, wire_codes.row_bytes(part), dtype=torch.uint8) for n in (4, 1))
    x = torch.empty(1 << 20, dtype=torch.bfloat16)
    given = {"encode": {"x": x, "count": x.numel()}, "add": {"made": total},
             "decode": {"out": x, "count": x.numel()}}[function]  # fmt: skip
    launch = wire_codes.launch_of(function, rows, part, **given)
    assert faults_of(resources_of(launch, card), launch, card) == []


def joined(rows: torch.Tensor, part: int) -> torch.Tensor:
    """`wire_codes.summed` by fused multiply-adds: exact products, each sum rounded once.

    A product of e4m3 and float32 has 28 bits: float64 holds it.
    """
    codes = rows[:, :part].view(torch.float8_e4m3fn).double().view(len(rows), -1, wire_codes.GROUP)
    products = codes * rows[:, part:].contiguous().view(torch.float32).double()[..., None]
    total = products[0].float()
    for product in products[1:]:
        total = (total.double() + product).float()
    codes, scales = quantize(total, FP8_GROUP)
    return torch.cat((codes.view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()))[None]


def check_alike(found: np.ndarray, wanted: np.ndarray, part: int, ranks: int) -> int:
    """A row of a sum is another's, whether or not products and sums are joined; scales that differ.

    Joined, each of ranks - 1 sums lacks the rounding of its product, half a unit in the last place,
    and may itself round to the other neighbour, one unit. The largest of a group is no smaller than
    the sums before it but where numbers of its size cancel; its scale is rounded once more. A code
    differs only where its quotient lies within those few 2^-24 of a middle between two codes, 2^-4
    apart: one of some 10^5.
    """
    scales, wanted_scales = (
        row[0, part:].copy().view(np.float32).view(np.int32).astype(np.int64)
        for row in (found, wanted)
    )
    units = np.abs(scales - wanted_scales)
    assert units.max() <= 1.5 * (ranks - 1) + 1
    steps = np.abs(in_order(found[0, :part]) - in_order(wanted[0, :part]))
    assert steps.max() <= 1
    assert (steps > 0).mean() < 1e-4
    return int((units > 0).sum())


def in_order(codes: np.ndarray) -> np.ndarray:
    """Codes of sign and magnitude as integers in the order of their numbers."""
    wide = codes.astype(np.int32)
    return np.where(wide < 128, wide, 128 - wide)


def test_a_joined_sum_is_within_what_is_granted() -> None:
    x = numbers(1 << 18, torch.bfloat16)
    rows, total, _ = passes(x, 8, launched=False)
    part = wire_codes.part_of(x.numel(), 8)
    made = joined(torch.from_numpy(rows), part).numpy()
    assert check_alike(made, total, part, 8) > 10


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("count", "ranks"), [*SIZES, ((1 << 22) + 5, 8)])
def test_on_a_gpu(count: int, ranks: int) -> None:
    """The same codes; a sum may differ by how products and sums are joined to one operation."""
    x = numbers(count, torch.bfloat16).cuda()
    rows, total, out = passes(x, ranks, launched=True)
    wanted, sums, back = passes(x, ranks, launched=False)
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_array_equal(out, back)
    check_alike(total, sums, wire_codes.part_of(count, ranks), ranks)
