"""Logits read back from a device."""

import numpy as np
import pytest
import torch

from metainfer.runtime.readback import Readback

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_are_read_side_by_side(device: str, dtype: torch.dtype) -> None:
    readback = Readback(torch.device(device))
    rows = [torch.randn(count, 37, device=device, dtype=dtype) for count in (1, 5, 3)]
    # A larger step after a smaller one, and rows with gaps between them.
    rows.append(torch.randn(9, 80, device=device, dtype=dtype)[:, ::2])
    for number in (0, 1):
        found = [readback.numbers(one, n) for n, one in enumerate(rows[number:])]
        for got, one in zip(found, rows[number:], strict=True):
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, one.float().cpu().numpy())
