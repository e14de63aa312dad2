"""A synthetic router: choices of experts for benchmarks, as skewed as one wants.

Routing that deals experts out in turn is not representative: with every rank starting at the same
expert, half of the experts stay idle, and a published speed means nothing. These choices are drawn
from a histogram (even, Zipf, or a recorded one), and `active_experts` says how many experts of each
rank a step touches, which belongs beside any figure.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from metainfer.ir.errors import TypeMismatch

Array = np.ndarray[Any, np.dtype[Any]]


def even(experts: int) -> Array:
    """Every expert as often as any other. Shapes: -> float64 [experts]."""
    return np.ones(experts)


def zipf(experts: int, skew: float, seed: int = 0) -> Array:
    """The n-th most popular expert as often as 1 / n^skew; which is popular is drawn.

    Shapes: -> float64 [experts].
    """
    shares = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    return np.random.default_rng(seed).permutation(shares)


def draw_choices(counts: Array, tokens: int, chosen: int, seed: int = 0) -> Array:
    """Experts of each token: different ones, drawn in proportion to the counts.

    Shapes: counts [experts] -> int32 [tokens, chosen].
    Raises: TypeMismatch if fewer experts have a count than a token chooses.
    """
    shares = np.asarray(counts, np.float64)
    if (shares > 0).sum() < chosen:
        raise TypeMismatch(
            f"{chosen} choices of {int((shares > 0).sum())} experts that have a count",
            advice="lower the number of choices, or give a histogram of more tokens",
        )
    rng = np.random.default_rng(seed)
    with np.errstate(divide="ignore"):
        # The largest of log-shares plus Gumbel noise are draws without replacement.
        keys = np.log(shares) + rng.gumbel(size=(tokens, len(shares)))
    order = np.argpartition(-keys, chosen - 1, axis=1)[:, :chosen]
    return order.astype(np.int32)


def active_experts(ids: Array, slots: Sequence[Sequence[int]]) -> Array:
    """How many different experts of each rank a step's choices touch.

    Shapes: ids int [tokens, chosen], slots [ranks][slots] of experts -> int64 [ranks].
    """
    touched = set(np.unique(ids[ids >= 0]).tolist())
    return np.array([len(touched.intersection(row)) for row in slots], np.int64)
