"""Means, variances and the norms made of them; products and extremes along dims."""

from collections.abc import Sequence
from typing import Any

from metainfer.compiler.aten.table import Call, argument, lowers
from metainfer.compiler.lowering import Lowering, fake, scalar_name
from metainfer.ir.dims import Dim, dim
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Value

_LONGEST_PRODUCT = 64  # factors of a product along a dim, each an op


def axes_of(s: Lowering, given: Any, rank: int) -> tuple[int, ...]:
    """Dims that a reduction names; all of them for None and []."""
    if given is None or given == []:
        return tuple(range(rank))
    named = [given] if isinstance(given, int) else given
    return tuple(sorted(s.axis(a, rank) for a in named))


def along(s: Lowering, vector: Value, axis: int, rank: int) -> Value:
    """A vector shaped so that it is repeated along all dims but one."""
    shape = [dim(1)] * rank
    shape[axis] = vector.tensor.shape[0]
    return s.reshape(vector, shape)


# --- variances ---------------------------------------------------------------------------------


@lowers("var", "std")
def _var(s: Lowering, n: Call) -> Value:
    return _spread(s, n, is_std="std" in str(n.target))[0]


@lowers("var_mean", "std_mean")
def _var_mean(s: Lowering, n: Call) -> tuple[Value, Value]:
    return _spread(s, n, is_std="std" in str(n.target))


def _spread(s: Lowering, n: Call, *, is_std: bool) -> tuple[Value, Value]:
    """(variance or standard deviation, mean): the mean square of what is left after the mean."""
    x = s.value(n.args[0])
    dims, correction, keep = _spread_arguments(s, n, x.tensor.rank)
    mean = s.emit("mean", x, dims=dims, keep=True)
    rest = s.emit("sub", x, mean)
    spread = s.emit("mean", s.emit("mul", rest, rest), dims=dims, keep=keep)
    if correction:
        spread = s.emit("mul", spread, s.scalar(_corrected(x, dims, correction)))
    if not keep:
        mean = s.reshape(mean, spread.tensor.shape)
    return (s.emit("sqrt", spread) if is_std else spread), mean


def _spread_arguments(s: Lowering, n: Call, rank: int) -> tuple[tuple[int, ...], float, bool]:
    """(dims, correction, keep) of the forms with ``unbiased`` and with ``correction``."""
    overload = n.target._overloadname
    if overload == "correction":
        given = n.kwargs.get("correction", argument(n, 2, "correction"))
        correction = 1.0 if given is None else float(given)
        return axes_of(s, argument(n, 1, "dim"), rank), correction, _keeps(n, 3)
    if overload == "dim":
        correction = float(argument(n, 2, "unbiased", True))
        return axes_of(s, argument(n, 1, "dim"), rank), correction, _keeps(n, 3)
    return tuple(range(rank)), float(argument(n, 1, "unbiased", True)), False


def _keeps(n: Call, position: int) -> bool:
    return bool(argument(n, position, "keepdim", False))


def _corrected(x: Value, dims: Sequence[int], correction: float) -> float:
    count = dim(1)
    for axis in dims:
        count = count * x.tensor.shape[axis]
    if not count.is_static:
        raise Unsupported(
            f"a variance over {count} elements with correction {correction:g}",
            advice="give correction=0, or fix the size",
        )
    if count.constant <= correction:
        raise Unsupported(f"a variance of {count} elements with correction {correction:g}")
    return count.constant / (count.constant - correction)


# --- norms -------------------------------------------------------------------------------------


@lowers("batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(s: Lowering, n: Call) -> Any:
    """An affine map of each channel, by the statistics that training left."""
    is_inner = "native" in str(n.target)
    mean, variance = argument(n, 3, "running_mean"), argument(n, 4, "running_var")
    if (not is_inner and argument(n, 5, "training")) or mean is None or variance is None:
        raise Unsupported("batch_norm by the batch's own statistics", advice="call model.eval()")
    eps = argument(n, 6 if is_inner else 7, "eps", 1e-5)
    x, dtype = s.value(n.args[0]), scalar_name(fake(n).dtype)
    variance, mean = (s.cast(s.value(v), "f32") for v in (variance, mean))
    root = s.emit("rsqrt", s.emit("add", variance, s.scalar(eps, "f32")))
    weight, bias = argument(n, 1, "weight"), argument(n, 2, "bias")
    scale = root if weight is None else s.emit("mul", root, s.cast(s.value(weight), "f32"))
    shift = s.emit("neg", s.emit("mul", mean, scale))
    if bias is not None:
        shift = s.emit("add", shift, s.cast(s.value(bias), "f32"))
    rank = x.tensor.rank
    scaled = s.emit("mul", x, s.cast(along(s, scale, 1, rank), dtype))
    made = s.emit("add", scaled, s.cast(along(s, shift, 1, rank), dtype))
    return (made,) if is_inner else made


@lowers("group_norm")
def _group_norm(s: Lowering, n: Call) -> Value:
    groups, eps = int(n.args[1]), argument(n, 4, "eps", 1e-5)
    return _normed_groups(s, n, groups, argument(n, 2, "weight"), argument(n, 3, "bias"), eps)


@lowers("instance_norm")
def _instance_norm(s: Lowering, n: Call) -> Value:
    if not argument(n, 5, "use_input_stats", True):
        raise Unsupported("instance_norm by running statistics", advice="use batch_norm")
    channels = s.value(n.args[0]).tensor.shape[1].static
    weight, bias = argument(n, 1, "weight"), argument(n, 2, "bias")
    return _normed_groups(s, n, channels, weight, bias, argument(n, 7, "eps", 1e-5))


def _normed_groups(s: Lowering, n: Call, groups: int, weight: Any, bias: Any, eps: float) -> Value:
    """Each group of channels normalised as one row, then an affine map of each channel."""
    x = s.value(n.args[0])
    batch, channels, *inner = x.tensor.shape
    width: Dim = channels // groups
    for size in inner:
        width = width * size
    rows = s.reshape(x, (batch, dim(groups), width))
    made = s.reshape(s.emit("layer_norm", rows, eps=eps), x.tensor.shape)
    if weight is not None:
        made = s.emit("mul", made, along(s, s.value(weight), 1, x.tensor.rank))
    return made if bias is None else s.emit("add", made, along(s, s.value(bias), 1, x.tensor.rank))


@lowers("linalg_vector_norm")
def _vector_norm(s: Lowering, n: Call) -> Value:
    x = s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))
    order = float(argument(n, 1, "ord", 2))
    dims, keep = axes_of(s, argument(n, 2, "dim"), x.tensor.rank), _keeps(n, 3)
    if order == 2:
        return s.emit("sqrt", s.emit("sum", s.emit("mul", x, x), dims=dims, keep=keep))
    if order not in (1, float("inf")):
        raise Unsupported(f"a norm of order {order:g}", advice="known orders: 1, 2, inf")
    return s.emit("sum" if order == 1 else "max", s.emit("abs", x), dims=dims, keep=keep)


# --- products and extremes ---------------------------------------------------------------------


@lowers("prod")
def _prod(s: Lowering, n: Call) -> Value:
    x = s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))
    given = argument(n, 1, "dim")
    if not isinstance(given, int):
        x, given = s.reshape(x, [x.tensor.num_elements()]), 0
    axis = s.axis(given, x.tensor.rank)
    count = x.tensor.shape[axis]
    if not count.is_static or count.constant > _LONGEST_PRODUCT:
        raise Unsupported(
            f"a product of {count} factors", advice=f"at most {_LONGEST_PRODUCT}, of a fixed size"
        )
    if not count.constant:
        raise Unsupported("a product of no factors")
    return s.reshape(_folded(s, x, axis), [s.to_dim(v) for v in fake(n).shape])


def _folded(s: Lowering, x: Value, axis: int) -> Value:
    """Halves multiplied until one is left: log2 of the count ops."""
    count = x.tensor.shape[axis].static
    while count > 1:
        half, odd = divmod(count, 2)
        parts = [
            s.emit("slice", x, dim=axis, start=i * half, stop=(i + 1) * half) for i in range(2)
        ]
        product = s.emit("mul", *parts)
        if odd:
            last = s.emit("slice", x, dim=axis, start=count - 1, stop=count)
            product = s.emit("concat", product, last, dim=axis)
        x, count = product, half + odd
    return x


@lowers("max", "min")
def _extreme(s: Lowering, n: Call) -> Any:
    """Three forms: of all elements; of two tensors; along a dim, with indices."""
    is_max = "aten.max" in str(n.target)
    overload = n.target._overloadname
    x = s.value(n.args[0])
    if overload == "other":
        return s.emit("maximum" if is_max else "minimum", x, s.value(n.args[1]))
    name = "max" if is_max else "min"
    if overload != "dim":
        return s.emit(name, x, dims=tuple(range(x.tensor.rank)), keep=False)
    axis = s.axis(n.args[1], x.tensor.rank)
    index = s.emit("argmax", x if is_max else s.emit("neg", x), dim=axis)
    keep = _keeps(n, 2)
    shape = list(x.tensor.shape)
    shape[axis : axis + 1] = [dim(1)] if keep else []
    return s.emit(name, x, dims=(axis,), keep=keep), s.reshape(index, shape)


@lowers("argmin")
def _argmin(s: Lowering, n: Call) -> Value:
    x, axis = s.value(n.args[0]), argument(n, 1, "dim")
    if axis is None:
        x, axis = s.reshape(x, [x.tensor.num_elements()]), 0
    made = s.emit("argmax", s.emit("neg", x), dim=s.axis(axis, x.tensor.rank))
    return s.reshape(made, [s.to_dim(v) for v in fake(n).shape])


@lowers("any", "all")
def _any(s: Lowering, n: Call) -> Value:
    x = s.value(n.args[0])
    if x.tensor.dtype.name != "bool":
        x = s.emit("ne", x, s.scalar(0, x.tensor.dtype.name))
    name = "max" if "aten.any" in str(n.target) else "min"
    dims = axes_of(s, argument(n, 1, "dim"), x.tensor.rank)
    return s.emit(name, x, dims=dims, keep=_keeps(n, 2))
