"""Rotary positions, cache writes and paged attention against numpy."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from metainfer.backends.cpu import program
from metainfer.backends.cpu.build import Library, available, library

pytestmark = pytest.mark.skipif(not available()[0], reason="no C++ compiler")


@pytest.fixture(params=["native-1", "native-2", "scalar-2"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    kind, threads = request.param.split("-")
    loaded = library(scalar=kind == "scalar")
    program.set_num_threads(int(threads), loaded)
    yield loaded
    program.set_num_threads(0, loaded)


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


@dataclass(frozen=True)
class Case:
    """Sequences as (tokens of this step, length after it), and the shape of the heads."""

    sequences: tuple[tuple[int, int], ...]
    H: int
    Hkv: int
    D: int
    window: int = 0
    softcap: float = 0.0
    page_size: int = 16
    padded_rows: int = 0


CASES = {
    "decode": Case(((1, 1), (1, 40), (1, 129)), 9, 3, 64),
    "decode_long": Case(((1, 1500),), 9, 3, 64),
    "decode_long_window": Case(((1, 1500), (1, 3)), 4, 2, 32, window=700),
    "prefill": Case(((100, 100), (33, 200)), 9, 3, 64),
    "prefill_window": Case(((130, 200),), 4, 1, 32, window=50),
    "window_of_one": Case(((70, 90), (1, 9)), 2, 2, 16, window=1),
    "multi_head": Case(((20, 20), (2, 70)), 4, 4, 80),
    "odd_width": Case(((17, 30), (1, 65)), 3, 1, 20, page_size=1),
    "softcap": Case(((40, 64), (1, 64)), 4, 2, 32, softcap=5.0),
    "padding": Case(((3, 5), (0, 0), (1, 0), (2, 2)), 6, 2, 16, padded_rows=4),
    "verify": Case(((4, 600), (4, 601)), 9, 3, 64, page_size=32),
}


class Step:
    """Random operands of a case, its caches filled in pages taken in random order."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(7)
        self.case = case
        counts = [tokens for tokens, _ in case.sequences]
        self.starts = np.cumsum([0, *counts]).astype(np.int32)
        self.lengths = np.array([length for _, length in case.sequences], np.int32)
        self.T, self.B = int(self.starts[-1]) + case.padded_rows, len(counts)
        self.P = max(-(-int(self.lengths.max()) // case.page_size), 1) + 2
        pages = rng.permutation(self.B * self.P).reshape(self.B, self.P)
        self.pages = pages.astype(np.int32)
        shape = (self.B * self.P * case.page_size, case.Hkv, case.D)
        self.k, self.v = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
        self.q = rng.normal(size=(self.T, case.H * case.D + 5)).astype(np.float32)
        self.scale = case.D**-0.5

    def slots(self, b: int) -> np.ndarray:
        positions, size = np.arange(self.lengths[b]), self.case.page_size
        return np.asarray(self.pages[b, positions // size] * size + positions % size)

    def expected(self) -> np.ndarray:
        c = self.case
        out = np.zeros((self.T, c.H, c.D))
        for b in range(self.B):
            keys, values = (a[self.slots(b)].astype(np.float64) for a in (self.k, self.v))
            for t in range(self.starts[b], self.starts[b + 1]):
                position = self.lengths[b] - self.starts[b + 1] + t
                first = max(0, position - c.window + 1) if c.window else 0
                seen = slice(first, max(position + 1, 0))
                for h in range(c.H if position >= 0 else 0):
                    q = self.q[t, h * c.D : (h + 1) * c.D].astype(np.float64)
                    s = keys[seen, h // (c.H // c.Hkv)] @ q * self.scale
                    s = c.softcap * np.tanh(s / c.softcap) if c.softcap else s
                    e = np.exp(s - s.max())
                    out[t, h] = e / e.sum() @ values[seen, h // (c.H // c.Hkv)]
        return out.reshape(self.T, -1)


@pytest.mark.parametrize("name", list(CASES))
def test_attention_paged(kernels: Library, name: str) -> None:
    case = CASES[name]
    step = Step(case)
    width = case.H * case.D
    out = np.full((step.T, width + 3), 5.0, np.float32)
    arrays = (out, step.q, step.k, step.v, step.starts, step.lengths, step.pages)
    ints = [step.T, step.B, case.H, case.Hkv, case.D, step.P, case.page_size, case.window]
    strides = [width + 5, width + 3]
    pointers = [address(a) for a in arrays]
    floats = [step.scale, case.softcap]
    program.call("attention_paged", pointers, [*ints, *strides], floats, kernels)
    np.testing.assert_allclose(out[:, :width], step.expected(), rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(out[:, width:], 5.0)


def tables(positions: int, rotary: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(positions)[:, None] / 10000.0 ** (np.arange(rotary // 2) / (rotary / 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    """Shapes: x [T, H, D], cosine and sine [T, rotary / 2] (rows of each token)."""
    half = cosine.shape[1]
    a, b = x[..., :half], x[..., half : 2 * half]
    c, s = cosine[:, None], sine[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize(("D", "rotary"), [(64, 64), (20, 20), (64, 32)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_kv_write(kernels: Library, D: int, rotary: int, has_norms: bool) -> None:
    rng = np.random.default_rng(D + rotary)
    T, H, Hkv = 5, 6, 2
    qkv = rng.normal(size=(T, (H + 2 * Hkv) * D + 1)).astype(np.float32)
    positions = np.array([0, 7, -9, 30, 2], np.int32)
    slots = np.array([3, 0, -1, 11, 5], np.int32)
    cosine, sine = tables(31, rotary)
    norms = [rng.normal(size=D).astype(np.float32) if has_norms else None for _ in range(2)]
    q_out = np.ones((T, H * D), np.float32)
    k_cache, v_cache = np.zeros((2, 12, Hkv, D), np.float32)
    arrays = (q_out, k_cache, v_cache, qkv, cosine, sine, positions, slots, *norms)
    ints = [T, H, Hkv, D, qkv.shape[1], H * D, rotary]
    pointers = [address(a) for a in arrays]
    program.call("rope_kv_write", pointers, ints, [1e-6, 0.0], kernels)

    heads = qkv[:, :-1].reshape(T, H + 2 * Hkv, D)
    q, k, v = np.split(heads, [H, H + Hkv], axis=1)
    if norms[0] is not None and norms[1] is not None:
        q, k = (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w
            for x, w in ((q, norms[0]), (k, norms[1]))
        )
    real = slots >= 0
    rows = positions[real]
    expected = np.zeros((T, H, D))
    expected[real] = rotated(q[real], cosine[rows], sine[rows])
    np.testing.assert_allclose(q_out.reshape(T, H, D), expected, rtol=1e-5, atol=1e-6)
    keys, values = np.zeros((2, 12, Hkv, D))
    keys[slots[real]] = rotated(k[real], cosine[rows], sine[rows])
    values[slots[real]] = v[real]
    np.testing.assert_allclose(k_cache, keys, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(v_cache, values)


def test_rope_in_place_and_kv_write(kernels: Library) -> None:
    rng = np.random.default_rng(1)
    T, H, D = 4, 3, 32
    x = rng.normal(size=(T, H, D)).astype(np.float32)
    positions, (cosine, sine) = np.array([4, 0, -1, 2], np.int32), tables(5, D)
    expected = rotated(x, cosine[positions], sine[positions])
    expected[2] = 0
    pointers = [address(a) for a in (x, x, cosine, sine, positions)]
    program.call("rope", pointers, [T, H, D, H * D, H * D, D], (), kernels)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)

    caches = np.zeros((2, 6, H * D), np.float32)
    slots = np.array([5, -1, 0, 2], np.int32)
    doubled = x * 2
    pointers = [address(a) for a in (caches[0], caches[1], x, doubled, slots)]
    program.call("kv_write", pointers, [T, H * D, H * D, H * D], (), kernels)
    wanted = np.zeros((6, H * D), np.float32)
    wanted[slots[slots >= 0]] = x.reshape(T, -1)[slots >= 0]
    np.testing.assert_array_equal(caches[0], wanted)
    np.testing.assert_array_equal(caches[1], wanted * 2)
