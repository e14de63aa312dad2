"""Matrix products, normalisation, attention."""

from typing import Any

import torch

from metainfer.compiler.aten.pooling import pair
from metainfer.compiler.aten.table import Call, argument, lowers
from metainfer.compiler.lowering import Lowering, as_attr, fake, scalar_name, target_name
from metainfer.ir.dims import dim
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Value


@lowers("linear")
def _linear(s: Lowering, n: Call) -> Value:
    return s.emit("linear", *(s.value(a) for a in n.args if a is not None))


@lowers("addmm")
def _addmm(s: Lowering, n: Call) -> Value:
    if n.kwargs.get("alpha", 1) != 1 or n.kwargs.get("beta", 1) != 1:
        raise Unsupported("addmm with alpha or beta")
    bias, x, weight = (s.value(a) for a in n.args)
    return s.emit("add", s.emit("matmul", x, weight), bias)


@lowers("matmul", "mm", "bmm")
def _matmul(s: Lowering, n: Call) -> Value:
    a, b = (s.value(v) for v in n.args)
    shape_a, shape_b = a.tensor.shape, b.tensor.shape
    if a.tensor.rank == 1:
        a = s.reshape(a, (dim(1), *shape_a))
    if b.tensor.rank == 1:
        b = s.reshape(b, (*shape_b, dim(1)))
    return s.reshape(s.emit("matmul", a, b), [s.to_dim(v) for v in fake(n).shape])


@lowers("embedding")
def _embedding(s: Lowering, n: Call) -> Value:
    return s.emit(
        "embedding", s.value(n.args[1]), s.value(n.args[0]), dtype=scalar_name(fake(n).dtype)
    )


@lowers("conv1d", "conv2d", "convolution")
def _conv(s: Lowering, n: Call) -> Value:
    # aten.convolution is the general form: (..., dilation, transposed, output_padding, groups).
    is_general = target_name(n) == "aten.convolution"
    if is_general and argument(n, 6, "transposed", False):
        raise Unsupported("a transposed convolution", advice="upsample, then convolve")
    if any(d != 1 for d in pair(argument(n, 5, "dilation", 1))):
        raise Unsupported("a dilated convolution")
    inner = fake(n.args[1]).ndim - 2
    if inner not in (1, 2):
        raise Unsupported(f"a convolution over {inner} dims", advice="one or two are known")
    x, weight = (_as_image(s, s.value(a), inner) for a in n.args[:2])
    bias = argument(n, 2, "bias")
    stride, padding = argument(n, 3, "stride", 1), argument(n, 4, "padding", 0)
    if isinstance(padding, str):
        x, padding = _padded_to(s, x, weight, padding, inner), 0
    groups = argument(n, 8 if is_general else 6, "groups", 1)
    operands = (x, weight) if bias is None else (x, weight, s.value(bias))
    made = s.emit(
        "conv2d", *operands, stride=_inner_pair(stride, inner, 1),
        padding=_inner_pair(padding, inner, 0), groups=groups,
    )  # fmt: skip
    return s.reshape(made, [s.to_dim(v) for v in fake(n).shape])


def _as_image(s: Lowering, x: Value, inner: int) -> Value:
    """[B, C, H, W]: one dim becomes rows of height one, a lone image a batch of one."""
    shape = list(x.tensor.shape)
    if inner == 1:
        shape.insert(len(shape) - 1, dim(1))
    return s.reshape(x, [dim(1)] * (4 - len(shape)) + shape)


def _inner_pair(value: Any, inner: int, outer: int) -> tuple[int, int]:
    return pair(value) if inner == 2 else (outer, pair(value)[0])


def _padded_to(s: Lowering, x: Value, weight: Value, padding: str, inner: int) -> Value:
    """The input filled up so that the result is as large ("same"), or as it is ("valid")."""
    if padding == "valid":
        return x
    for axis in range(4 - inner, 4):
        total = weight.tensor.shape[axis].static - 1
        if total:
            x = s.emit("pad", x, dim=axis, before=total // 2, after=total - total // 2)
    return x


@lowers("layer_norm", "native_layer_norm")
def _layer_norm(s: Lowering, n: Call) -> Value:
    weight, bias = argument(n, 2, "weight"), argument(n, 3, "bias")
    if weight is None and bias is not None:
        raise Unsupported("layer_norm with a bias but no weight")
    x, count = s.value(n.args[0]), len(n.args[1])
    operands = [
        _last_flat(s, s.value(a), count) for a in (n.args[0], weight, bias) if a is not None
    ]
    made = s.emit("layer_norm", *operands, eps=argument(n, 4, "eps", 1e-5))
    return s.reshape(made, x.tensor.shape)


def _last_flat(s: Lowering, x: Value, count: int) -> Value:
    """The last dims as one."""
    kept, width = x.tensor.shape[: x.tensor.rank - count], dim(1)
    for size in x.tensor.shape[x.tensor.rank - count :]:
        width = width * size
    return s.reshape(x, (*kept, width))


@lowers("rms_norm")
def _rms_norm(s: Lowering, n: Call) -> Value:
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
def _sdpa(s: Lowering, n: Call) -> Value:
    mask, dropout = argument(n, 3, "attn_mask"), argument(n, 4, "dropout_p", 0.0)
    if dropout:
        raise Unsupported("attention with dropout", advice="call model.eval() first")
    operands = [s.value(a) for a in (*n.args[:3], mask) if a is not None]
    scale = n.kwargs.get("scale") or 0.0
    return s.emit("sdpa", *operands, scale=scale, causal=bool(argument(n, 5, "is_causal", False)))
