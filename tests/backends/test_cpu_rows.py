"""Norms, pointwise kernels, gathers and embeddings against numpy."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from metainfer.backends.cpu import layouts, program
from metainfer.backends.cpu.build import Library, available, library
from metainfer.backends.cpu.kernels import FORMATS
from metainfer.ir.dtypes import BF16, F16, Block, parse_dtype, quantize

pytestmark = pytest.mark.skipif(not available()[0], reason="no C++ compiler")

WIDTHS = [1, 15, 16, 33, 64, 576]


@pytest.fixture(params=["native-1", "native-2", "scalar-2"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    kind, threads = request.param.split("-")
    loaded = library(scalar=kind == "scalar")
    program.set_num_threads(int(threads), loaded)
    yield loaded
    program.set_num_threads(0, loaded)


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


class Codes:
    """Room for a quantized copy of rows, and the check that it is the rounding of given values."""

    def __init__(self, rows: int, width: int) -> None:
        groups = -(-width // 32)
        self.arrays = (
            np.full((rows, groups * 32), 99, np.int8),
            np.full((rows, groups), 9.0, np.float32),
            np.full((rows, groups), 9, np.int32),
        )

    def check(self, values: np.ndarray) -> None:
        codes, scales, sums = self.arrays
        rows, width = values.shape
        wide = scales.repeat(32, axis=1)
        np.testing.assert_array_equal(codes[:, width:], 0)
        np.testing.assert_array_equal(sums, codes.reshape(rows, -1, 32).sum(-1, dtype=np.int32))
        error = np.abs(codes * wide - np.pad(values, [(0, 0), (0, codes.shape[1] - width)]))
        assert (error <= wide * 0.5001 + 1e-12).all()
        top = np.pad(np.abs(values), [(0, 0), (0, codes.shape[1] - width)])
        np.testing.assert_allclose(scales, top.reshape(rows, -1, 32).max(-1) / 127, rtol=1e-6)


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5])
def test_rms_norm(kernels: Library, rows: int, width: int) -> None:
    x, weight, y = normal(rows, width + 3), normal(width), np.zeros((rows, width + 1), np.float32)
    codes = Codes(rows, width)
    pointers = [address(p) for p in (y, x, weight, *codes.arrays)]
    ints = [rows, width, width + 3, width + 1]
    program.call("rms_norm", pointers, ints, [1e-5, 1.0], kernels)
    expected = rms(x[:, :width], 1e-5) * (weight + 1)
    np.testing.assert_allclose(y[:, :width], expected, rtol=2e-6, atol=1e-6)
    codes.check(y[:, :width])
    only_codes = Codes(rows, width)
    pointers = [address(p) for p in (None, x, weight, *only_codes.arrays)]
    program.call("rms_norm", pointers, ints, [1e-5, 1.0], kernels)
    only_codes.check(y[:, :width])


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_in_place(kernels: Library, width: int) -> None:
    x, residual, weight = normal(4, width), normal(4, width, seed=1), normal(width)
    total, y, codes = x + residual, np.zeros((4, width), np.float32), Codes(4, width)
    pointers = [address(p) for p in (residual, y, x, residual, weight, *codes.arrays)]
    program.call("add_rms_norm", pointers, [4, width], [1e-6, 0.0], kernels)
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_allclose(y, rms(total, 1e-6) * weight, rtol=2e-6, atol=1e-6)
    codes.check(y)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(kernels: Library, width: int, has_bias: bool) -> None:
    # A mean far from zero: the two-pass variance must not cancel.
    x, weight = normal(3, width) + np.float32(100), normal(width)
    bias = normal(width, seed=2) if has_bias else None
    y, codes = np.zeros((3, width), np.float32), Codes(3, width)
    pointers = [address(p) for p in (y, x, weight, bias, *codes.arrays)]
    program.call("layer_norm", pointers, [3, width, width, width], [1e-5], kernels)
    wide = x.astype(np.float64)
    expected = rms(wide - wide.mean(-1, keepdims=True), 1e-5) * weight + (
        0 if bias is None else bias
    )
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    codes.check(y)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


ERF = np.vectorize(math.erf)
FUNCTIONS = {
    "silu": lambda x: x * sigmoid(x),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: x / 2 * (1 + ERF(x / np.sqrt(2))),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_activations(kernels: Library, name: str) -> None:
    x = np.concatenate([np.linspace(-20, 20, 991), [0.0, 1e-8, -1e-8]]).astype(np.float32)[None]
    y, width = np.zeros_like(x), x.shape[1]
    program.call(name, [address(y), address(x)], [1, width, width, width], (), kernels)
    expected = FUNCTIONS[name](x.astype(np.float64))
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("width", [1, 16, 31, 47, 1536])
def test_gated_activations(kernels: Library, name: str, width: int) -> None:
    x, y, codes = normal(3, 2 * width + 5), np.zeros((3, width), np.float32), Codes(3, width)
    pointers = [address(p) for p in (y, x, *codes.arrays)]
    program.call(f"{name}_mul", pointers, [3, width, 2 * width + 5, width], (), kernels)
    wide = x.astype(np.float64)
    expected = FUNCTIONS[name](wide[:, :width]) * wide[:, width : 2 * width]
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    codes.check(y)


def test_exp_is_within_two_ulp_everywhere(kernels: Library) -> None:
    edges = [0.0, -0.0, -np.inf, np.inf, np.nan, 88.72, 88.73, -87.33, -87.4, -103.9, -104.5]
    x = np.concatenate([np.linspace(-106, 90, 40001), edges]).astype(np.float32)
    y = np.zeros_like(x)
    program.call("exp", [address(y), address(x)], [1, x.size, x.size, x.size], (), kernels)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.exp(x.astype(np.float64)).astype(np.float32)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(y[~finite], expected[~finite])
    error = np.abs(y[finite].astype(np.float64) - expected[finite]) / np.spacing(expected[finite])
    assert error.max() <= 2


@pytest.mark.parametrize("width", WIDTHS)
def test_binary_and_scale(kernels: Library, width: int) -> None:
    x, z, y = normal(3, width), normal(3, width, seed=5), np.zeros((3, width), np.float32)
    ints = [3, width, width, width, width]
    for name, expected in (("add", x + z), ("mul", x * z)):
        program.call(name, [address(p) for p in (y, x, z)], ints, (), kernels)
        np.testing.assert_array_equal(y, expected)
    program.call("add", [address(p) for p in (y, x, z)], [3, width, width, 0, width], (), kernels)
    np.testing.assert_array_equal(y, x + z[0])
    program.call("scale", [address(y), address(x)], [3, width, width, width], [0.3], kernels)
    np.testing.assert_array_equal(y, x * np.float32(0.3))


@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_rows(kernels: Library, width: int) -> None:
    x = normal(4, width) * 20
    y = np.zeros_like(x)
    program.call("softmax_rows", [address(y), address(x)], [4, width, width, width], (), kernels)
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    np.testing.assert_allclose(y, e / e.sum(-1, keepdims=True), rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("width", [1, 16, 63, 64, 65, 1000])
def test_argmax_rows_takes_the_lower_index_of_a_tie(kernels: Library, width: int) -> None:
    x = np.round(normal(5, width) * 3)
    x[0] = 2.0
    x[1] = -np.inf
    index = np.full(5, -1, np.int32)
    program.call("argmax_rows", [address(index), address(x)], [5, width, width], (), kernels)
    np.testing.assert_array_equal(index, x.argmax(-1))


def test_gather_and_copy_rows(kernels: Library) -> None:
    x, y = normal(6, 20), np.ones((4, 18), np.float32)
    index = np.array([5, 0, -1, 5], np.int32)
    program.call("gather_rows", [address(p) for p in (y, x, index)], [4, 17, 20, 18], (), kernels)
    np.testing.assert_array_equal(y[:, :17], np.where(index[:, None] < 0, 0, x[index, :17]))
    np.testing.assert_array_equal(y[:, 17], 1)
    program.call("copy_rows", [address(y), address(x)], [4, 18, 20, 18], (), kernels)
    np.testing.assert_array_equal(y, x[:4, :18])


@pytest.mark.parametrize("width", [32, 50, 576])
def test_embeddings(kernels: Library, width: int) -> None:
    table, tokens = normal(40, width), np.array([39, 0, -1, 17, 16], np.int32)
    expected = np.where(tokens[:, None] < 0, 0, table[tokens]) * np.float32(2)
    y = np.ones((5, width), np.float32)
    pointers = [address(p) for p in (y, table, tokens)]
    program.call("embedding_f32", pointers, [5, width], [2.0], kernels)
    np.testing.assert_array_equal(y, expected)
    for name, dtype in (("bf16", BF16), ("f16", F16)):
        short = table.astype(dtype.numpy)
        pointers = [address(p) for p in (y, short, tokens)]
        program.call(f"embedding_{name}", pointers, [5, width], [2.0], kernels)
        wide = short.astype(np.float32)[tokens] * np.float32(2)
        np.testing.assert_array_equal(y, np.where(tokens[:, None] < 0, 0, wide))


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize("panel_rows", [1, 16])
def test_block_embeddings(kernels: Library, dtype: str, panel_rows: int) -> None:
    block = parse_dtype(dtype)
    assert isinstance(block, Block)
    for width in (32, 50, 576):
        table, tokens = quantize(normal(40, width), block), np.array([39, -1, 0, 17], np.int32)
        blob = layouts.pack(layouts.layout_for(block, rows=panel_rows), table)
        y = np.ones((4, width), np.float32)
        pointers = [address(p) for p in (y, blob, tokens)]
        ints = [4, width, FORMATS[dtype], panel_rows]
        program.call("embedding_block", pointers, ints, [1.0], kernels)
        expected = np.where(tokens[:, None] < 0, 0, table.dequantize()[tokens])
        np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
