"""The sum over a token's experts, and what a group does to it while it is in registers."""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early


@triton.jit
def sum_pairs(
    pairs, ids, token, column, E, D,
    CHOICES: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum over a token's pairs, [COLUMNS] in float32; pairs of no expert were not written."""
    acc = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(CHOICES):
        expert = tl.load(ids + token * CHOICES + choice)
        known = (expert >= 0) & (expert < E) & (column < D)
        for part in tl.static_range(PARTS):
            row = ((token * CHOICES + choice) * PARTS + part).to(tl.int64)
            acc += tl.load(pairs + row * D + column, mask=known, other=0.0).to(tl.float32)
    return acc


@triton.jit
def experts_sum(
    pairs, ids, out, E, D, out_token,
    CHOICES: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum over a token's pairs, in rising order; pairs of no expert were not written.

    Shapes: pairs [T * CHOICES, PARTS, D] -> out [T, D].
    """
    early.wait(EARLY)
    blocks = tl.cdiv(D, COLUMNS)
    token = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    acc = sum_pairs(pairs, ids, token, column, E, D, CHOICES, PARTS, COLUMNS)
    spot = out + token.to(tl.int64) * out_token + column
    tl.store(spot, acc.to(out.dtype.element_ty), mask=column < D)


@triton.jit
def experts_sum_then(
    pairs, ids, operands, out, E, D, out_token,
    epilogue: tl.constexpr, CHOICES: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out[t] = epilogue of the sum over a token's pairs, which it rounds first, as its op does.

    Shapes: pairs [T * CHOICES, PARTS, D] -> out [T, D]; operands: what ``epilogue`` reads beside
    the float32 row.
    """
    early.wait(EARLY)
    blocks = tl.cdiv(D, COLUMNS)
    token = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    acc = sum_pairs(pairs, ids, token, column, E, D, CHOICES, PARTS, COLUMNS)
    row = tl.zeros([1, 1], tl.int64) + token
    there = column[None, :] < D
    made = epilogue(acc[None, :], operands, row, column[None, :], row >= 0, there)
    tl.store(out + row * out_token + column[None, :], made.to(out.dtype.element_ty), mask=there)


@triton.jit
def experts_sum_row(
    pairs, ids, operands, E, D,
    epilogue: tl.constexpr, CHOICES: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """As `experts_sum_then`, a whole row a program: its epilogue stores what it makes of it.

    Shapes: pairs [T * CHOICES, PARTS, D]; operands: what ``epilogue`` reads and writes.
    """
    early.wait(EARLY)
    token = tl.program_id(0)
    acc = sum_pairs(pairs, ids, token, tl.arange(0, COLUMNS), E, D, CHOICES, PARTS, COLUMNS)
    row = tl.zeros([1, 1], tl.int64) + token
    epilogue(acc[None, :], operands, row, row >= 0)
