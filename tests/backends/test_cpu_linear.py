"""Linear kernels against numpy, over shapes, formats, thread counts and instruction sets."""

from collections.abc import Iterator

import numpy as np
import pytest

from metainfer.backends.cpu import layouts, program
from metainfer.backends.cpu.build import Library, available, library
from metainfer.backends.cpu.kernels import FORMATS
from metainfer.ir.dtypes import Block, parse_dtype, quantize

pytestmark = pytest.mark.skipif(not available()[0], reason="no C++ compiler")

SHAPES = [(16, 32), (48, 576), (37, 100), (5, 33), (130, 1056)]
ROWS = [1, 2, 3, 7, 8, 9, 33, 128]
MORE_ROWS_THAN_A_BLOCK = 200


@pytest.fixture(params=["native-1", "native-2", "scalar-2"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    kind, threads = request.param.split("-")
    loaded = library(scalar=kind == "scalar")
    program.set_num_threads(int(threads), loaded)
    yield loaded
    program.set_num_threads(0, loaded)


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What quantize_rows_i8 computes, in numpy."""
    rows, width = x.shape
    groups = -(-width // 32)
    blocks = np.zeros((rows, groups * 32), np.float32)
    blocks[:, :width] = x
    blocks = blocks.reshape(rows, groups, 32)
    top = np.abs(blocks).max(axis=-1)
    factor = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint(blocks * factor[..., None]).astype(np.int8)
    return codes.reshape(rows, -1), top / np.float32(127), codes.sum(axis=-1, dtype=np.int32)


class Case:
    """Operands of one linear, with optional bias and residual, and room around the outputs."""

    def __init__(self, m: int, n: int, k: int, extras: bool) -> None:
        rng = np.random.default_rng(m * 1000 + n + k)
        self.m, self.n, self.k = m, n, k
        self.x = rng.normal(size=(m, k)).astype(np.float32)
        self.weight = (rng.normal(size=(n, k)) / np.sqrt(k)).astype(np.float32)
        self.bias = rng.normal(size=n).astype(np.float32) if extras else None
        self.residual = rng.normal(size=(m, n + 3)).astype(np.float32) if extras else None
        self.y = np.full((m, n + 2), 7.0, np.float32)

    def expected(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        y = x.astype(np.float64) @ weight.astype(np.float64).T
        if self.bias is not None and self.residual is not None:
            y = y + self.bias + self.residual[:, : self.n]
        return y

    def run(
        self,
        kernels: Library,
        name: str,
        blob: np.ndarray,
        inputs: list[np.ndarray],
        tail: list[int],
    ) -> np.ndarray:
        pointers = [self.y, blob, self.bias, self.residual, *inputs]
        residual_stride = self.n + 3
        ints = [self.m, self.n, self.k, self.n + 2, residual_stride, *tail]
        program.call(name, [address(p) for p in pointers], ints, kernels=kernels)
        np.testing.assert_array_equal(self.y[:, self.n :], 7.0)
        return self.y[:, : self.n]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("m", [*ROWS, MORE_ROWS_THAN_A_BLOCK])
def test_plain_weights(kernels: Library, dtype: str, m: int) -> None:
    for n, k in SHAPES:
        case = Case(m, n, k, extras=k % 2 == 0)
        weight = case.weight.astype(parse_dtype(dtype).numpy)  # type: ignore[union-attr]
        blob = layouts.pack(f"cpu.{dtype}_n16", weight)
        y = case.run(kernels, f"linear_{dtype}", blob, [case.x], [k])
        expected = case.expected(case.x, weight.astype(np.float32))
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize("m", [*ROWS, MORE_ROWS_THAN_A_BLOCK])
def test_block_weights(kernels: Library, dtype: str, m: int) -> None:
    block = parse_dtype(dtype)
    assert isinstance(block, Block)
    layout, bits = layouts.layout_for(block), block.element.bits
    for n, k in SHAPES:
        case = Case(m, n, k, extras=k % 2 == 0)
        weight = quantize(case.weight, block)
        blob, values = layouts.pack(layout, weight), weight.dequantize()
        y = case.run(kernels, f"linear_w{bits}", blob, [case.x], [k, FORMATS[dtype]])
        np.testing.assert_allclose(y, case.expected(case.x, values), rtol=1e-5, atol=1e-5)

        codes, scales, sums = quantize_rows(case.x)
        y = case.run(kernels, f"linear_w{bits}a8", blob, [codes, scales, sums], [FORMATS[dtype]])
        rounded = codes.reshape(m, -1, 32) * scales[..., None].astype(np.float64)
        expected = case.expected(rounded.reshape(m, -1)[:, :k], values)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_largest_codes_do_not_overflow(kernels: Library, dtype: str) -> None:
    block = parse_dtype(dtype)
    assert isinstance(block, Block)
    n, k, bits = 16, 64, block.element.bits
    extreme = {"u4": 15, "i4": -8, "i8": -128}[str(block.element)]
    weight = quantize(np.zeros((n, k), np.float32), block)
    weight.codes[:] = extreme
    weight.scales[:] = 1
    for sign in (1, -1):
        x = np.full((1, k), sign, np.float32)
        codes, scales, sums = quantize_rows(x)
        y = np.zeros((1, n), np.float32)
        blob = layouts.pack(layouts.layout_for(block), weight)
        pointers = [address(p) for p in (y, blob, None, None, codes, scales, sums)]
        ints = [1, n, k, n, 0, FORMATS[dtype]]
        program.call(f"linear_w{bits}a8", pointers, ints, kernels=kernels)
        np.testing.assert_allclose(y, sign * extreme * k, rtol=1e-6)


def test_residual_may_be_the_output(kernels: Library) -> None:
    rng = np.random.default_rng(3)
    for m in (1, 40):
        x, weight = (rng.normal(size=s).astype(np.float32) for s in ((m, 300), (20, 300)))
        y = rng.normal(size=(m, 20)).astype(np.float32)
        expected = y + x.astype(np.float64) @ weight.T
        blob = layouts.pack("cpu.f32_n16", weight)
        pointers = [address(p) for p in (y, blob, None, y, x)]
        program.call("linear_f32", pointers, [m, 20, 300, 20, 20, 300], kernels=kernels)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [1, 32, 33, 576])
def test_quantize_rows_is_numpys(kernels: Library, width: int) -> None:
    rng = np.random.default_rng(width)
    x = (rng.normal(size=(5, width + 4)) * 10.0 ** rng.integers(-3, 4, (5, 1))).astype(np.float32)
    x[2] = 0
    expected = quantize_rows(x[:, :width])
    outputs = [np.full_like(e, 77) for e in expected]
    pointers = [address(p) for p in (*outputs, x)]
    program.call("quantize_rows_i8", pointers, [5, width, width + 4], kernels=kernels)
    for got, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
