"""Mixture of experts in JAX: every expert sees every token, and a matrix of shares picks."""

from typing import Any

import jax
import jax.numpy as jnp

from metainfer.backends.jax.numbers import Reference


def _experts(
    x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any, *,
    activation: str = "silu", total: int = 0,
) -> Any:  # fmt: skip
    # one_hot gives a row of zeros for numbers outside [0, E).
    chosen = jax.nn.one_hot(ids, gate.shape[0], dtype=x.dtype)
    share = jnp.einsum("tk,tke->te", weights.astype(x.dtype), chosen)
    inner = jnp.einsum("td,efd->tef", x, gate)
    inner = jax.nn.silu(inner) if activation == "silu" else jax.nn.gelu(inner, approximate=True)
    inner = inner * jnp.einsum("td,efd->tef", x, up)
    return jnp.einsum("te,tef,edf->td", share, inner, down).astype(x.dtype)


MOE: dict[str, Reference] = {"experts": _experts}
