"""The sum over a token's experts with the residual added, while both are in registers."""

import triton
import triton.language as tl


@triton.jit
def experts_sum_add(
    pairs, ids, residual, out, E, D, residual_token, out_token,
    CHOICES: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[t] = residual[t] + the sum over a token's pairs, which is rounded first, as its op does.

    Shapes: pairs [T * CHOICES, PARTS, D], residual [T, D] -> out [T, D].
    """
    blocks = tl.cdiv(D, COLUMNS)
    token = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(CHOICES):
        expert = tl.load(ids + token * CHOICES + choice)
        known = (expert >= 0) & (expert < E) & (column < D)
        for part in tl.static_range(PARTS):
            row = ((token * CHOICES + choice) * PARTS + part).to(tl.int64)
            acc += tl.load(pairs + row * D + column, mask=known, other=0.0).to(tl.float32)
    kept = out.dtype.element_ty
    far = token.to(tl.int64)
    other = tl.load(residual + far * residual_token + column, mask=column < D, other=0.0)
    made = acc.to(kept).to(tl.float32) + other.to(tl.float32)
    tl.store(out + far * out_token + column, made.to(kept), mask=column < D)
