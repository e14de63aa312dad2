"""Mixture of experts in JAX: every expert sees every token, and a matrix of shares picks."""

from typing import Any

import jax
import jax.numpy as jnp

from metainfer.backends.jax.numbers import Reference


def _experts(
    x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any, *,
    activation: str = "silu", dtype: str = "", total: int = 0,
) -> Any:  # fmt: skip
    # one_hot gives a row of zeros for numbers outside [0, E).
    chosen = jax.nn.one_hot(ids, gate.shape[0], dtype=x.dtype)
    share = jnp.einsum("tk,tke->te", weights.astype(x.dtype), chosen)
    inner = jnp.einsum("td,efd->tef", x, gate)
    inner = jax.nn.silu(inner) if activation == "silu" else jax.nn.gelu(inner, approximate=True)
    inner = inner * jnp.einsum("td,efd->tef", x, up)
    return jnp.einsum("te,tef,edf->td", share, inner, down).astype(x.dtype)


def _route(ids: Any, table: Any, replicas: Any) -> Any:
    """A sum over all replicas of all experts: 1 where one serves, 0 elsewhere."""
    experts, most = table.shape
    rows = jnp.arange(ids.shape[0])[:, None, None, None]
    is_chosen = ids[:, :, None, None] == jnp.arange(experts)[:, None]
    is_turn = rows % replicas[:, None] == jnp.arange(most)
    # One more than the slot, so that no slot at all sums to 0.
    return (jnp.where(is_chosen & is_turn, table + 1, 0).sum((2, 3)) - 1).astype(ids.dtype)


MOE: dict[str, Reference] = {"experts": _experts, "route": _route}
