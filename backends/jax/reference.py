"""Every op once more, in JAX: the same calling convention as the numpy references.

Each function is written from the op's definition, with JAX's own primitive where it has one, so
that a fault in a numpy reference shows as a difference. Arrays go in and come out as numpy's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from metainfer.backends.jax.attention import ATTENTION
from metainfer.backends.jax.elementwise import ELEMENTWISE
from metainfer.backends.jax.load import LOAD
from metainfer.backends.jax.moe import MOE
from metainfer.backends.jax.numbers import Reference
from metainfer.backends.jax.reductions import REDUCTIONS
from metainfer.backends.jax.shapes import SHAPES
from metainfer.ir.dtypes import BlockArray


def _to_jax(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: jnp.asarray(array) for name, array in data.items()}
    return data if isinstance(data, BlockArray) else jnp.asarray(data)


def _to_numpy(made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(_to_numpy(m) for m in made)
    if isinstance(made, dict):
        return {name: np.asarray(array) for name, array in made.items()}
    return made if isinstance(made, BlockArray) else np.asarray(made)


def _on_numpy(function: Reference, *, is_traced: bool) -> Reference:
    """Run on numpy arrays, with 64-bit types and full precision of products.

    Compiling an op as a whole is several times faster than its primitives one by one; ops of load
    graphs decide by values, which tracing cannot.
    """

    @functools.wraps(function)
    def run(*operands: Any, **attrs: Any) -> Any:
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            whole = functools.partial(function, **attrs)
            made = (jax.jit(whole) if is_traced else whole)(*map(_to_jax, operands))
            return _to_numpy(made)

    return run


REFERENCES: dict[str, Reference] = {
    **{
        name: _on_numpy(function, is_traced=True)
        for table in (ELEMENTWISE, SHAPES, REDUCTIONS, ATTENTION, MOE)
        for name, function in table.items()
    },
    **{name: _on_numpy(function, is_traced=False) for name, function in LOAD.items()},
}
