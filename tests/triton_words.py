"""Weights of codes widened by Triton's kernel, interpreted. Holds no tests."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from metainfer.backends.torch.tensors import to_numpy
from metainfer.backends.triton import widened, words
from metainfer.backends.triton.interpreter import prepare
from metainfer.backends.triton.templates import order
from metainfer.ir.dtypes import BF16, BlockArray


def widen(weight: BlockArray) -> np.ndarray[Any, Any]:
    """Numbers of bf16 that a matrix's codes become."""
    prepare("cpu")
    packed = words.pack(weight)
    out = torch.full(packed.shape, float("nan"), dtype=torch.bfloat16)
    middle = packed.shape[0] // 2
    for start, stop in ((0, middle), (middle, packed.shape[0])):
        if stop > start:
            widened.widening(packed, out[start:stop], start, stop).run()
    return to_numpy(out, BF16)


def by_fours(function: Callable[..., Any], *args: Any) -> Any:
    """What a function gives where products are told their numbers by fours (`order.fours`)."""
    with patch.object(order, "INTERPRETED_FOURS", True):
        return function(*args)
