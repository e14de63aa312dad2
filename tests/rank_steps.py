"""Steps of a few sequences for simulated and real ranks. Imported by tests; holds no tests."""

from collections.abc import Mapping, Sequence

import numpy as np

Step = Mapping[str, np.ndarray]


def _step(new: Sequence[int], lengths: Sequence[int], page: int) -> Step:
    """New tokens of sequences that then have these lengths; each owns pages of its own."""
    most = max(-(-n // page) for n in lengths)
    pages = np.array([[1 + b * most + i for i in range(most)] for b in range(len(new))])
    at = [np.arange(n - k, n) for k, n in zip(new, lengths, strict=True)]
    slots = [pages[b, p // page] * page + p % page for b, p in enumerate(at)]
    starts = np.cumsum([0, *new])
    fields = {
        "positions": np.concatenate(at),
        "slots": np.concatenate(slots),
        "starts": starts,
        "lengths": np.array(lengths),
        "pages": pages,
        "sample_rows": starts[1:] - 1,
        "num_valid": np.array([sum(new), len(new)]),
    }
    return {k: v.astype(np.int32) for k, v in fields.items()}


def _tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 60, count).astype(np.int32)


def prefill_step(lengths: Sequence[int], replica: int, page: int) -> tuple[np.ndarray, Step]:
    """Prompts of these lengths in one step."""
    return _tokens(sum(lengths), 10 + replica), _step(lengths, lengths, page)


def decode_step(lengths: Sequence[int], replica: int, page: int) -> tuple[np.ndarray, Step]:
    """One more token of each."""
    return _tokens(len(lengths), 20 + replica), _step(
        [1] * len(lengths), [n + 1 for n in lengths], page
    )
