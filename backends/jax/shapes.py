"""Ops that move, repeat or make numbers, in JAX."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from metainfer.backends.jax.numbers import Reference, jax_type


def _reshape(x: Any, *, shape: Sequence[int]) -> Any:
    return lax.reshape(x, tuple(shape))


def _transpose(x: Any, *, perm: Sequence[int]) -> Any:
    return lax.transpose(x, tuple(perm))


def _broadcast(x: Any, *, shape: Sequence[int]) -> Any:
    squeezed = [i for i, n in enumerate(x.shape) if n != 1]
    first = len(shape) - x.ndim
    core = lax.reshape(x, tuple(x.shape[i] for i in squeezed))
    return lax.broadcast_in_dim(core, tuple(shape), tuple(first + i for i in squeezed))


def _slice(x: Any, *, dim: int, start: int, stop: int, step: int = 1) -> Any:
    return lax.slice_in_dim(x, start, stop, step, axis=dim)


def _concat(*xs: Any, dim: int) -> Any:
    return lax.concatenate(list(xs), dim % xs[0].ndim)


def _pad(x: Any, *, dim: int, before: int = 0, after: int = 0, value: float = 0.0) -> Any:
    edges = [(before, after, 0) if i == dim % x.ndim else (0, 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.asarray(value, x.dtype), edges)


def _gather(x: Any, index: Any) -> Any:
    return jnp.take(x, index, axis=0)


def _embedding(index: Any, table: Any, *, dtype: str = "f32") -> Any:
    # The result is rounded to the stated type at the op's border, not here.
    rows = jnp.take(table, jnp.maximum(index, 0), axis=0)
    return jnp.where(index[..., None] < 0, jnp.zeros((), table.dtype), rows)


def _full(*, shape: Sequence[int], value: float, dtype: str) -> Any:
    return jnp.full(tuple(shape), value, jax_type(dtype))


def _iota(*, size: int, start: int = 0, step: int = 1, dtype: str = "i64") -> Any:
    return (start + step * lax.iota(jnp.int64, size)).astype(jax_type(dtype))


def _constant(*, shape: Sequence[int], values: Sequence[Any], dtype: str) -> Any:
    return lax.reshape(jnp.array(values, jax_type(dtype)), tuple(shape))


def _same(x: Any, **attrs: Any) -> Any:
    """A collective changes where parts lie, and no value."""
    return x


def _local_index(ids: Any, *, axis: str, ranks: int, count: int) -> Any:
    """The only rank of an axis of one holds rows 0 to count - 1."""
    inside = jnp.logical_and(ids >= 0, ids < count)
    return ids * inside - jnp.logical_not(inside)


SHAPES: dict[str, Reference] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "slice": _slice,
    "concat": _concat,
    "pad": _pad,
    "gather": _gather,
    "embedding": _embedding,
    "full": _full,
    "iota": _iota,
    "constant": _constant,
    "all_reduce": _same,
    "reduce_scatter": _same,
    "all_gather": _same,
    "all_to_all": _same,
    "take_shard": _same,
    "local_index": _local_index,
}
