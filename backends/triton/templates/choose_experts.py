"""The experts of a token by corrected sigmoid scores, one program a token (op `choose_experts`)."""

import triton
import triton.language as tl

from metainfer.backends.triton.templates import early


@triton.jit
def best_groups(choice, member, GROUPS: tl.constexpr, CHOSEN: tl.constexpr):
    """Which groups have the largest sums of their two best members, [GROUPS]; ties: the first."""
    first = tl.max(choice, axis=1)
    at = tl.argmax(choice, axis=1)
    rest = tl.where(member == at[:, None], float("-inf"), choice)
    best = first + tl.max(rest, axis=1)
    number = tl.arange(0, GROUPS)
    kept = number < 0
    for _ in tl.static_range(CHOSEN):
        place = tl.argmax(best, axis=0)
        kept = kept | (number == place)
        best = tl.where(number == place, float("-inf"), best)
    return kept


@triton.jit
def choose_experts(
    logits, correction, shares, ids, scaling, row_stride,
    N: tl.constexpr, EACH: tl.constexpr, MEMBERS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr,
    K: tl.constexpr, PLACES: tl.constexpr, RENORMALISE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row: NUM_GROUPS groups of EACH experts, padded to GROUPS x MEMBERS.

    Shapes: logits [T, N], correction [N], shares f32 [T, K], ids i64 [T, K].
    """
    early.wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None]
    member = tl.arange(0, MEMBERS)[None, :]
    index = group * EACH + member
    inside = (group < NUM_GROUPS) & (member < EACH)
    x = tl.load(logits + row * row_stride + index, mask=inside, other=0.0).to(tl.float32)
    scores = 1.0 / (1.0 + tl.exp(-x))
    added = tl.load(correction + index, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, scores + added, float("-inf"))
    if CHOSEN < NUM_GROUPS:
        kept = best_groups(choice, member, GROUPS, CHOSEN)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    # Padding stands behind the members of its group: the order of places is that of numbers.
    choice = tl.reshape(choice, [GROUPS * MEMBERS])
    scores = tl.reshape(scores, [GROUPS * MEMBERS])
    number = tl.reshape(tl.broadcast_to(index, [GROUPS, MEMBERS]), [GROUPS * MEMBERS])
    at = tl.arange(0, GROUPS * MEMBERS)
    slot = tl.arange(0, PLACES)
    share = tl.zeros([PLACES], tl.float32)
    chosen = tl.zeros([PLACES], tl.int32)
    for j in tl.static_range(K):
        here = at == tl.argmax(choice, axis=0)
        chosen = tl.where(slot == j, tl.sum(tl.where(here, number, 0), axis=0), chosen)
        share = tl.where(slot == j, tl.sum(tl.where(here, scores, 0.0), axis=0), share)
        choice = tl.where(here, float("-inf"), choice)
    if RENORMALISE:
        share = share / (tl.sum(share, axis=0) + 1e-20)
    tl.store(shares + row * K + slot, share * scaling, mask=slot < K)
    tl.store(ids + row * K + slot, chosen.to(tl.int64), mask=slot < K)
