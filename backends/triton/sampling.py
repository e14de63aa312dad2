"""Sampling on the device that the logits lie on: only token ids travel to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from metainfer.backends.triton.attention import power_above
from metainfer.backends.triton.launch import Launch

_BLOCK = 4096
_WARPS = 8
# What a row's token is where its logits have no finite largest one.
FAULTS = {-1: float("nan"), -2: float("inf"), -3: float("-inf")}


@dataclass(frozen=True)
class Draw:
    """How a row's token is drawn (`runtime.sampling`).

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep that many most likely tokens, 0 all.
        top_p: keep the fewest most likely ones whose probabilities reach this.
        min_p: keep those at least this fraction as likely as the most likely one.
        key: 64 bits of the row's noise.
        position: number of the draw.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: int = 0
    position: int = 0


def packed(draws: Sequence[Draw]) -> np.ndarray:
    """Draws as the kernel reads them: f32 [R, 3] as bits, then words [R, 4]; i32 [R * 7]."""
    numbers = np.array([[d.temperature, d.top_p, d.min_p] for d in draws], np.float32)
    words = np.array(
        [[d.top_k, d.position, d.key & 0xFFFFFFFF, d.key >> 32] for d in draws], np.uint32
    )
    return np.concatenate([numbers.view(np.int32).ravel(), words.view(np.int32).ravel()])


def launches(logits: torch.Tensor, draws: torch.Tensor, ids: torch.Tensor) -> tuple[Launch, ...]:
    """Choose a token for each row, or say what is wrong with its logits (`FAULTS`).

    Shapes: logits [R, V], draws i32 [R * 7] as `packed`, ids i32 [R].
    """
    # Imported where it is launched: templates need Triton.
    from metainfer.backends.triton.templates.sample_rows import sample_rows

    rows, width = logits.shape
    if rows == 0:
        return ()
    arguments = {
        "logits": logits, "ids": ids, "numbers": draws[: rows * 3].view(torch.float32),
        "words": draws[rows * 3 : rows * 7], "V": width, "row_stride": logits.stride(0),
    }  # fmt: skip
    constants = {
        "RANKS": 16 if logits.dtype == torch.bfloat16 else 32,
        "PLACES": max(width - 1, 1).bit_length(), "BLOCK": min(_BLOCK, power_above(width)),
    }  # fmt: skip
    return (Launch(sample_rows, (rows,), arguments, constants, num_warps=_WARPS),)
