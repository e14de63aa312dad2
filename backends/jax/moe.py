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


def _choose_experts(
    logits: Any, correction: Any, *, k: int, groups: int = 1, chosen_groups: int = 1,
    renormalise: bool = True, scaling: float = 1.0,
) -> Any:  # fmt: skip
    """Places in order by counting what is ahead of each: a number is chosen if few enough are."""
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    choice = scores + correction.astype(jnp.float32)
    tokens, num = choice.shape
    if groups > 1:
        parts = choice.reshape(tokens, groups, num // groups)
        best = jnp.sort(parts, axis=-1)[..., -2:].sum(-1)
        parts = jnp.where((_ahead(best) < chosen_groups)[..., None], parts, -jnp.inf)
        choice = parts.reshape(tokens, num)
    order = jnp.argsort(_ahead(choice), axis=-1)[:, :k]
    shares = jnp.take_along_axis(scores, order, axis=-1)
    if renormalise:
        shares = shares / (shares.sum(-1, keepdims=True) + 1e-20)
    return shares * scaling, order


def _ahead(x: Any) -> Any:
    """How many of a row come before each: larger ones, and equal ones of a lower place."""
    mine, other = x[..., :, None], x[..., None, :]
    earlier = jnp.arange(x.shape[-1])[:, None] > jnp.arange(x.shape[-1])
    return ((other > mine) | ((other == mine) & earlier)).sum(-1)


MOE: dict[str, Reference] = {
    "experts": _experts,
    "route": _route,
    "choose_experts": _choose_experts,
}
