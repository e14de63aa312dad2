"""Ops that move, repeat or index."""

from typing import Any

from metainfer.compiler.aten.table import Call, argument, lowers, number_of
from metainfer.compiler.lowering import Lowering, as_attr, fake, scalar_name
from metainfer.ir.dims import dim
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Value


@lowers(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as",
    "reshape_as",
)  # fmt: skip
def _reshape(s: Lowering, n: Call) -> Value:
    return s.reshape(s.value(n.args[0]), [s.to_dim(v) for v in fake(n).shape])


@lowers("transpose", "swapaxes", "swapdims")
def _transpose(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    perm = list(range(x.tensor.rank))
    a, b = (s.axis(number_of(s, v), x.tensor.rank) for v in n.args[1:3])
    perm[a], perm[b] = perm[b], perm[a]
    return s.emit("transpose", x, perm=tuple(perm))


@lowers("t", "numpy_T", "mT", "adjoint")
def _matrix_transpose(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    perm = list(range(x.tensor.rank))
    if len(perm) >= 2:
        perm[-1], perm[-2] = perm[-2], perm[-1]
    return s.emit("transpose", x, perm=tuple(perm))


@lowers("permute")
def _permute(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    return s.emit("transpose", x, perm=tuple(s.axis(d, x.tensor.rank) for d in n.args[1]))


@lowers("expand", "expand_as", "broadcast_to")
def _expand(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    shape = tuple(s.to_dim(v) for v in fake(n).shape)
    return x if x.tensor.shape == shape else s.emit("broadcast", x, shape=as_attr(shape))


@lowers("repeat")
def _repeat(s: Lowering, n: Call) -> Value:
    x, counts = s.value(n.args[0]), s.sizes(n.args[1])
    lead = len(counts) - x.tensor.rank
    x = s.reshape(x, [dim(1)] * lead + list(x.tensor.shape))
    for axis, count in enumerate(counts):
        if count != dim(1):
            x = s.emit("concat", *([x] * count.static), dim=axis)
    return x


@lowers("slice")
def _slice(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    axis = s.axis(argument(n, 1, "dim", 0), x.tensor.rank)
    size = x.tensor.shape[axis]
    start = _bound(s, argument(n, 2, "start"), size, dim(0))
    stop = _bound(s, argument(n, 3, "end"), size, size)
    step = int(argument(n, 4, "step", 1))
    if start == dim(0) and stop == size and step == 1:
        return x
    return s.emit("slice", x, dim=axis, start=start.attr, stop=stop.attr, step=step)


def _bound(s: Lowering, given: Any, size: Any, default: Any) -> Any:
    if given is None:
        return default
    bound = s.size(given)
    if not bound.is_static:
        return bound
    if bound.constant < 0:
        return size + bound.constant
    # PyTorch writes "to the end" as the largest integer.
    if size.is_static:
        return dim(min(bound.constant, size.constant))
    return size if bound.constant > 2**40 else bound


@lowers("select")
def _select(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    axis = s.axis(n.args[1], x.tensor.rank)
    index = s.size(n.args[2])
    if index.is_static and index.constant < 0:
        index = x.tensor.shape[axis] + index.constant
    part = s.emit("slice", x, dim=axis, start=index.attr, stop=(index + 1).attr)
    return s.reshape(part, [v for i, v in enumerate(part.tensor.shape) if i != axis])


@lowers("cat", "concat", "concatenate")
def _cat(s: Lowering, n: Call) -> Value:
    name = scalar_name(fake(n).dtype)
    parts = [s.cast(s.value(a), name) for a in n.args[0]]
    return s.emit("concat", *parts, dim=s.axis(argument(n, 1, "dim", 0), parts[0].tensor.rank))


@lowers("stack")
def _stack(s: Lowering, n: Call) -> Value:
    parts = [s.value(a) for a in n.args[0]]
    axis = s.axis(argument(n, 1, "dim", 0), parts[0].tensor.rank + 1)
    shape = list(parts[0].tensor.shape)
    shape.insert(axis, dim(1))
    return s.emit("concat", *(s.reshape(p, shape) for p in parts), dim=axis)


@lowers("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
def _split(s: Lowering, n: Call) -> list[Value]:
    x = s.value(n.args[0])
    is_unbind = "unbind" in str(n.target)
    position = argument(n, 1 if is_unbind else 2, "dim", 0)
    axis = s.axis(position, x.tensor.rank)
    parts: list[Value] = []
    start = dim(0)
    for piece in n.meta["val"]:
        size = dim(1) if is_unbind else s.to_dim(piece.shape[axis])
        bounds = {"start": start.attr, "stop": (start + size).attr}
        part = s.emit("slice", x, dim=axis, **bounds)
        if is_unbind:
            part = s.reshape(part, [v for i, v in enumerate(part.tensor.shape) if i != axis])
        parts.append(part)
        start = start + size
    return parts


@lowers("constant_pad_nd", "pad")
def _pad(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    widths = list(n.args[1])
    mode = n.args[2] if len(n.args) > 2 and isinstance(n.args[2], str) else "constant"
    if mode != "constant":
        raise Unsupported(f"padding mode {mode!r}", advice="only constant padding is known")
    fill = argument(n, 3 if "aten.pad" in str(n.target) else 2, "value", 0.0) or 0.0
    for i in range(len(widths) // 2):
        before, after = widths[2 * i], widths[2 * i + 1]
        axis = x.tensor.rank - 1 - i
        if before or after:
            x = s.emit("pad", x, dim=axis, before=before, after=after, value=float(fill))
    return x
