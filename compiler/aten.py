"""How each PyTorch op is spelled in the IR: one entry per op, found by name.

To add an op: give it a record in ``ir/ops/`` if it has none, then one line here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from metainfer.compiler.lowering import Lowering, Table, as_attr, fake, scalar_name, size_attr
from metainfer.ir.dims import dim
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Value

ATEN: Table = {}
Lower = Callable[[Lowering, fx.Node], Any]


def lowers(*names: str) -> Callable[[Lower], Lower]:
    """Register a lowering for aten ops."""

    def register(function: Lower) -> Lower:
        for name in names:
            ATEN[f"aten.{name}"] = function
        return function

    return register


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """A positional or keyword argument of a call."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


# --- element by element ------------------------------------------------------------------------


def _unary(name: str) -> Lower:
    return lambda s, n: s.emit(name, s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype)))


for _aten, _name in {
    "neg": "neg", "abs": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt",
    "reciprocal": "reciprocal", "sin": "sin", "cos": "cos", "tanh": "tanh", "erf": "erf",
    "sigmoid": "sigmoid", "relu": "relu", "silu": "silu", "floor": "floor",
}.items():  # fmt: skip
    ATEN[f"aten.{_aten}"] = _unary(_name)


def _binary(name: str) -> Lower:
    def lower(s: Lowering, n: fx.Node) -> Value:
        x, y = _promoted(s, n.args[:2], fake(n).dtype)
        alpha = n.kwargs.get("alpha", 1)
        if alpha != 1:
            y = s.emit("mul", y, s.scalar(alpha))
        return s.emit(name, x, y)

    return lower


def _promoted(s: Lowering, operands: Sequence[Any], dtype: torch.dtype) -> list[Value]:
    """Operands as values of one dtype; numbers become constants of it."""
    name = scalar_name(dtype)
    made = []
    for operand in operands:
        if isinstance(operand, fx.Node) and isinstance(s.values[operand], Value):
            made.append(s.cast(s.value(operand), name))
        else:
            made.append(s.scalar(_number(s, operand), name))
    return made


def _number(s: Lowering, operand: Any) -> Any:
    if isinstance(operand, fx.Node):
        return s.size(operand).static
    return operand


for _aten, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "maximum",
    "minimum": "minimum", "remainder": "remainder", "floor_divide": "floor_div",
}.items():  # fmt: skip
    ATEN[f"aten.{_aten}"] = _binary(_name)


def _compare(name: str) -> Lower:
    def lower(s: Lowering, n: fx.Node) -> Value:
        operands = n.args[:2]
        real = [a.meta["val"] if isinstance(a, fx.Node) else a for a in operands]
        x, y = _promoted(s, operands, torch.result_type(*real))
        return s.emit(name, x, y)

    return lower


for _aten in ("eq", "ne", "lt", "le", "gt", "ge"):
    ATEN[f"aten.{_aten}"] = _compare(_aten)


@lowers("logical_and", "bitwise_and", "__and__")
def _and(s: Lowering, n: fx.Node) -> Value:
    return s.emit("logical_and", *_booleans(s, n))


@lowers("logical_or", "bitwise_or", "__or__")
def _or(s: Lowering, n: fx.Node) -> Value:
    return s.emit("logical_or", *_booleans(s, n))


@lowers("logical_not", "bitwise_not")
def _not(s: Lowering, n: fx.Node) -> Value:
    return s.emit("logical_not", *_booleans(s, n))


def _booleans(s: Lowering, n: fx.Node) -> list[Value]:
    values = [s.value(a) for a in n.args]
    if any(v.tensor.dtype.name != "bool" for v in values):
        raise Unsupported("bit operations on integers are not known", advice="use booleans")
    return values


@lowers("pow")
def _pow(s: Lowering, n: fx.Node) -> Value:
    base, exponent = n.args[:2]
    x = s.cast(s.value(base), scalar_name(fake(n).dtype))
    # Squares, roots and their inverses have ops of their own, which rules look for.
    if exponent == 2:
        return s.emit("mul", x, x)
    for number, name in ((0.5, "sqrt"), (-0.5, "rsqrt"), (-1, "reciprocal")):
        if exponent == number:
            return s.emit(name, x)
    return s.emit("pow", *_promoted(s, n.args[:2], fake(n).dtype))


@lowers("rsub")
def _rsub(s: Lowering, n: fx.Node) -> Value:
    x, y = _promoted(s, n.args[:2], fake(n).dtype)
    return s.emit("sub", y, x)


@lowers("gelu")
def _gelu(s: Lowering, n: fx.Node) -> Value:
    return s.emit("gelu", s.value(n.args[0]), approximate=n.kwargs.get("approximate", "none"))


@lowers("clamp", "clamp_min", "clamp_max")
def _clamp(s: Lowering, n: fx.Node) -> Value:
    name = n.target._opname if isinstance(n.target, torch._ops.OpOverload) else ""
    low = argument(n, 1, "min") if name != "clamp_max" else None
    high = argument(n, 2 if name == "clamp" else 1, "max") if name != "clamp_min" else None
    x = s.value(n.args[0])
    if low is not None:
        x = s.emit("maximum", x, s.scalar(low))
    return x if high is None else s.emit("minimum", x, s.scalar(high))


@lowers("where")
def _where(s: Lowering, n: fx.Node) -> Value:
    x, y = _promoted(s, n.args[1:3], fake(n).dtype)
    return s.emit("where", s.value(n.args[0]), x, y)


@lowers("masked_fill")
def _masked_fill(s: Lowering, n: fx.Node) -> Value:
    x, y = _promoted(s, (n.args[2], n.args[0]), fake(n).dtype)
    return s.emit("where", s.value(n.args[1]), x, y)


@lowers("to", "_to_copy", "type_as", "float", "half", "bfloat16", "long", "int", "bool")
def _to(s: Lowering, n: fx.Node) -> Value:
    return s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))


@lowers("contiguous", "clone", "detach", "alias", "lift_fresh_copy", "detach_", "dropout")
def _identity(s: Lowering, n: fx.Node) -> Value:
    if n.target is torch.ops.aten.dropout.default and n.args[2]:
        raise Unsupported("dropout in training mode", advice="call model.eval() first")
    return s.value(n.args[0])


# --- shapes ------------------------------------------------------------------------------------


@lowers(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as",
    "reshape_as",
)  # fmt: skip
def _reshape(s: Lowering, n: fx.Node) -> Value:
    return s.reshape(s.value(n.args[0]), [s.to_dim(v) for v in fake(n).shape])


@lowers("transpose", "swapaxes", "swapdims")
def _transpose(s: Lowering, n: fx.Node) -> Value:
    x = s.value(n.args[0])
    perm = list(range(x.tensor.rank))
    a, b = (s.axis(_number(s, v), x.tensor.rank) for v in n.args[1:3])
    perm[a], perm[b] = perm[b], perm[a]
    return s.emit("transpose", x, perm=tuple(perm))


@lowers("t", "numpy_T", "mT", "adjoint")
def _matrix_transpose(s: Lowering, n: fx.Node) -> Value:
    x = s.value(n.args[0])
    perm = list(range(x.tensor.rank))
    if len(perm) >= 2:
        perm[-1], perm[-2] = perm[-2], perm[-1]
    return s.emit("transpose", x, perm=tuple(perm))


@lowers("permute")
def _permute(s: Lowering, n: fx.Node) -> Value:
    x = s.value(n.args[0])
    return s.emit("transpose", x, perm=tuple(s.axis(d, x.tensor.rank) for d in n.args[1]))


@lowers("expand", "expand_as", "broadcast_to")
def _expand(s: Lowering, n: fx.Node) -> Value:
    x = s.value(n.args[0])
    shape = tuple(s.to_dim(v) for v in fake(n).shape)
    return x if x.tensor.shape == shape else s.emit("broadcast", x, shape=as_attr(shape))


@lowers("repeat")
def _repeat(s: Lowering, n: fx.Node) -> Value:
    x, counts = s.value(n.args[0]), s.sizes(n.args[1])
    lead = len(counts) - x.tensor.rank
    x = s.reshape(x, [dim(1)] * lead + list(x.tensor.shape))
    for axis, count in enumerate(counts):
        if count != dim(1):
            x = s.emit("concat", *([x] * count.static), dim=axis)
    return x


@lowers("slice")
def _slice(s: Lowering, n: fx.Node) -> Value:
    x = s.value(n.args[0])
    axis = s.axis(argument(n, 1, "dim", 0), x.tensor.rank)
    size = x.tensor.shape[axis]
    start = _bound(s, argument(n, 2, "start"), size, dim(0))
    stop = _bound(s, argument(n, 3, "end"), size, size)
    step = int(argument(n, 4, "step", 1))
    if start == dim(0) and stop == size and step == 1:
        return x
    return s.emit("slice", x, dim=axis, start=size_attr(start), stop=size_attr(stop), step=step)


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
def _select(s: Lowering, n: fx.Node) -> Value:
    x = s.value(n.args[0])
    axis = s.axis(n.args[1], x.tensor.rank)
    index = s.size(n.args[2])
    if index.is_static and index.constant < 0:
        index = x.tensor.shape[axis] + index.constant
    part = s.emit("slice", x, dim=axis, start=size_attr(index), stop=size_attr(index + 1))
    return s.reshape(part, [v for i, v in enumerate(part.tensor.shape) if i != axis])


@lowers("cat", "concat", "concatenate")
def _cat(s: Lowering, n: fx.Node) -> Value:
    name = scalar_name(fake(n).dtype)
    parts = [s.cast(s.value(a), name) for a in n.args[0]]
    return s.emit("concat", *parts, dim=s.axis(argument(n, 1, "dim", 0), parts[0].tensor.rank))


@lowers("stack")
def _stack(s: Lowering, n: fx.Node) -> Value:
    parts = [s.value(a) for a in n.args[0]]
    axis = s.axis(argument(n, 1, "dim", 0), parts[0].tensor.rank + 1)
    shape = list(parts[0].tensor.shape)
    shape.insert(axis, dim(1))
    return s.emit("concat", *(s.reshape(p, shape) for p in parts), dim=axis)


@lowers("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
def _split(s: Lowering, n: fx.Node) -> list[Value]:
    x = s.value(n.args[0])
    is_unbind = "unbind" in str(n.target)
    position = argument(n, 1 if is_unbind else 2, "dim", 0)
    axis = s.axis(position, x.tensor.rank)
    parts: list[Value] = []
    start = dim(0)
    for piece in n.meta["val"]:
        size = dim(1) if is_unbind else s.to_dim(piece.shape[axis])
        bounds = {"start": size_attr(start), "stop": size_attr(start + size)}
        part = s.emit("slice", x, dim=axis, **bounds)
        if is_unbind:
            part = s.reshape(part, [v for i, v in enumerate(part.tensor.shape) if i != axis])
        parts.append(part)
        start = start + size
    return parts


@lowers("index_select")
def _index_select(s: Lowering, n: fx.Node) -> Value:
    if n.args[1] != 0:
        raise Unsupported("index_select along another dim than 0", advice="transpose first")
    return s.emit("gather", s.value(n.args[0]), s.value(n.args[2]))


@lowers("index")
def _index(s: Lowering, n: fx.Node) -> Value:
    indices = n.args[1]
    first = indices[0] if indices else None
    if len(indices) != 1 or first is None or fake(first).dtype == torch.bool:
        raise Unsupported(
            "indexing by several tensors, by a mask, or along an inner dim",
            advice="index the first dim by one integer tensor, or use torch.where",
        )
    return s.emit("gather", s.value(n.args[0]), s.value(first))


@lowers("constant_pad_nd", "pad")
def _pad(s: Lowering, n: fx.Node) -> Value:
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


# --- makers ------------------------------------------------------------------------------------


def _full(value: Any = None) -> Lower:
    def lower(s: Lowering, n: fx.Node) -> Value:
        tensor = fake(n)
        number = argument(n, 1, "fill_value") if value is None else value
        shape = as_attr([s.to_dim(v) for v in tensor.shape])
        return s.emit("full", shape=shape, value=number, dtype=scalar_name(tensor.dtype))

    return lower


for _names, _number_of in (
    (("full", "full_like", "scalar_tensor", "new_full"), None),
    (("zeros", "zeros_like", "new_zeros"), 0),
    (("ones", "ones_like", "new_ones"), 1),
):
    for _aten in _names:
        ATEN[f"aten.{_aten}"] = _full(_number_of)


@lowers("new_full")
def _new_full(s: Lowering, n: fx.Node) -> Value:
    tensor = fake(n)
    shape = as_attr([s.to_dim(v) for v in tensor.shape])
    return s.emit("full", shape=shape, value=n.args[2], dtype=scalar_name(tensor.dtype))


@lowers("scalar_tensor")
def _scalar_tensor(s: Lowering, n: fx.Node) -> Value:
    return s.scalar(n.args[0])


@lowers("arange")
def _arange(s: Lowering, n: fx.Node) -> Value:
    args = [a for a in n.args]
    start = 0 if len(args) == 1 else args[0]
    step = args[2] if len(args) > 2 else 1
    if not isinstance(start, int) or not isinstance(step, int):
        raise Unsupported("arange with a start or step that is no plain integer")
    tensor = fake(n)
    size = s.to_dim(tensor.shape[0])
    return s.emit(
        "iota", size=size_attr(size), start=start, step=step, dtype=scalar_name(tensor.dtype)
    )


@lowers("tril", "triu")
def _triangle(s: Lowering, n: fx.Node) -> Value:
    x = s.value(n.args[0])
    diagonal = int(argument(n, 1, "diagonal", 0))
    rows, columns = x.tensor.shape[-2:]
    i = s.reshape(s.emit("iota", size=size_attr(rows)), (rows, dim(1)))
    j = s.reshape(s.emit("iota", size=size_attr(columns), start=-diagonal), (dim(1), columns))
    keep = s.emit("le" if "tril" in str(n.target) else "ge", j, i)
    return s.emit("where", keep, x, s.scalar(0, x.tensor.dtype.name))


# --- reductions --------------------------------------------------------------------------------


def _reduce(name: str) -> Lower:
    def lower(s: Lowering, n: fx.Node) -> Value:
        x = s.value(n.args[0])
        if name in ("sum", "mean"):
            x = s.cast(x, scalar_name(fake(n).dtype))
        given = argument(n, 1, "dim")
        if given is None or given == []:
            axes: Sequence[int] = range(x.tensor.rank)
        else:
            axes = [given] if isinstance(given, int) else given
        dims = tuple(sorted(s.axis(a, x.tensor.rank) for a in axes))
        return s.emit(name, x, dims=dims, keep=bool(argument(n, 2, "keepdim", False)))

    return lower


for _aten, _name in {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}.items():
    ATEN[f"aten.{_aten}"] = _reduce(_name)


@lowers("argmax")
def _argmax(s: Lowering, n: fx.Node) -> Value:
    x = s.value(n.args[0])
    axis = argument(n, 1, "dim")
    if axis is None:
        x, axis = s.reshape(x, [x.tensor.num_elements()]), 0
    made = s.emit("argmax", x, dim=s.axis(axis, x.tensor.rank))
    return s.reshape(made, [s.to_dim(v) for v in fake(n).shape])


@lowers("softmax", "_softmax", "_safe_softmax")
def _softmax(s: Lowering, n: fx.Node) -> Value:
    x = s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))
    return s.emit("softmax", x, dim=s.axis(n.args[1], x.tensor.rank))


@lowers("cumsum")
def _cumsum(s: Lowering, n: fx.Node) -> Value:
    x = s.cast(s.value(n.args[0]), scalar_name(fake(n).dtype))
    return s.emit("cumsum", x, dim=s.axis(n.args[1], x.tensor.rank))


@lowers("topk")
def _topk(s: Lowering, n: fx.Node) -> tuple[Value, ...]:
    x = s.value(n.args[0])
    axis, largest = argument(n, 2, "dim", -1), argument(n, 3, "largest", True)
    if s.axis(axis, x.tensor.rank) != x.tensor.rank - 1 or not largest:
        raise Unsupported("topk along another dim than the last, or of the smallest")
    return s.emit_many("topk", x, k=n.args[1])


# --- products, normalisation, attention --------------------------------------------------------


@lowers("linear")
def _linear(s: Lowering, n: fx.Node) -> Value:
    return s.emit("linear", *(s.value(a) for a in n.args if a is not None))


@lowers("addmm")
def _addmm(s: Lowering, n: fx.Node) -> Value:
    if n.kwargs.get("alpha", 1) != 1 or n.kwargs.get("beta", 1) != 1:
        raise Unsupported("addmm with alpha or beta")
    bias, x, weight = (s.value(a) for a in n.args)
    return s.emit("add", s.emit("matmul", x, weight), bias)


@lowers("matmul", "mm", "bmm")
def _matmul(s: Lowering, n: fx.Node) -> Value:
    a, b = (s.value(v) for v in n.args)
    shape_a, shape_b = a.tensor.shape, b.tensor.shape
    if a.tensor.rank == 1:
        a = s.reshape(a, (dim(1), *shape_a))
    if b.tensor.rank == 1:
        b = s.reshape(b, (*shape_b, dim(1)))
    return s.reshape(s.emit("matmul", a, b), [s.to_dim(v) for v in fake(n).shape])


@lowers("embedding")
def _embedding(s: Lowering, n: fx.Node) -> Value:
    return s.emit(
        "embedding", s.value(n.args[1]), s.value(n.args[0]), dtype=scalar_name(fake(n).dtype)
    )


@lowers("conv2d", "convolution")
def _conv2d(s: Lowering, n: fx.Node) -> Value:
    if any(d != 1 for d in argument(n, 5, "dilation", [1])):
        raise Unsupported("a dilated convolution")
    if fake(n).ndim != 4 or isinstance(argument(n, 4, "padding", 0), str):
        raise Unsupported("convolutions other than conv2d with numeric padding")
    operands = [s.value(a) for a in n.args[:3] if a is not None]
    stride, padding = (
        _pair(argument(n, i, k, d)) for i, k, d in ((3, "stride", 1), (4, "padding", 0))
    )
    groups = argument(n, 6, "groups", 1)
    return s.emit("conv2d", *operands, stride=stride, padding=padding, groups=groups)


def _pair(value: Any) -> tuple[int, int]:
    values = [value] if isinstance(value, int) else list(value)
    return (values[0], values[-1])


@lowers("layer_norm", "native_layer_norm")
def _layer_norm(s: Lowering, n: fx.Node) -> Value:
    if len(n.args[1]) != 1:
        raise Unsupported("layer_norm over several dims", advice="flatten them first")
    weight, bias = argument(n, 2, "weight"), argument(n, 3, "bias")
    if weight is None and bias is not None:
        raise Unsupported("layer_norm with a bias but no weight")
    operands = [s.value(a) for a in (n.args[0], weight, bias) if a is not None]
    return s.emit("layer_norm", *operands, eps=argument(n, 4, "eps", 1e-5))


@lowers("rms_norm")
def _rms_norm(s: Lowering, n: fx.Node) -> Value:
    if len(n.args[1]) != 1:
        raise Unsupported("rms_norm over several dims", advice="flatten them first")
    x, weight = s.value(n.args[0]), argument(n, 2, "weight")
    eps = argument(n, 3, "eps")
    # PyTorch's default is the machine epsilon of the type.
    eps = torch.finfo(fake(n).dtype).eps if eps is None else eps
    if weight is None:
        width = x.tensor.shape[-1]
        ones = s.emit("full", shape=as_attr([width]), value=1.0, dtype=x.tensor.dtype.name)
        return s.emit("rms_norm", x, ones, eps=eps)
    return s.emit("rms_norm", x, s.value(weight), eps=eps)


@lowers("scaled_dot_product_attention")
def _sdpa(s: Lowering, n: fx.Node) -> Value:
    mask, dropout = argument(n, 3, "attn_mask"), argument(n, 4, "dropout_p", 0.0)
    if dropout:
        raise Unsupported("attention with dropout", advice="call model.eval() first")
    operands = [s.value(a) for a in (*n.args[:3], mask) if a is not None]
    scale = n.kwargs.get("scale") or 0.0
    return s.emit("sdpa", *operands, scale=scale, causal=bool(argument(n, 5, "is_causal", False)))


# --- sizes and bookkeeping ---------------------------------------------------------------------


@lowers("sym_size", "sym_numel")
def _sym_size(s: Lowering, n: fx.Node) -> Any:
    return s.to_dim(n.meta["val"])


@lowers(
    "_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range_for_size"
)
def _nothing(s: Lowering, n: fx.Node) -> None:
    return None
