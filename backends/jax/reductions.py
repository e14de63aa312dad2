"""Reductions, scans, norms and products in JAX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from metainfer.backends.jax.numbers import Reference


def _sum(x: Any, *, dims: Sequence[int], keep: bool = False) -> Any:
    if x.dtype == jnp.bool_:
        return jnp.any(x, axis=tuple(dims), keepdims=keep)
    return jnp.sum(x, axis=tuple(dims), keepdims=keep, dtype=x.dtype)


def _mean(x: Any, *, dims: Sequence[int], keep: bool = False) -> Any:
    return jnp.mean(x, axis=tuple(dims), keepdims=keep)


def _max(x: Any, *, dims: Sequence[int], keep: bool = False) -> Any:
    return jnp.max(x, axis=tuple(dims), keepdims=keep)


def _min(x: Any, *, dims: Sequence[int], keep: bool = False) -> Any:
    return jnp.min(x, axis=tuple(dims), keepdims=keep)


def _argmax(x: Any, *, dim: int) -> Any:
    return lax.argmax(x, dim % x.ndim, jnp.int64)


def softmax(x: Any, *, dim: int = -1) -> Any:
    """Softmax whose rows of -inf give zeros."""
    nothing = jnp.all(jnp.isneginf(x), axis=dim, keepdims=True)
    return jnp.where(nothing, 0, jax.nn.softmax(jnp.where(nothing, 0, x), axis=dim))


def _cumsum(x: Any, *, dim: int) -> Any:
    return lax.cumsum(x, dim % x.ndim)


def _topk(x: Any, *, k: int) -> tuple[Any, Any]:
    values, index = lax.top_k(x.astype(jnp.int8) if x.dtype == jnp.bool_ else x, k)
    return values.astype(x.dtype), index.astype(jnp.int64)


def _rms_norm(x: Any, weight: Any, *, eps: float) -> Any:
    power = jnp.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1]
    return x * lax.rsqrt(power + eps) * weight


def _layer_norm(x: Any, weight: Any = None, bias: Any = None, *, eps: float) -> Any:
    y = jax.nn.standardize(x, axis=-1, epsilon=eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _linear(x: Any, weight: Any, bias: Any = None, *, dtype: str = "") -> Any:
    y = jnp.einsum("...k,nk->...n", x, weight.astype(x.dtype))
    return y if bias is None else y + bias


def _matmul(a: Any, b: Any, *, transpose_b: bool = False) -> Any:
    return jnp.einsum("...mk,...nk->...mn" if transpose_b else "...mk,...kn->...mn", a, b)


def _conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    groups: int = 1,
) -> Any:
    y = lax.conv_general_dilated(
        x,
        weight,
        window_strides=tuple(stride),
        padding=[(p, p) for p in padding],
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=groups,
    )
    return y if bias is None else y + lax.reshape(bias, (1, bias.shape[0], 1, 1))


REDUCTIONS: dict[str, Reference] = {
    "sum": _sum,
    "mean": _mean,
    "max": _max,
    "min": _min,
    "argmax": _argmax,
    "softmax": softmax,
    "cumsum": _cumsum,
    "topk": _topk,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "matmul": _matmul,
    "conv2d": _conv2d,
}
