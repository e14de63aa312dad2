"""Matrix products, normalisation, attention."""

from typing import Any

import torch

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


@lowers("conv2d", "convolution")
def _conv2d(s: Lowering, n: Call) -> Value:
    if any(d != 1 for d in argument(n, 5, "dilation", [1])):
        raise Unsupported("a dilated convolution")
    if fake(n).ndim != 4 or isinstance(argument(n, 4, "padding", 0), str):
        raise Unsupported("convolutions other than conv2d with numeric padding")
    operands = [s.value(a) for a in n.args[:3] if a is not None]
    stride, padding = (
        _pair(argument(n, i, k, d)) for i, k, d in ((3, "stride", 1), (4, "padding", 0))
    )
    # aten.convolution is the general form: (..., dilation, transposed, output_padding, groups).
    is_general = target_name(n) == "aten.convolution"
    if is_general and argument(n, 6, "transposed", False):
        raise Unsupported("a transposed convolution", advice="upsample, then convolve")
    groups = argument(n, 8 if is_general else 6, "groups", 1)
    return s.emit("conv2d", *operands, stride=stride, padding=padding, groups=groups)


def _pair(value: Any) -> tuple[int, int]:
    values = [value] if isinstance(value, int) else list(value)
    return (values[0], values[-1])


@lowers("layer_norm", "native_layer_norm")
def _layer_norm(s: Lowering, n: Call) -> Value:
    if len(n.args[1]) != 1:
        raise Unsupported("layer_norm over several dims", advice="flatten them first")
    weight, bias = argument(n, 2, "weight"), argument(n, 3, "bias")
    if weight is None and bias is not None:
        raise Unsupported("layer_norm with a bias but no weight")
    operands = [s.value(a) for a in (n.args[0], weight, bias) if a is not None]
    return s.emit("layer_norm", *operands, eps=argument(n, 4, "eps", 1e-5))


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
