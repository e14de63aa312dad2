"""Attention of many new tokens by warpgroups: one warp copies, two warpgroups multiply.

Each warpgroup holds half of a tile's rows. While one multiplies, the other takes exponentials: the
matrix units and the others are busy at the same time, without barriers that give turns (with them
it took as long: H200, 2026-11-30). Keys come by the copy engine, which knows no mask: what nobody
wrote is cleared where it could matter.

A program may work through two tiles of a sequence, its last and its first, its second to last and
its second: pairs see equally many keys, and keys of the second are on their way while the first is
finished.

NOTE: this is Gluon, which names layouts and warps itself; Triton's interpreter does not know it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Below every score, yet finite: differences of it with itself are zero, not NaN.
LOWEST = gl.constexpr(-1.0e30)
# Of a thread: three warpgroups start with 168 each; the copying one leaves the others 240.
COPYING_REGISTERS = gl.constexpr(24)
MULTIPLYING_REGISTERS = gl.constexpr(240)
SOME_ROWS = gl.constexpr(32)  # cleared at once


@gluon.jit
def find_tiles(
    number, starts, lengths, T, B, QUERIES: gl.constexpr, TILES: gl.constexpr, MANY: gl.constexpr
):  # fmt: skip
    """What a program works through: the first tokens of its tiles, and how many tiles they are.

    Programs are numbered as `attention_tile.find_tile` numbers tiles, by TILES at a time. Rows
    past the last sequence are one more sequence, number B, of which nothing is seen.
    Returns: sequence, first token of the one and of the other, end and length of the sequence,
    count.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    TOKENS: gl.constexpr = QUERIES * TILES
    index = gl.arange(0, MANY, layout=layout)
    begins = gl.load(starts + index, mask=index <= B, other=0)
    ends = gl.load(starts + index + 1, mask=index < B, other=T)
    lengths_of = gl.load(lengths + index, mask=index < B, other=0)
    held = (begins // TOKENS + index <= number) & (index <= B)
    sequence = gl.sum(held.to(gl.int32), axis=0) - 1
    is_own = index == sequence
    begin = gl.sum(gl.where(is_own, begins, 0), axis=0)
    end = gl.sum(gl.where(is_own, ends, 0), axis=0)
    length = gl.sum(gl.where(is_own, lengths_of, 0), axis=0)
    light = number - begin // TOKENS - sequence
    heavy = light
    if TILES == 2:
        heavy = (end - begin + QUERIES - 1) // QUERIES - 1 - light
    count = gl.where(begin + light * QUERIES < end, gl.minimum(heavy - light + 1, TILES), 0)
    count = gl.maximum(count, 0)
    return sequence, begin + heavy * QUERIES, begin + light * QUERIES, end, length, count


@gluon.jit
def reach(first, end, shift, sequence, B, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """Keys that a tile sees, their blocks, and how many of those some row does not see."""
    stop = gl.where(sequence == B, 0, shift + gl.minimum(first + QUERIES, end))
    blocks = (stop + KEYS - 1) // KEYS
    return stop, blocks, gl.maximum(blocks - gl.minimum(shift + first + 1, stop) // KEYS, 1)


@gluon.jit
def copy_block(
    source, target, full, key, stop, table, column, PAGE: gl.constexpr, COPIED: gl.constexpr
):  # fmt: skip
    """Start the copy of one block of keys or values, page by page."""
    KEYS: gl.constexpr = target.shape[0]
    mbarrier.expect(full, KEYS * target.shape[1] * 2)
    for part in gl.static_range(KEYS // COPIED):
        at = key + part * COPIED
        page = gl.load(table + gl.minimum(at, stop - 1) // PAGE)
        spot = target.slice(part * COPIED, COPIED, 0)
        tma.async_copy_global_to_shared(source, [page * PAGE + at % PAGE, column], full, spot)


@gluon.jit
def copy_all(
    k, v, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
    heavy, light, count, end, shift, sequence, table, B, column,
    QUERIES: gl.constexpr, PAGE: gl.constexpr, COPIED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: blocks of each tile, the last one first."""
    KEYS: gl.constexpr = k_tiles.shape[1]
    copied = 0
    for turn in range(count):
        first = gl.where(turn == 0, heavy, light)
        stop, blocks, _ = reach(first, end, shift, sequence, B, QUERIES, KEYS)
        for block in range(blocks):
            key = (blocks - 1 - block) * KEYS
            stage = copied % STAGES
            # The buffer's first turn waits for nothing.
            left = (copied // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), left)
            copy_block(
                k, k_tiles.index(stage), k_full.index(stage), key, stop, table, column,
                PAGE, COPIED,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), left)
            copy_block(
                v, v_tiles.index(stage), v_full.index(stage), key, stop, table, column,
                PAGE, COPIED,
            )  # fmt: skip
            copied += 1


@gluon.jit
def clear_rows(tile, rows):
    """Zeros from row ``rows`` on: nobody wrote there, and zero weights times NaN are NaN.

    Both warpgroups do it, to the same effect.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    for part in gl.static_range(tile.shape[0] // SOME_ROWS):
        some = tile.slice(part * SOME_ROWS, SOME_ROWS, 0)
        row = part * SOME_ROWS + gl.arange(0, SOME_ROWS, layout=gl.SliceLayout(1, layout))
        some.store(gl.where(row[:, None] < rows, some.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def soften(s, top, total, factor, position, key, stop, MASKED: gl.constexpr):
    """Weights of a block's scores, the running softmax, and what shrinks earlier sums."""
    if MASKED:
        KEYS: gl.constexpr = s.shape[1]
        index = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
        at = key + index[None, :]
        s = gl.where((at <= position[:, None]) & (at < stop), s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, axis=1) * factor)
    p = gl.exp2(s * factor - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    total = total * shrink + gl.sum(p, axis=1)
    return p, new_top, total, shrink


@gluon.jit
def scores_of(q_tile, k_tiles, k_full, done, STAGES: gl.constexpr, OF_SCORES: gl.constexpr):
    """Begin the product of a tile's rows and a block of keys."""
    stage = done % STAGES
    mbarrier.wait(k_full.index(stage), done // STAGES & 1)
    ROWS: gl.constexpr = q_tile.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[1]
    none = gl.zeros([ROWS, KEYS], gl.float32, layout=OF_SCORES)
    keys = k_tiles.index(stage).permute((1, 0))
    return warpgroup_mma(q_tile, keys, none, use_acc=False, is_async=True)


@gluon.jit
def add_values(p, acc, v_tiles, v_full, done, STAGES: gl.constexpr):
    """Begin to add the values of a block."""
    stage = done % STAGES
    mbarrier.wait(v_full.index(stage), done // STAGES & 1)
    return warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)


@gluon.jit
def add_block(
    done, q_tile, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, p, acc, top, total, factor,
    position, key, stop,
    MASKED: gl.constexpr, STAGES: gl.constexpr, OF_SCORES: gl.constexpr, OF_SUMS: gl.constexpr,
    OF_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """The scores of block ``done``, while the values of the one before are added."""
    s = scores_of(q_tile, k_tiles, k_full, done, STAGES, OF_SCORES)
    made = add_values(p, acc, v_tiles, v_full, done - 1, STAGES)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(done % STAGES), count=1)
    weights, top, total, shrink = soften(s, top, total, factor, position, key, stop, MASKED)
    ready = gl.convert_layout(weights.to(p.dtype), OF_WEIGHTS)
    acc, p, ready = warpgroup_mma_wait(0, deps=(made, p, ready))
    mbarrier.arrive(v_empty.index((done - 1) % STAGES), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OF_SUMS))[:, None]
    return ready, acc, top, total


@gluon.jit
def places_of(
    first, end, group, stride_token, stride_head,
    PART: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, OF_ROWS: gl.constexpr,
):  # fmt: skip
    """Where a warpgroup's rows of a tile lie, [ROWS, D], and which of them there are."""
    row = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF_ROWS))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, OF_ROWS))
    token = first + row // HEADS
    head = group * HEADS + row % HEADS
    spot = token.to(gl.int64)[:, None] * stride_token + head[:, None] * stride_head
    return spot + column[None, :], (row < QUERIES * HEADS) & (token < end)


@gluon.jit
def multiply_tile(
    done, q_tile, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
    acc, top, total, factor, position, stop, blocks, masked, written,
    STAGES: gl.constexpr, OF_SCORES: gl.constexpr, OF_SUMS: gl.constexpr, OF_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """All blocks of keys that a tile sees, the last one first; at least one.

    Args: written: keys of the sequence that somebody wrote.
    Returns: blocks done by now, the sums and their total.
    """
    KEYS: gl.constexpr = k_tiles.shape[1]
    key = (blocks - 1) * KEYS
    s = scores_of(q_tile, k_tiles, k_full, done, STAGES, OF_SCORES)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(done % STAGES), count=1)
    weights, top, total, _ = soften(s, top, total, factor, position, key, stop, True)
    p = gl.convert_layout(weights.to(q_tile.dtype), OF_WEIGHTS)
    if key + KEYS > written:
        mbarrier.wait(v_full.index(done % STAGES), done // STAGES & 1)
        clear_rows(v_tiles.index(done % STAGES), written - key)
    for _ in range(1, masked):
        done += 1
        key -= KEYS
        p, acc, top, total = add_block(
            done, q_tile, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
            p, acc, top, total, factor, position, key, stop, True, STAGES,
            OF_SCORES, OF_SUMS, OF_WEIGHTS,
        )  # fmt: skip
    for _ in range(masked, blocks):
        done += 1
        key -= KEYS
        p, acc, top, total = add_block(
            done, q_tile, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
            p, acc, top, total, factor, position, key, stop, False, STAGES,
            OF_SCORES, OF_SUMS, OF_WEIGHTS,
        )  # fmt: skip
    made = add_values(p, acc, v_tiles, v_full, done, STAGES)
    acc, p = warpgroup_mma_wait(0, deps=(made, p))
    mbarrier.arrive(v_empty.index(done % STAGES), count=1)
    return done + 1, acc, total


@gluon.jit
def multiply_all(
    q, out, q_tiles, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
    heavy, light, count, end, shift, sequence, B, group, factor,
    q_token, q_head, out_token, out_head,
    PART: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: half of the rows of each tile."""
    ROWS: gl.constexpr = q_tiles.shape[1]
    KEYS: gl.constexpr = k_tiles.shape[1]
    D: gl.constexpr = k_tiles.shape[2]
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, KEYS, 16])
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    OF_WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OF_SUMS, 2)
    OF_ROWS: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0]
    )
    for turn in gl.static_range(TILES):
        # Both are read before anything is multiplied.
        first = heavy if turn == 0 else light
        spot, valid = places_of(
            first, end, group, q_token, q_head, PART, ROWS, D, HEADS, QUERIES, OF_ROWS
        )  # fmt: skip
        there = valid & (turn < count)
        rows = gl.load(q + spot, mask=there[:, None], other=0.0)
        q_tiles.index(PART * TILES + turn).store(rows)
    fence_async_shared()
    done = 0
    for turn in range(count):
        first = gl.where(turn == 0, heavy, light)
        stop, blocks, masked = reach(first, end, shift, sequence, B, QUERIES, KEYS)
        q_tile = q_tiles.index(PART * TILES + turn)
        row = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF_SCORES))
        position = shift + first + row // HEADS
        acc = gl.zeros([ROWS, D], gl.float32, layout=OF_SUMS)
        top = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, OF_SCORES))
        total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, OF_SCORES))
        if blocks > 0:
            done, acc, total = multiply_tile(
                done, q_tile, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
                acc, top, total, factor, position, stop, blocks, masked, shift + end,
                STAGES, OF_SCORES, OF_SUMS, OF_WEIGHTS,
            )  # fmt: skip
        share = 1.0 / gl.where(total == 0.0, 1.0, total)
        acc = acc * gl.convert_layout(share, gl.SliceLayout(1, OF_SUMS))[:, None]
        # By shared memory, where nobody needs the queries any more: whole rows are stored.
        q_tile.store(acc.to(out.dtype.element_ty))
        spot, valid = places_of(
            first, end, group, out_token, out_head, PART, ROWS, D, HEADS, QUERIES, OF_ROWS
        )  # fmt: skip
        gl.store(out + spot, q_tile.load(OF_ROWS), mask=valid[:, None])


@gluon.jit
def attention_warpgroups(
    q, k, v, out, starts, lengths, table,
    T, B, groups, factor,
    q_token, q_head, out_token, out_head, table_row,
    GROUP: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, PAGE: gl.constexpr, MANY: gl.constexpr, D: gl.constexpr,
    COPIED: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Attention of TILES tiles: each QUERIES tokens times HEADS heads of one key head.

    Shapes: q [T, H, D], k and v: descriptors of [pages * PAGE, G * D] in boxes of [COPIED, D],
    out [T, H, D], table [B, pages].
    """
    program = gl.program_id(0)
    group = program % groups
    number = (gl.num_programs(0) - 1 - program) // groups
    sequence, heavy, light, end, length, count = find_tiles(
        number, starts, lengths, T, B, QUERIES, TILES, MANY
    )  # fmt: skip
    own = gl.minimum(sequence, B - 1)
    shift = length - end  # from token to position
    table += own.to(gl.int64) * table_row
    column = group * HEADS // GROUP * D
    HALF: gl.constexpr = ROWS // 2
    element: gl.constexpr = out.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], element)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], element)
    q_tiles = gl.allocate_shared_memory(element, [2 * TILES, HALF, D], q_layout)
    k_tiles = gl.allocate_shared_memory(element, [STAGES, KEYS, D], layout)
    v_tiles = gl.allocate_shared_memory(element, [STAGES, KEYS, D], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        # Both warpgroups leave a buffer before it is filled again.
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_all, (
                q, out, q_tiles, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
                heavy, light, count, end, shift, sequence, B, group, factor,
                q_token, q_head, out_token, out_head, 0, HEADS, QUERIES, TILES, STAGES,
            )),
            (multiply_all, (
                q, out, q_tiles, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
                heavy, light, count, end, shift, sequence, B, group, factor,
                q_token, q_head, out_token, out_head, 1, HEADS, QUERIES, TILES, STAGES,
            )),
            (copy_all, (
                k, v, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty,
                heavy, light, count, end, shift, sequence, table, B, column,
                QUERIES, PAGE, COPIED, STAGES,
            )),
        ],
        [4, 1],
        [MULTIPLYING_REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip
