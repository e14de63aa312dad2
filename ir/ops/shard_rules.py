"""Sharding rules that depend on ranks and attributes: functions that write the rule's text.

The notation is that of `ir.shard_rule`. Each function gets operand types and complete attributes.
"""

from collections.abc import Collection, Sequence
from typing import cast

from metainfer.ir.dims import Dim, dim, same_product
from metainfer.ir.dtypes import BOOL, Block, parse_dtype
from metainfer.ir.ops.infer import axis_of, ints_of, sizes_of, tensor_of
from metainfer.ir.ops.record import Attrs, ShardRule
from metainfer.ir.types import Type


def _names(rank: int, whole: Collection[int] = (), prefix: str = "d") -> list[str]:
    """``d0 d1! d2``: a name for each dim, those in ``whole`` unshardable."""
    return [f"{prefix}{i}!" if i in whole else f"{prefix}{i}" for i in range(rank)]


def _rule(operands: Sequence[Sequence[str]], result: Sequence[str], sums: str = "") -> str:
    left = ", ".join(" ".join(term) for term in operands)
    tail = f" ; sums {sums}" if sums else ""
    return f"{left} -> {' '.join(result)}{tail}"


def whole_dim(*, sums: str = "") -> ShardRule:
    """The dim named by the attribute ``dim`` must be whole in every operand and the result."""

    def rule(types: Sequence[Type], attrs: Attrs) -> str:
        rank = tensor_of(types[0]).rank
        names = _names(rank, [axis_of(attrs["dim"], rank)])
        return _rule([names] * len(types), names, sums)

    return rule


def reduced(mark: str, *, sums: str = "", key: str = "dims") -> ShardRule:
    """Dims named by an attribute vanish or become 1; ``mark`` is "+" for sums, "!" for others."""

    def rule(types: Sequence[Type], attrs: Attrs) -> str:
        x = tensor_of(types[0])
        rank, value = x.rank, attrs[key]
        axes = {axis_of(a, rank) for a in (value if isinstance(value, tuple) else (value,))}
        # Truth values are joined by or, which no pending sum stands for.
        vanishing = "!" if x.dtype == BOOL else mark
        names = [f"d{i}{vanishing}" if i in axes else f"d{i}" for i in range(rank)]
        kept = [f"one{i}!" if i in axes else f"d{i}" for i in range(rank)]
        if not attrs.get("keep", False):
            kept = [name for i, name in enumerate(kept) if i not in axes]
        return _rule([names], kept, sums)

    return rule


def divide(types: Sequence[Type], attrs: Attrs) -> str:
    """Quotients of floats are linear in the first operand; those of integers are rounded."""
    return "...= ; sums 0" if tensor_of(types[0]).dtype.is_float else "...="


def linear(types: Sequence[Type], attrs: Attrs) -> str:
    """A product by a weight; a bias would be added once per rank to a pending sum."""
    return "... K+, N K+, N -> ... N" if len(types) > 2 else "... K+, N K+ -> ... N ; sums 0 | 1"


def matmul(types: Sequence[Type], attrs: Attrs) -> str:
    """A batched product of two activations."""
    second = "... N K+" if attrs["transpose_b"] else "... K+ N"
    return f"... M K+, {second} -> ... M N ; sums 0 | 1"


def conv2d(types: Sequence[Type], attrs: Attrs) -> str:
    """Channels are contracted unless grouped; images stay whole, kernels overlap."""
    channels = "C+" if attrs["groups"] == 1 else "C!"
    outputs = "O" if attrs["groups"] == 1 else "O!"
    operands = [f"N {channels} H! W!", f"{outputs} {channels} h! w!", outputs][: len(types)]
    sums = "" if len(types) > 2 else " ; sums 0 | 1"
    return f"{', '.join(operands)} -> N {outputs} Y! X!{sums}"


def sdpa(types: Sequence[Type], attrs: Attrs) -> str:
    """Heads and batch dims are free; queries too, unless their number means a position."""
    queries = "S!" if attrs["causal"] else "S"
    terms = [f"... H {queries} D!", "... H L! D!", "... H L! E!"]
    if len(types) > 3:
        rank = tensor_of(types[3]).rank
        named = ["H", queries, "L!"][max(0, 3 - rank) :]
        terms.append(" ".join([*(["..."] if rank > 3 else []), *named]))
    return f"{', '.join(terms)} -> ... H {queries} E!"


def gather(types: Sequence[Type], attrs: Attrs) -> str:
    """The dim that rows are taken from is whole."""
    x, index = tensor_of(types[0]), tensor_of(types[1])
    names, chosen = _names(x.rank, [0]), _names(index.rank, prefix="i")
    return _rule([names, chosen], [*chosen, *names[1:]], "0")


def transpose(types: Sequence[Type], attrs: Attrs) -> str:
    """Names move with their dims."""
    names = _names(tensor_of(types[0]).rank)
    return _rule([names], [names[i] for i in ints_of(attrs["perm"])], "0")


def broadcast(types: Sequence[Type], attrs: Attrs) -> str:
    """Repeated dims are whole."""
    x, shape = tensor_of(types[0]), sizes_of(attrs["shape"])
    names = _names(x.rank)
    result = [f"new{i}!" for i in range(len(shape) - x.rank)]
    for i, (have, want) in enumerate(zip(x.shape, shape[len(result) :], strict=True)):
        result.append(names[i] if have == want else f"one{i}!")
    return _rule([names], result, "0")


def reshape(types: Sequence[Type], attrs: Attrs) -> str:
    """A dim that is split or merged stays sharded in its outermost factor.

    ``[T, 576] -> [T, 9, 64]`` is ``d0 d1 -> d0 d1 r2!``: contiguous parts of 576 are contiguous
    heads, provided that the heads divide by the ranks, which the mesh tells.
    """
    before, after = tensor_of(types[0]).shape, sizes_of(attrs["shape"])
    names, result = (
        _names(len(before), range(len(before))),
        _names(len(after), range(len(after)), "r"),
    )
    for group, (olds, news) in enumerate(_groups(before, after)):
        old, new = _first_factor(before, olds), _first_factor(after, news)
        if old is not None and new is not None:
            names[old] = result[new] = f"g{group}"
    return _rule([names], result, "0")


def _first_factor(shape: Sequence[Dim], places: Sequence[int]) -> int | None:
    return next((i for i in places if shape[i] != dim(1)), None)


def _groups(
    before: Sequence[Dim], after: Sequence[Dim]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Shortest runs of dims on both sides whose products are equal, outermost first."""
    ends = [
        (i, j)
        for i in range(1, len(before) + 1)
        for j in range(1, len(after) + 1)
        if same_product(before[:i], after[:j])
    ]
    groups: list[tuple[Sequence[int], Sequence[int]]] = []
    i = j = 0
    for end in sorted(ends, key=sum):
        if end[0] > i and end[1] > j:
            groups.append((range(i, end[0]), range(j, end[1])))
            i, j = end
    return groups


def quantize(types: Sequence[Type], attrs: Attrs) -> str:
    """A dim that one scale spans must be whole."""
    rank = tensor_of(types[0]).rank
    format_ = cast(Block, parse_dtype(str(attrs["format"])))
    names = _names(rank, format_.whole_dims(rank))
    return _rule([names], names)


def whole_rows(types: Sequence[Type], attrs: Attrs) -> str:
    """Rows are whole, since joining or reordering parts of them is no part of the result."""
    names = _names(tensor_of(types[0]).rank, [0])
    return _rule([names] * len(types), names)
