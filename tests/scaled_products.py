"""A product of scaled blocks, for tests of the instruction gate: Triton replaces it in silence."""

from typing import Any

import torch
import triton
import triton.language as tl

from metainfer.backends.triton.launch import Launch

ROWS = COLUMNS = INNER = 128
GROUP = 32


@triton.jit
def scaled(  # type: ignore[no-untyped-def]
    x, w, x_scale, w_scale, y, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, KX: tl.constexpr, KW: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """One tile y [M, N] of x [M, KX bytes] by w [N, KW bytes], scales [M, G] and [N, G]."""
    m, n, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, G)
    left = tl.load(x + m[:, None] * KX + tl.arange(0, KX)[None, :])
    right = tl.load(w + n[None, :] * KW + tl.arange(0, KW)[:, None])
    left_scale = tl.load(x_scale + m[:, None] * G + g[None, :])
    right_scale = tl.load(w_scale + n[:, None] * G + g[None, :])
    made = tl.dot_scaled(left, left_scale, LEFT, right, right_scale, RIGHT)
    tl.store(y + m[:, None] * N + n[None, :], made)


def launch(left: str, right: str, wanted: str) -> Launch:
    """A product of two types of codes that wants a matrix instruction."""

    def codes(kind: str, rows: int) -> tuple[torch.Tensor, int]:
        width = INNER // 2 if kind == "e2m1" else INNER
        dtype = torch.uint8 if kind == "e2m1" else torch.float8_e4m3fn
        return torch.empty(rows, width, dtype=dtype, device="meta"), width

    def scales(rows: int) -> torch.Tensor:
        return torch.empty(rows, INNER // GROUP, dtype=torch.uint8, device="meta")

    (x, kx), (w, kw) = codes(left, ROWS), codes(right, COLUMNS)
    arguments: dict[str, Any] = {
        "x": x, "w": w, "x_scale": scales(ROWS), "w_scale": scales(COLUMNS),
        "y": torch.empty(ROWS, COLUMNS, device="meta"),
    }  # fmt: skip
    constants = {
        "LEFT": left, "RIGHT": right, "M": ROWS, "N": COLUMNS, "KX": kx, "KW": kw,
        "G": INNER // GROUP,
    }  # fmt: skip
    return Launch(scaled, (1,), arguments, constants, num_warps=8, matrix=wanted)
