"""Elementwise ops in JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from metainfer.backends.jax.numbers import Reference, is_float, jax_type


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _or_zero(function: Reference) -> Reference:
    """An integer divided by 0 gives 0."""

    def run(x: Any, y: Any) -> Any:
        if is_float(x):
            return function(x, y)
        return jnp.where(y == 0, 0, function(x, jnp.where(y == 0, 1, y))).astype(x.dtype)

    return run


def _div(x: Any, y: Any) -> Any:
    return jnp.divide(x, y) if is_float(x) else jnp.floor_divide(x, y)


def _cast(x: Any, *, dtype: str) -> Any:
    if dtype == "bool":
        return x != 0
    return lax.convert_element_type(x, jax_type(dtype))


def _silu_mul(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def _gelu_mul(gate: Any, up: Any, *, approximate: str = "none") -> Any:
    return _gelu(gate, approximate=approximate) * up


def _silu_mul_halves(gate_up: Any) -> Any:
    return _silu_mul(*jnp.split(gate_up, 2, axis=-1))


ELEMENTWISE: dict[str, Reference] = {
    "neg": jnp.negative,
    "abs": jnp.abs,
    "exp": jnp.exp,
    "log": jnp.log,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "reciprocal": jnp.reciprocal,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "erf": special.erf,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "floor": jnp.floor,
    "gelu": _gelu,
    "logical_not": jnp.logical_not,
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": _or_zero(_div),
    "floor_div": _or_zero(jnp.floor_divide),
    "remainder": _or_zero(jnp.remainder),
    "pow": jnp.power,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "where": jnp.where,
    "cast": _cast,
    "silu_mul": _silu_mul,
    "gelu_mul": _gelu_mul,
    "silu_mul_halves": _silu_mul_halves,
}
