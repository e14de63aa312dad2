"""Noise of sampling: a function of a seed, of which token is drawn, and of the token in question.

Nothing is kept between draws and no number depends on another: host and device make the same noise
for any token, in any order.
"""

import numpy as np

_MASK = np.uint64(0xFFFFFFFF)
_FACTORS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = np.uint64(32)


class Noise:
    """A request's own source of noise.

    Attributes:
        key: 64 bits that its seed makes; None takes a seed from the system.
        position: draws that were taken.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.key = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
        self.position = 0

    def take(self) -> int:
        """The number of the next draw."""
        self.position += 1
        return self.position - 1


def exponentials(keys: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Exponentially distributed numbers with mean 1.

    The token of the least ``exponential / probability`` is drawn with its probability: the race
    that Gumbel noise on logarithms runs (Gumbel 1954).

    Shapes: keys u64 and positions i64 [R, 1], tokens i64 [R, C] or [1, C] -> f64 [R, C].
    """
    words = bits(keys, positions, tokens // 4)
    place = np.broadcast_to(tokens % 4, words.shape[1:])
    chosen = np.take_along_axis(words, place[None], axis=0)[0]
    return _exponential(chosen)


def all_exponentials(keys: np.ndarray, positions: np.ndarray, count: int) -> np.ndarray:
    """`exponentials` of tokens 0 to ``count``. Shapes: [R, 1] -> f64 [R, count]."""
    words = bits(keys, positions, np.arange(-(-count // 4))[None])
    return _exponential(words.transpose(1, 2, 0).reshape(len(keys), -1)[:, :count])


def _exponential(words: np.ndarray) -> np.ndarray:
    # The middle of each of 2^32 intervals: neither 0 nor infinity.
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    made: np.ndarray = -np.log1p(-uniform)
    return made


def bits(keys: np.ndarray, positions: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Four words of 32 random bits for each counter.

    Shapes: keys u64 and positions [R, 1], counters [R, C] or [1, C] -> u64 [4, R, C].
    Source: Salmon et al. 2011, Philox4x32-10; the counter is (counters, positions, 0, 0).
    """
    shape = np.broadcast_shapes(keys.shape, counters.shape)
    c0 = np.broadcast_to(counters.astype(np.uint64), shape)
    c1 = np.broadcast_to(positions.astype(np.uint64), shape)
    c2, c3 = np.zeros(shape, np.uint64), np.zeros(shape, np.uint64)
    return philox((c0, c1, c2, c3), (keys & _MASK, keys >> _WORD))


def philox(counter: tuple[np.ndarray, ...], key: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Philox4x32-10 of counters of four words by keys of two, all as u64 [4, ...]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _FACTORS[0] * c0, _FACTORS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _WORD) ^ c1 ^ k0,
            second & _MASK,
            (first >> _WORD) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + np.uint64(_STEPS[0])) & _MASK, (k1 + np.uint64(_STEPS[1])) & _MASK
    return np.stack([c0, c1, c2, c3])
