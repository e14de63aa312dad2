"""Formats that a weight may take without asking, what each costs and occupies, and which fit.

An option is a format with the packings that its kernels read. Times are those of a mix: for each
step of a prefill so many steps of a decode that half as many tokens are written as read. So both
phases choose alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from metainfer.backends.kernel import Query
from metainfer.ir.dtypes import BF16, F8E4M3, F8E8M0, F16, F32, Block, DType
from metainfer.ir.format_error import relative_rms
from metainfer.ir.graph import Op
from metainfer.passes.candidates import Candidate, candidates_of, cost_of, query_of, sample_sizes
from metainfer.passes.target import Target
from metainfer.passes.weight_items import WEIGHTS, Item, retyped

# A conversion that loses no more than the rounding to bf16 does needs nobody's consent.
AUTO_LOSS = 2.0**-9
# Codes of e4m3 hold any e2m1 code times a small power of two: exact, and read by fp8 units.
FP8_POWERS = Block(F8E4M3, (0,), F8E8M0)
Limits = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Option:
    """One format of an item, in one choice of packings.

    Units: seconds are those of the mix for one call, bytes those of one call's weights.

    Attributes:
        dtype: the format.
        seconds: predicted time.
        bytes: resident bytes.
        loss: relative root-mean-square error against the checkpoint's values.
        is_made: whether made kernels run it, no generic ones.
        packings: names of the packings, "" for row-major.
    """

    dtype: DType
    seconds: float
    bytes: int
    loss: float
    is_made: bool
    packings: tuple[str, ...]


def formats_for(item: Item, target: Target) -> tuple[DType, ...]:
    """Formats that keep what the checkpoint holds, its own first."""
    own = item.own
    stored = {v.tensor.dtype for v in item.stored}
    found: list[DType] = [] if own is None else [own]
    if any(isinstance(d, Block) for d in stored) or own == F32 or own is None:
        found += [BF16, F32] if any(isinstance(d, Block) for d in stored) else [F32]
    else:
        found += [BF16, F16, F32]
    if target.device.has("fp8_mma") and not target.strategy.exact:
        found.append(FP8_POWERS)
    # F32 last: exact, and the widest.
    return tuple(dict.fromkeys(d for d in found if loss_of(item, d) <= _allowed(target)))


def _allowed(target: Target) -> float:
    return 0.0 if target.strategy.exact else AUTO_LOSS


def loss_of(item: Item, dtype: DType) -> float:
    """Largest relative error of the item's weights in a format, against what is stored."""
    stored = {v.tensor.dtype for v in item.stored}
    return max(0.0 if d == dtype else relative_rms(dtype, d) for d in stored)


def options_for(
    item: Item, dtypes: Sequence[DType], target: Target, limits: Limits
) -> tuple[Option, ...]:
    """Options of some formats; none of a format that no kernel takes.

    One reader may take any packing that it knows; several take their quickest, or their smallest.
    """
    found: list[Option] = []
    for dtype in dtypes:
        if len(item.readers) == 1:
            op = retyped(item.readers[0], dtype)
            made = packing_options(op, WEIGHTS[op.name], target, limits)
            found += [replace(o, loss=loss_of(item, dtype)) for o in made]
            continue
        pair = (_option(item, dtype, target, limits, lean) for lean in (False, True))
        found += [o for o in pair if o is not None]
    return tuple(dict.fromkeys(found))


def _option(item: Item, dtype: DType, target: Target, limits: Limits, lean: bool) -> Option | None:
    """All readers by the quickest packings, or by the smallest."""
    seconds, is_made, sizes = 0.0, True, dict[tuple[str, str], int]()
    packings: list[str] = []
    for reader in item.readers:
        op = retyped(reader, dtype)
        places = WEIGHTS[op.name]
        priced = packing_options(op, places, target, limits)
        if not priced:
            return None
        least = min(priced, key=lambda o: (o.bytes, o.seconds) if lean else (o.seconds, o.bytes))
        is_made = is_made and least.is_made
        seconds += least.seconds
        # Two readers that want the same packing of a weight share it.
        sizes |= _bytes(op, places, least.packings, target)
        packings += least.packings
    total = sum(sizes.values())
    return Option(dtype, seconds, total, loss_of(item, dtype), is_made, tuple(packings))


def packing_options(
    op: Op, places: Sequence[int], target: Target, limits: Limits
) -> tuple[Option, ...]:
    """Every choice of packings that a group's kernels offer, those of made kernels if there are.

    Args:
        op: the group.
        places: numbers of the operands that are weights.
        target: machine and kernels.
        limits: bounds of the sizes.
    """
    query = query_of(op, target, limits, frozenset())
    usable = [c for c in candidates_of(op, query, target) if c.is_usable]
    made = [c for c in usable if not c.kernel.generic]
    groups: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in made or usable:
        key = tuple(candidate.kernel.layouts.get(i, "") for i in places)
        groups.setdefault(key, []).append(candidate)
    dtype = op.operands[places[0]].tensor.dtype
    return tuple(
        Option(
            dtype,
            _seconds(members, query, target, limits),
            sum(_bytes(op, places, key, target).values()),
            0.0,
            bool(made),
            key,
        )
        for key, members in groups.items()
    )


def _bytes(
    op: Op, places: Sequence[int], packings: Sequence[str], target: Target
) -> dict[tuple[str, str], int]:
    """Resident bytes by weight and packing."""
    return {
        (op.operands[i].name, packing): target.costs.resident_bytes(
            replace(op.operands[i].tensor, layout=packing)
        )
        for i, packing in zip(places, packings, strict=True)
        if op.operands[i].is_weight
    }


def _seconds(members: Sequence[Candidate], query: Query, target: Target, limits: Limits) -> float:
    total = 0.0
    for env, times in _mix(target, limits):
        total += times * min(cost_of(c, query, target, env).seconds for c in members)
    return total


def _mix(target: Target, limits: Limits) -> list[tuple[dict[str, int], float]]:
    """Sizes and how often each occurs, the same for both phases of a language model."""
    strategy = target.strategy
    if strategy.phase == "call" or "T" not in limits:
        return [(env, 1.0) for env in sample_sizes(target, limits)]
    typical = {name: high for name, (_, high) in limits.items()}
    prefill = {**typical, "T": strategy.max_tokens}
    decode = {n: strategy.max_sequences if n in ("T", "B", "R") else v for n, v in typical.items()}
    return [(prefill, 1.0), (decode, strategy.max_tokens / 2 / strategy.max_sequences)]


def choose_within(
    options: Sequence[Sequence[Option]], counts: Sequence[float], budget: float
) -> list[Option]:
    """One option of each item: the quickest that together fit, or the leanest if none do.

    Where the quickest do not fit, the swap goes first that frees most bytes for each second lost.

    Args:
        options: of each item, none of them empty.
        counts: how often each item is there, on one rank.
        budget: bytes for all.
    """
    chosen = [min(o, key=lambda p: (not p.is_made, p.seconds, p.bytes)) for o in options]
    total = sum(o.bytes * n for o, n in zip(chosen, counts, strict=True))
    while total > budget:
        swaps = [
            ((now.bytes - other.bytes) / max(other.seconds - now.seconds, 1e-12), i, other)
            for i, now in enumerate(chosen)
            for other in options[i]
            if other.bytes < now.bytes
        ]
        if not swaps:
            break
        _, index, option = max(swaps, key=lambda s: (s[0], -s[1]))
        total -= (chosen[index].bytes - option.bytes) * counts[index]
        chosen[index] = option
    return chosen


def weight_budget(target: Target) -> float:
    """Bytes that the weights of one rank may take.

    A tenth of what the plan may use is left to pages, activations and scratch space.
    """
    return 0.9 * target.device.usable_bytes * target.options.memory_fraction


def count_on_rank(item: Item, target: Target) -> float:
    """How often one rank holds an item: calls, over the ranks that share them or their parts."""
    strategy = target.strategy
    axes = dict(strategy.mesh.axes)
    shared = {"tp"} if item.is_outer else {"pp", "tp"}
    if any(op.name == "experts" for op in item.readers):
        shared |= set(strategy.experts)
    return item.calls / math.prod(axes.get(axis, 1) for axis in shared)
