"""Replicas: sets of sequences that run side by side, each with its own queue and pages.

All replicas run the same phase in a step, at the same sizes: their tokens meet in the experts.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from metainfer.runtime.scheduler import pad_step

# Tokens of a step and its record.
Given = tuple[np.ndarray, Mapping[str, np.ndarray]]


def alike(steps: Sequence[Given | None]) -> list[Given]:
    """The steps padded to the largest of each size; a replica that idles gets padding alone."""
    given = [one if one is not None else idle() for one in steps]
    sizes = [_sizes(one) for one in given]
    tokens, sequences, pages, samples = (max(column) for column in zip(*sizes, strict=True))
    return [
        (
            np.pad(ids, (0, tokens - len(ids))),
            pad_step(step, tokens, sequences, num_pages=pages, num_samples=samples),
        )
        for ids, step in given
    ]


def _sizes(given: Given) -> tuple[int, int, int, int]:
    ids, step = given
    return len(ids), len(step["lengths"]), step["pages"].shape[1], len(step["sample_rows"])


def idle() -> Given:
    """A step of nothing: one padded row and one empty sequence, which write to the null page."""
    empty = {
        "positions": [0], "slots": [0], "starts": [0, 0], "lengths": [0], "pages": [[0]],
        "sample_rows": [0], "num_valid": [0, 0],
    }  # fmt: skip
    return np.zeros(1, np.int32), {name: np.array(v, np.int32) for name, v in empty.items()}
