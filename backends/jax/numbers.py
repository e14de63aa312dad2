"""Element types in JAX."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

Reference = Callable[..., Any]

# Packed 4-bit integers take a byte each while they are computed with.
_JAX_TYPES: dict[str, Any] = {
    "bool": jnp.bool_,
    "i4": jnp.int8,
    "u4": jnp.uint8,
    "i8": jnp.int8,
    "u8": jnp.uint8,
    "i16": jnp.int16,
    "i32": jnp.int32,
    "i64": jnp.int64,
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    "f64": jnp.float64,
    "f8e4m3": jnp.float8_e4m3fn,
    "f8e5m2": jnp.float8_e5m2,
    "f8e8m0": jnp.float8_e8m0fnu,
    "f4e2m1": jnp.float4_e2m1fn,
}


def jax_type(name: str) -> Any:
    """The JAX dtype of an element type's text form."""
    return _JAX_TYPES[name]


def is_float(x: Any) -> bool:
    """Whether an array holds floating-point numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
