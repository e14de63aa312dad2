"""Taking elements by index, along any dim; sorting."""

from collections.abc import Sequence

import torch

from metainfer.compiler.aten.table import Call, argument, lowers, size_value
from metainfer.compiler.lowering import Lowering, as_attr, fake
from metainfer.ir.dims import Dim, dim
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Value


@lowers("index_select")
def _index_select(s: Lowering, n: Call) -> Value:
    x, index = s.value(n.args[0]), s.value(n.args[2])
    return _taken(s, x, s.axis(n.args[1], x.tensor.rank), index)


def _taken(s: Lowering, x: Value, axis: int, index: Value) -> Value:
    """Rows of one dim; the index's dims stand in its place."""
    if axis == 0:
        return s.emit("gather", x, index)
    front = (axis, *(i for i in range(x.tensor.rank) if i != axis))
    rows = s.emit("gather", s.emit("transpose", x, perm=front), index)
    # [index..., before..., after...] -> [before..., index..., after...]
    count = index.tensor.rank
    before = tuple(range(count, count + axis))
    after = tuple(range(count + axis, rows.tensor.rank))
    return s.emit("transpose", rows, perm=(*before, *range(count), *after))


@lowers("index")
def _index(s: Lowering, n: Call) -> Value:
    """x[:, i], x[i, j]: neighbouring integer tensors after some whole dims."""
    x, given = s.value(n.args[0]), list(n.args[1])
    while given and given[-1] is None:
        given.pop()
    first = next((i for i, v in enumerate(given) if v is not None), 0)
    indices = given[first:]
    if not indices or any(v is None or fake(v).dtype == torch.bool for v in indices):
        raise Unsupported(
            "indexing by a mask, or by tensors with a whole dim between them",
            advice="index by integer tensors of neighbouring dims, or use torch.where",
        )
    sizes = x.tensor.shape[first : first + len(indices)]
    wrapped = [_wrapped(s, s.value(v), size) for v, size in zip(indices, sizes, strict=True)]
    if len(wrapped) == 1:
        return _taken(s, x, first, wrapped[0])
    number = wrapped[0]
    for index, size in zip(wrapped[1:], sizes[1:], strict=True):
        number = s.emit(
            "add", s.emit("mul", number, size_value(s, size, number.tensor.dtype.name)), index
        )
    count = sizes[0]
    for size in sizes[1:]:
        count = count * size
    rest = x.tensor.shape[first + len(indices) :]
    flat = s.reshape(x, [*x.tensor.shape[:first], count, *rest])
    return _taken(s, flat, first, number)


def _wrapped(s: Lowering, index: Value, size: Dim) -> Value:
    """An index whose negative numbers count from the end, as those of Python do."""
    if _is_place(s, index):
        return index
    zero = s.scalar(0, index.tensor.dtype.name)
    from_end = s.emit("add", index, size_value(s, size, index.tensor.dtype.name))
    return s.emit("where", s.emit("lt", index, zero), from_end, index)


# Ops whose results are numbers of places, and ops that keep them so.
_PLACES = frozenset({"topk", "argmax", "iota"})
_KEEPING = frozenset({"reshape", "transpose", "slice", "broadcast", "cast"})


def _is_place(s: Lowering, index: Value) -> bool:
    """Whether an index is never negative, since it says where something was found."""
    for op in reversed(s.builder.ops):
        if index.name not in [v.name for v in op.results]:
            continue
        if op.name in _PLACES:
            return op.name != "iota" or op.attr.get("start", 0) == 0
        if op.name not in _KEEPING:
            return False
        index = op.operands[0]
    return False


@lowers("gather")
def _gather(s: Lowering, n: Call) -> Value:
    """Elements along one dim: rows of the flat tensor, numbered by place."""
    x, index = s.value(n.args[0]), s.value(n.args[2])
    rank = x.tensor.rank
    axis = s.axis(n.args[1], rank)
    others = [i for i in range(rank) if i != axis]
    if any(x.tensor.shape[i] != index.tensor.shape[i] for i in others):
        raise Unsupported(
            f"gather from {x.tensor} by {index.tensor}",
            advice="cut the tensor to the index's size in all dims but the gathered one",
        )
    last = (*others, axis)
    x, index = (s.emit("transpose", v, perm=last) for v in (x, index))
    width, lead = x.tensor.shape[-1], x.tensor.shape[:-1]
    rows = dim(1)
    for size in lead:
        rows = rows * size
    number = s.emit("iota", size=rows.attr, dtype=index.tensor.dtype.name)
    start = s.reshape(
        s.emit("mul", number, size_value(s, width, index.tensor.dtype.name)), (*lead, dim(1))
    )
    made = s.emit("gather", s.reshape(x, [rows * width]), s.emit("add", start, index))
    return s.emit("transpose", made, perm=tuple(last.index(i) for i in range(rank)))


@lowers("one_hot")
def _one_hot(s: Lowering, n: Call) -> Value:
    classes = argument(n, 1, "num_classes", -1)
    if not isinstance(classes, int) or classes < 1:
        raise Unsupported("one_hot with as many classes as the data has", advice="give num_classes")
    x = s.value(n.args[0])
    numbers = s.emit("iota", size=classes, dtype=x.tensor.dtype.name)
    return s.cast(s.emit("eq", s.reshape(x, (*x.tensor.shape, dim(1))), numbers), "i64")


@lowers("flip")
def _flip(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    for given in n.args[1]:
        axis = s.axis(given, x.tensor.rank)
        size = x.tensor.shape[axis]
        up = s.emit("iota", size=size.attr)
        down = s.emit(
            "sub", s.emit("sub", size_value(s, size, up.tensor.dtype.name), s.scalar(1, "i64")), up
        )
        x = _taken(s, x, axis, down)
    return x


@lowers("roll")
def _roll(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    shifts, dims = _listed(n.args[1]), _listed(argument(n, 2, "dims", []))
    if len(dims) != len(shifts):
        raise Unsupported("roll of a flattened tensor", advice="name the dims")
    for shift, given in zip(shifts, dims, strict=True):
        axis = s.axis(given, x.tensor.rank)
        size = x.tensor.shape[axis]
        cut = size - shift % size.constant if size.is_static else size - shift
        if not size.is_static and shift < 0:
            cut = dim(-shift)
        parts = ((cut, size), (dim(0), cut))
        x = s.emit(
            "concat",
            *(s.emit("slice", x, dim=axis, start=a.attr, stop=b.attr) for a, b in parts),
            dim=axis,
        )
    return x


def _listed(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


# --- order -------------------------------------------------------------------------------------


@lowers("topk")
def _topk(s: Lowering, n: Call) -> tuple[Value, Value]:
    axis, largest = argument(n, 2, "dim", -1), argument(n, 3, "largest", True)
    return _ordered(s, s.value(n.args[0]), n.args[1], axis, largest=largest)


@lowers("sort", "argsort")
def _sort(s: Lowering, n: Call) -> tuple[Value, Value] | Value:
    """All of a dim in order; equal elements stay in their order."""
    stable = "stable" in n.target._overloadname
    axis = argument(n, 2 if stable else 1, "dim", -1)
    descending = bool(argument(n, 3 if stable else 2, "descending", False))
    x = s.value(n.args[0])
    size = x.tensor.shape[s.axis(axis, x.tensor.rank)]
    if not size.is_static:
        raise Unsupported(f"sorting {size} elements", advice="sort along a dim of a fixed size")
    made = _ordered(s, x, size.constant, axis, largest=descending)
    return made[1] if "argsort" in str(n.target) else made


def _ordered(s: Lowering, x: Value, count: int, axis: int, *, largest: bool) -> tuple[Value, Value]:
    """The first elements in order along a dim, and their places."""
    axis, rank = s.axis(axis, x.tensor.rank), x.tensor.rank
    swap = list(range(rank))
    swap[axis], swap[-1] = swap[-1], swap[axis]
    moved = x if axis == rank - 1 else s.emit("transpose", x, perm=tuple(swap))
    values, places = s.emit_many("topk", moved if largest else s.emit("neg", moved), k=count)
    values = values if largest else s.emit("neg", values)
    if axis == rank - 1:
        return values, places
    return s.emit("transpose", values, perm=tuple(swap)), s.emit(
        "transpose", places, perm=tuple(swap)
    )


@lowers("upsample_nearest2d")
def _upsample(s: Lowering, n: Call) -> Value:
    """Each element repeated; only whole factors."""
    x, wanted = s.value(n.args[0]), [s.to_dim(v) for v in fake(n).shape]
    batch, channels, high, wide = x.tensor.shape
    up, across = (_factor(a, b) for a, b in zip(wanted[2:], (high, wide), strict=True))
    split = s.reshape(x, (batch, channels, high, dim(1), wide, dim(1)))
    shape = (batch, channels, high, dim(up), wide, dim(across))
    return s.reshape(s.emit("broadcast", split, shape=as_attr(shape)), wanted)


def _factor(made: Dim, size: Dim) -> int:
    for factor in range(1, 65):
        if size * factor == made:
            return factor
    raise Unsupported(
        f"upsampling of {size} elements to {made}", advice="whole factors up to 64 are known"
    )
