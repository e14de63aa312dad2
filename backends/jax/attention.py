"""Rotary embedding and attention in JAX."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from metainfer.backends.jax.numbers import Reference
from metainfer.backends.jax.reductions import softmax


def _frequency(pair: int, width: int, theta: float, scaling: str, factor: float,
               attrs: Mapping[str, Any]) -> float:  # fmt: skip
    """Radians per position of one rotated pair, in double precision."""
    plain = theta ** (-2.0 * pair / width)
    if scaling == "linear":
        return plain / factor
    if scaling == "llama3":
        # Turns that the pair makes over the context it was trained on decide.
        turns = attrs["original_max"] * plain / (2.0 * math.pi)
        low, high = attrs["low_freq_factor"], attrs["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return plain * (kept + (1.0 - kept) / factor)
    if scaling == "yarn":

        def pair_of(turns: float) -> float:
            return 0.5 * width * math.log(attrs["original_max"] / (2 * math.pi * turns), theta)

        first = max(math.floor(pair_of(attrs["beta_fast"])), 0)
        last = min(math.ceil(pair_of(attrs["beta_slow"])), width - 1)
        stretched = min(max((pair - first) / (last - first or 0.001), 0.0), 1.0)
        return plain * (1.0 - stretched + stretched / factor)
    return plain


def _rope(
    x: Any,
    positions: Any,
    *,
    width: int = 0,
    interleaved: bool = False,
    theta: float = 10000.0,
    scaling: str = "",
    factor: float = 1.0,
    attention_factor: float = 0.0,
    **attrs: Any,
) -> Any:
    width = width or x.shape[-1]
    defaults = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    known = {**defaults, **attrs}
    frequencies = jnp.array(
        [_frequency(i, width, theta, scaling, factor, known) for i in range(width // 2)]
    )
    magnitude = 1.0
    if scaling == "yarn":
        magnitude = attention_factor or 1.0 + 0.1 * math.log(max(factor, 1.0))
    # A rotation is a product of complex numbers.
    turn = magnitude * jnp.exp(1j * positions[..., None, None] * frequencies)
    turned, kept = x[..., :width], x[..., width:]
    if interleaved:
        pairs = lax.reshape(turned, (*turned.shape[:-1], width // 2, 2))
    else:
        pairs = jnp.swapaxes(lax.reshape(turned, (*turned.shape[:-1], 2, width // 2)), -1, -2)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    parts = jnp.stack([z.real, z.imag], axis=-1 if interleaved else -2)
    return jnp.concatenate([parts.reshape(turned.shape), kept], axis=-1).astype(x.dtype)


def _sdpa(
    q: Any, k: Any, v: Any, mask: Any = None, *, scale: float = 0.0, causal: bool = False
) -> Any:
    *lead, heads, rows, width = q.shape
    groups, keys = k.shape[-3], k.shape[-2]
    grouped = q.reshape(*lead, groups, heads // groups, rows, width)
    scores = jnp.einsum("...ghsd,...gld->...ghsl", grouped, k) * (scale or 1 / math.sqrt(width))
    scores = scores.reshape(*lead, heads, rows, keys)
    if mask is not None and mask.dtype != jnp.bool_:
        scores = scores + mask
    elif mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    if causal:
        scores = jnp.where(jnp.tri(rows, keys, dtype=bool), scores, -jnp.inf)
    weights = softmax(scores).reshape(*lead, groups, heads // groups, rows, keys)
    y = jnp.einsum("...ghsl,...gle->...ghse", weights, v)
    return y.reshape(*lead, heads, rows, v.shape[-1])


def _kv_write(state: Mapping[str, Any], k: Any, v: Any, slots: Any) -> dict[str, Any]:
    return _written(state, {"k": k, "v": v}, slots)


def _latent_write(state: Mapping[str, Any], c: Any, r: Any, slots: Any) -> dict[str, Any]:
    return _written(state, {"c": c, "r": r}, slots)


def _written(state: Mapping[str, Any], entries: Mapping[str, Any], slots: Any) -> dict[str, Any]:
    written = {}
    for name, value in entries.items():
        size = state[name].shape[1]
        place = (slots // size, slots % size)
        scaled = f"{name}_scale"
        if scaled in state:
            # The least power of two at which the largest number is a code; zeros keep 1.
            most = jnp.abs(value).astype(jnp.float32).max(axis=-1, keepdims=True)
            exponent = jnp.ceil(jnp.log2(jnp.where(most > 0, most / 448, 1)))
            scale = jnp.exp2(jnp.maximum(exponent, -126))
            written[scaled] = state[scaled].at[place].set(scale.astype(state[scaled].dtype))
            value = value.astype(jnp.float32) / scale
        written[name] = state[name].at[place].set(value.astype(state[name].dtype))
    return written


def _entries(state: Mapping[str, Any], name: str) -> Any:
    """Numbers of a field, by its scales where it has some."""
    scales = state.get(f"{name}_scale")
    if scales is None:
        return state[name]
    return state[name].astype(jnp.float32) * scales.astype(jnp.float32)


def _rows(tokens: int, starts: Any, lengths: Any) -> tuple[Any, Any, Any]:
    """Of each row: its sequence, whether it is none of the padding, and its position."""
    row = jnp.arange(tokens)
    # Sequences without new tokens have no rows.
    sequence = jnp.clip(jnp.searchsorted(starts, row, side="right") - 1, 0, len(lengths) - 1)
    return sequence, row < starts[-1], lengths[sequence] - (starts[sequence + 1] - row)


def _attention(
    q: Any,
    state: Mapping[str, Any],
    starts: Any,
    lengths: Any,
    pages: Any,
    *,
    scale: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
) -> Any:
    tokens, heads, width = q.shape
    sequence, valid, position = _rows(tokens, starts, lengths)
    gathered = {n: _entries(state, n).astype(q.dtype)[pages[sequence]] for n in ("k", "v")}
    k, v = (gathered[n].reshape(tokens, -1, *gathered[n].shape[3:]) for n in ("k", "v"))
    groups = k.shape[2]
    grouped = q.reshape(tokens, groups, heads // groups, width)
    scores = jnp.einsum("tghd,tlgd->tghl", grouped, k) * (scale or 1 / math.sqrt(width))
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = position[:, None] - jnp.arange(k.shape[1])
    seen = (distance >= 0) & valid[:, None]
    if window:
        seen &= distance < window
    weights = softmax(jnp.where(seen[:, None, None], scores, -jnp.inf))
    return jnp.einsum("tghl,tlge->tghe", weights, v).reshape(tokens, heads, v.shape[-1])


def _latent_attention(
    q: Any,
    q_rope: Any,
    state: Mapping[str, Any],
    starts: Any,
    lengths: Any,
    pages: Any,
    *,
    scale: float,
) -> Any:
    """One key head whose keys are latents and rotary keys side by side."""
    latents = _entries(state, "c").astype(q.dtype)
    keys = jnp.concatenate([latents, state["r"].astype(q.dtype)], axis=-1)
    wide = {"k": keys[:, :, None], "v": latents[:, :, None]}
    joined = jnp.concatenate([q, q_rope], axis=-1)
    return _attention(joined, wide, starts, lengths, pages, scale=scale)


ATTENTION: dict[str, Reference] = {
    "rope": _rope,
    "sdpa": _sdpa,
    "kv_write": _kv_write,
    "attention": _attention,
    "latent_write": _latent_write,
    "latent_attention": _latent_attention,
}
