"""A Triton product with an epilogue, for tests of launching. Holds no tests."""

import triton
import triton.language as tl


@triton.jit
def add_row(acc, operands, columns, mask):
    """Add a row to each row; the second operand multiplies it."""
    return acc + tl.load(operands[0] + columns, mask=mask, other=0.0).to(tl.float32) * operands[1]


@triton.jit
def product_and_row(
    x, w, y, operands, rows, columns, inner,
    epilogue: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y = epilogue(x @ w.T)."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, inner, BK):
        k = first + tl.arange(0, BK)
        k_row, k_column = k[None, :], k[:, None]
        a = tl.load(x + m * inner + k_row, mask=(m < rows) & (k_row < inner), other=0.0)
        b = tl.load(w + n * inner + k_column, mask=(n < columns) & (k_column < inner), other=0.0)
        acc = tl.dot(a, b, acc)
    y_tile = epilogue(acc, operands, n, n < columns).to(tl.bfloat16)
    tl.store(y + m * columns + n, y_tile, mask=(m < rows) & (n < columns))
