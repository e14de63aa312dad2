"""Collectives, and the few other ops that differ from rank to rank.

Two forms, told apart by the attribute ``ranks``:

- *global* (``ranks`` 0): types carry global shapes and shardings. On the whole tensor each op is
  the identity; what it does to the parts stands in its sharding rule (`ir.sharding`). A missing one
  is a type error.
- *local* (``ranks`` N, after the pass `localize`): types are those of one rank's part, and the op
  changes the shape. What the ranks of an axis do together is `exchange`, which the simulated ranks
  of `ir.simulate` run; `take_shard` and `local_index` need no peer, only the rank's own number.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from metainfer.ir.dtypes import Block, BlockArray
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops.infer import integers_of, tensor_of
from metainfer.ir.ops.record import COLLECTIVE, RAW, Array, Attrs, op
from metainfer.ir.types import TensorType, Type


def _ranks(attrs: Attrs) -> int:
    ranks = int(cast(int, attrs["ranks"]))
    if ranks < 0:
        raise TypeMismatch(f"ranks = {ranks}: 0 for global types, else the size of the axis")
    return ranks


def _place(attrs: Attrs, key: str, x: TensorType) -> int:
    place = int(cast(int, attrs[key]))
    if not 0 <= place < x.rank:
        raise TypeMismatch(f"{key} = {place} is no dim of {x}")
    return place


def _scaled(x: TensorType, place: int, times: int = 1, parts: int = 1) -> TensorType:
    """The type with one dim multiplied by ``times`` and cut into ``parts``."""
    size = x.shape[place] * times
    if size.is_static and size.static % parts:
        raise TypeMismatch(f"dim {place} of {x} does not divide by {parts} ranks")
    extent = block_extent(x, place)
    if parts > 1 and extent and size.static // parts % extent:
        raise TypeMismatch(
            f"{parts} ranks cut blocks of {extent} in dim {place} of {x}",
            advice="refine the scales, or leave the dim whole",
        )
    shape = list(x.shape)
    shape[place] = size.ceildiv(parts)
    return x.with_shape(tuple(shape))


def block_extent(x: TensorType, place: int) -> int:
    """Elements of a dim that one scale of a block format spans, 0 for a plain type.

    Nor is a border in the way of a scale that spans a whole dim ("row"): every part keeps a copy.
    """
    return x.dtype.extents(x.rank)[place] if isinstance(x.dtype, Block) else 0


def _infer_same(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _ranks(attrs)
    return (tensor_of(types[0]),)


def _infer_gathered(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, ranks = tensor_of(types[0]), _ranks(attrs)
    return (_scaled(x, _place(attrs, "dim", x), times=ranks) if ranks else x,)


def _infer_scattered(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, ranks = tensor_of(types[0]), _ranks(attrs)
    return (_scaled(x, _place(attrs, "dim", x), parts=ranks) if ranks else x,)


def _infer_exchanged(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, ranks = tensor_of(types[0]), _ranks(attrs)
    if not ranks:
        return (x,)
    source, target = _place(attrs, "source", x), _place(attrs, "target", x)
    return (_scaled(_scaled(x, target, parts=ranks), source, times=ranks),)


def _infer_shard(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, ranks = tensor_of(types[0]), _ranks(attrs)
    parts = int(cast(int, attrs["parts"])) or ranks
    if ranks and (parts < 1 or ranks % parts):
        raise TypeMismatch(f"{parts} parts over {ranks} ranks", advice="parts divide the ranks")
    return (_scaled(x, _place(attrs, "dim", x), parts=parts) if ranks else x,)


@op("all_reduce", infer=_infer_same, shard="partial => whole", traits=[COLLECTIVE])
def all_reduce(x: Array, *, axis: str, ranks: int = 0) -> Array:
    """Finish a sum that is pending over an axis of the mesh; every rank gets all of it.

    Shapes: local [...] -> the same.
    """
    return x


@op("reduce_scatter", infer=_infer_scattered, shard="partial => dim", traits=[COLLECTIVE])
def reduce_scatter(x: Array, *, axis: str, dim: int, ranks: int = 0) -> Array:
    """Finish a sum that is pending over an axis; every rank keeps its part of a dim.

    Shapes: local [..., N, ...] -> [..., N/ranks, ...].
    """
    return x


@op("all_gather", infer=_infer_gathered, shard="dim => whole", traits=[COLLECTIVE])
def all_gather(x: Array, *, axis: str, dim: int, ranks: int = 0) -> Array:
    """Bring the parts of a dim together on every rank of an axis.

    Shapes: local [..., N, ...] -> [..., N*ranks, ...].
    """
    return x


@op("all_to_all", infer=_infer_exchanged, shard="source => target", traits=[COLLECTIVE])
def all_to_all(x: Array, *, axis: str, source: int, target: int, ranks: int = 0) -> Array:
    """Exchange parts, so that another dim is the sharded one.

    Shapes: local [S, T] -> [S*ranks, T/ranks] for source 0, target 1.
    """
    return x


@op("take_shard", infer=_infer_shard, shard="whole => dim", traits=[COLLECTIVE, RAW])
def take_shard(
    x: Array | BlockArray, *, axis: str, dim: int, ranks: int = 0, parts: int = 0
) -> Array | BlockArray:
    """Keep each rank's own part of a dim that every rank holds whole; nothing is sent.

    With ``parts`` fewer than ranks, neighbouring ranks keep the same part.
    Shapes: local [..., N, ...] -> [..., N/parts, ...].
    """
    return x


def _infer_local_index(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    ids, count = integers_of(types[0], "row numbers"), int(cast(int, attrs["count"]))
    if count < 1 or _ranks(attrs) < 1:
        raise TypeMismatch(f"local_index of {ids}: {attrs['ranks']} ranks of {count} rows each")
    return (ids,)


@op("local_index", infer=_infer_local_index)
def local_index(ids: Array, *, axis: str, ranks: int, count: int) -> Array:
    """Number rows within a rank's own ``count`` rows of a sharded table, -1 for all others.

    Ops that look rows up pass over -1: a zero row of `embedding`, nothing added by `experts`.
    Shapes: ids [...] -> the same.
    """
    # The only rank of an axis of one.
    return np.where((ids >= 0) & (ids < count), ids, -1)


def own_part(x: Array | BlockArray, dim: int, parts: int, part: int) -> Array | BlockArray:
    """One of equal parts of a dim; blocks of a format stay whole.

    Raises: TypeMismatch if the dim does not divide.
    """
    size = x.shape[dim]
    if size % parts:
        raise TypeMismatch(f"dim {dim} of {list(x.shape)} does not divide by {parts} parts")
    return rows_of(x, dim, part * (size // parts), (part + 1) * (size // parts))


def rows_of(x: Array | BlockArray, dim: int, start: int, stop: int) -> Array | BlockArray:
    """``start:stop`` of a dim; of a block format, the start must be that of a block.

    Raises: TypeMismatch if a block would be cut.
    """
    if not isinstance(x, BlockArray):
        return _cut(x, dim, start, stop)
    return x.part(dim, start, stop)


def _cut(x: Array, dim: int, start: int, stop: int) -> Array:
    return x[(slice(None),) * dim + (slice(start, stop),)]


def exchange(name: str, parts: Sequence[Array], attrs: Attrs) -> list[Array]:
    """What a collective gives each rank of its axis.

    Sums are taken in float32 in rank order and rounded once, the reference for every algorithm.

    Args:
        name: of the op, in local form.
        parts: operand of each rank, in order along the axis.
        attrs: complete attributes.

    Raises: TypeMismatch for an op that exchanges nothing.
    """
    if name == "all_gather":
        whole = np.concatenate(parts, axis=int(cast(int, attrs["dim"])))
        return [whole] * len(parts)
    if name == "all_to_all":
        source, target = (int(cast(int, attrs[k])) for k in ("source", "target"))
        cut = [np.split(p, len(parts), axis=target) for p in parts]
        return [np.concatenate([c[i] for c in cut], axis=source) for i in range(len(parts))]
    if name not in ("all_reduce", "reduce_scatter"):
        raise TypeMismatch(f"{name} exchanges nothing")
    wide = np.float32 if parts[0].dtype.kind in ("f", "V") else parts[0].dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    total = total.astype(parts[0].dtype)
    if name == "all_reduce":
        return [total] * len(parts)
    return np.split(total, len(parts), axis=int(cast(int, attrs["dim"])))


def own(name: str, x: Array | BlockArray, attrs: Attrs, number: int) -> Array | BlockArray:
    """What an op makes that needs no peer, on the rank of that number along its axis.

    Raises: TypeMismatch for any other op.
    """
    ranks = int(cast(int, attrs["ranks"]))
    if name == "take_shard":
        parts = int(cast(int, attrs["parts"])) or ranks
        return own_part(x, int(cast(int, attrs["dim"])), parts, number * parts // ranks)
    if name != "local_index" or isinstance(x, BlockArray):
        raise TypeMismatch(f"{name} needs its peers")
    count = int(cast(int, attrs["count"]))
    local = x - number * count
    kept: Array = np.where((x >= 0) & (local >= 0) & (local < count), local, -1).astype(x.dtype)
    return kept


# Ops in which ranks meet; the others need only their own number.
MEETING = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all"})
OWN = frozenset({"take_shard", "local_index"})

__all__ = [
    "MEETING",
    "OWN",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "block_extent",
    "exchange",
    "local_index",
    "own",
    "own_part",
    "reduce_scatter",
    "rows_of",
    "take_shard",
]
