"""The experts' three products, one tile of pairs of one expert a program."""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early
from metainfer.backends.triton.templates.experts_tile import activate, multiply
from metainfer.backends.triton.templates.weight_tiles import product


@triton.jit
def tile_pairs(
    tile, ids, order, tiles, P, E, LIMIT, ROWS: tl.constexpr, DIRECT: tl.constexpr
):  # fmt: skip
    """A tile's expert (or -1), its first place, its pairs and which of them exist.

    Direct tiles hold one pair each, the tile's number, and nothing was sorted. What is read may
    have been written since the program's processor last read it: it comes from the last cache.
    """
    row = tl.arange(0, ROWS)
    if DIRECT:
        expert = tl.load(ids + tile, cache_modifier=".cg").to(tl.int32)
        expert = tl.where(expert < E, expert, -1)
        place = tile
        there = row < 1
        pair = tile + row * 0
    else:
        expert = tl.load(tiles + tile, cache_modifier=".cg")
        place = tl.load(tiles + LIMIT + tile, cache_modifier=".cg")
        there = row < tl.load(tiles + 2 * LIMIT + tile, cache_modifier=".cg")
        there = there & (expert >= 0)
        pair = tl.load(order + place + row, mask=there, other=0, cache_modifier=".cg")
    return expert, place, pair, there


@triton.jit
def scale_offset(out, first, stride, HIGH: tl.constexpr, ALIKE: tl.constexpr):
    """Where the scales of a tile's outputs lie: one place, or one for each output."""
    place = out
    if ALIKE:
        place = first
    block = place * 0
    if HIGH > 0:
        block = place // HIGH
    return block * stride


@triton.jit
def experts_gate_up(
    x, x_scale, ids, order, tiles, weights, gate, gate_scale, up, up_scale, gate_rows, up_rows,
    hidden,
    P, E, LIMIT, CHOICES, D, F, x_token, x_scale_token, hidden_row,
    gate_expert, gate_out, up_expert, up_out,
    scale_expert, scale_out, scale_in, scale_half,
    FORMAT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, POWERS: tl.constexpr,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    DIRECT: tl.constexpr, ALIKE: tl.constexpr, RAGGED: tl.constexpr, ROWED: tl.constexpr,
    TURNED: tl.constexpr, GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """hidden = weight * act(gate @ x) * (up @ x), for COLUMNS of the inner width.

    Gate and up go through one product, side by side column by column, so that a thread holds both
    numbers of a pair when it multiplies them. The router's weight is applied here: what follows
    is linear. Shapes: x [T, D], plain numbers or codes with scales for GROUP of a row (see
    `multiply`), gate and up [E, F, D], hidden [P, F] in the order of places. ROWED: weights have
    second scales, one for each output.
    """
    # The next launch reads which expert's weights are its own before this one has ended.
    early.wait_first(EARLY)
    blocks = tl.cdiv(F, COLUMNS)
    tile = tl.program_id(0) // blocks
    expert, place, pair, there = tile_pairs(tile, ids, order, tiles, P, E, LIMIT, ROWS, DIRECT)
    if expert < 0:
        return
    first = tl.program_id(0) % blocks * COLUMNS
    both = tl.arange(0, 2 * COLUMNS)
    is_up = both % 2 == 1
    # Columns past the end repeat the last one: reads need no mask, only the write has one.
    out = tl.minimum(first + both // 2, F - 1)
    far = expert.to(tl.int64)
    codes = tl.where(
        is_up, up + far * up_expert + out * up_out, gate + far * gate_expert + out * gate_out
    )
    even, odd = gate_scale, up_scale
    if FORMAT != "plain":
        offset = far * scale_expert + scale_offset(out, first, scale_out, HIGH, ALIKE)
        even, odd = gate_scale + offset, up_scale + offset
        if not ALIKE:
            even = tl.where(is_up, odd, even)
    token = (pair // CHOICES).to(tl.int64)
    rows = x + token[:, None] * x_token + tl.arange(0, DEPTH)[None, :]
    acc = multiply(
        rows, there, codes, even, odd, x_scale + token * x_scale_token, 0, D, scale_in,
        scale_half, FORMAT, ROWS, 2 * COLUMNS, DEPTH, WIDE, POWERS, ALIKE, GROUP, RAGGED, TURNED,
    )  # fmt: skip
    if ROWED:
        second = far * F + out
        acc *= tl.load(tl.where(is_up, up_rows + second, gate_rows + second))[None, :]
    gated, upped = tl.split(tl.reshape(acc, (ROWS, COLUMNS, 2)))
    share = tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)
    value = activate(gated, GELU) * upped * share[:, None]
    column = first + tl.arange(0, COLUMNS)
    spot = hidden + (place + tl.arange(0, ROWS)).to(tl.int64)[:, None] * hidden_row
    tl.store(
        spot + column[None, :],
        value.to(hidden.dtype.element_ty),
        mask=there[:, None] & (column[None, :] < F),
    )


@triton.jit
def experts_down(
    hidden, ids, order, tiles, down, down_scale, down_rows, pairs,
    P, E, LIMIT, D, F, hidden_row, down_expert, down_out,
    scale_expert, scale_out, scale_in, scale_half,
    FORMAT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, POWERS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    DIRECT: tl.constexpr, ALIKE: tl.constexpr, RAGGED: tl.constexpr, ROWED: tl.constexpr,
    TURNED: tl.constexpr, HEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """pairs = down @ hidden, for COLUMNS of the width and one of PARTS of the inner width.

    The launch in front has let this one start when those before it, which chose and sorted, had
    ended. HEAD columns of the weights, plain numbers of turned tiles, are read before it has ended
    itself.
    Shapes: hidden [P, F] in the order of places, down [E, D, F], pairs [P, PARTS, D].
    """
    early.let_next(EARLY)
    blocks = tl.cdiv(D, COLUMNS)
    tile = tl.program_id(0) // (blocks * PARTS)
    expert, place, pair, there = tile_pairs(tile, ids, order, tiles, P, E, LIMIT, ROWS, DIRECT)
    if expert < 0:
        early.wait_for_last(EARLY)
        return
    part = tl.program_id(0) // blocks % PARTS
    first = tl.program_id(0) % blocks * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    out = tl.minimum(column, D - 1)
    far = expert.to(tl.int64)
    codes = down + far * down_expert + out * down_out
    scales = down_scale
    if FORMAT != "plain":
        offset = scale_offset(out, first, scale_out, HIGH, ALIKE)
        scales = down_scale + far * scale_expert + offset
    row = place + tl.arange(0, ROWS)
    rows = hidden + row.to(tl.int64)[:, None] * hidden_row + tl.arange(0, DEPTH)[None, :]
    span = tl.cdiv(F, DEPTH * PARTS) * DEPTH
    begin = part * span
    stop = tl.minimum(begin + span, F)
    if HEAD > 0:
        at = begin + tl.arange(0, HEAD)[None, :]
        head = tl.load(codes[:, None] + at, mask=at < stop, other=0.0)
    early.wait_for_last(EARLY)
    if HEAD > 0:
        near = hidden + row.to(tl.int64)[:, None] * hidden_row + at
        inputs = tl.load(near, mask=there[:, None] & (at < stop), other=0.0)
    acc = multiply(
        rows, there, codes, scales, scales, down_scale, begin + HEAD, stop, scale_in,
        scale_half, FORMAT, ROWS, COLUMNS, DEPTH, WIDE, POWERS, ALIKE, -1, RAGGED, TURNED,
    )  # fmt: skip
    if HEAD > 0:
        acc += tl.trans(product(inputs, head, tl.zeros([COLUMNS, ROWS], tl.float32), True))
    if ROWED:
        acc *= tl.load(down_rows + far * D + out)[None, :]
    spot = pairs + (pair * PARTS + part).to(tl.int64)[:, None] * D + column[None, :]
    tl.store(spot, acc.to(pairs.dtype.element_ty), mask=there[:, None] & (column[None, :] < D))
