"""Normalisation and gated activations."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops.elementwise import gelu, per_element
from metainfer.ir.ops.infer import axis_of, elementwise, floats_of, floats_only, tensor_of
from metainfer.ir.ops.record import ELEMENTWISE, OPS, Array, Attrs, op
from metainfer.ir.types import Type


def _infer_norm(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = floats_of(types[0], "a norm")
    axis_of(-1, x.rank)
    for other in types[1:]:
        weight = floats_of(other, "a norm's weight")
        if weight.shape != (x.shape[-1],):
            raise TypeMismatch(f"norm of width {x.shape[-1]} by a weight {weight}")
    return (x,)


@op("rms_norm", infer=_infer_norm, flops=per_element(4), shard="... D!, D! -> ... D!")
def rms_norm(x: Array, weight: Array, *, eps: float) -> Array:
    """Scale each row to unit root-mean-square, then by weight. Accumulates in float32.

    Shapes: x [..., D], weight [D] -> [..., D].
    Source: Zhang & Sennrich 2019, eq. 4.
    """
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.asarray(eps, x.dtype)) * weight


@op("layer_norm", infer=_infer_norm, flops=per_element(6), shard="... D!, D!, D! -> ... D!")
def layer_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float
) -> Array:
    """Shift each row to mean 0 and scale it to variance 1, then by weight and bias.

    Shapes: x [..., D], weight [D], bias [D] -> [..., D].
    Source: Ba et al. 2016.
    """
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    y = centred / np.sqrt(variance + np.asarray(eps, x.dtype))
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


@op(
    "silu_mul",
    infer=floats_only(elementwise),
    flops=per_element(11),
    shard="...=",
    traits=[ELEMENTWISE],
)
def silu_mul(gate: Array, up: Array) -> Array:
    """SwiGLU's middle: ``silu(gate) * up``.

    Source: Shazeer 2020.
    """
    return np.asarray(OPS["silu"].reference(gate) * up)


@op(
    "gelu_mul",
    infer=floats_only(elementwise),
    flops=per_element(13),
    shard="...=",
    traits=[ELEMENTWISE],
)
def gelu_mul(gate: Array, up: Array, *, approximate: str = "none") -> Array:
    """GeGLU's middle: ``gelu(gate) * up``.

    Source: Shazeer 2020.
    """
    return np.asarray(gelu(gate, approximate=approximate) * up)


def _infer_halves(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x = tensor_of(types[0])
    axis_of(-1, x.rank)
    if x.shape[-1].static % 2:
        raise TypeMismatch(f"gate and up side by side need an even width, got {x.shape[-1]}")
    return (x.with_shape((*x.shape[:-1], x.shape[-1] // 2)),)


@op(
    "silu_mul_halves",
    infer=floats_only(_infer_halves),
    flops=per_element(11),
    shard="... F! -> ... F!",
)
def silu_mul_halves(gate_up: Array) -> Array:
    """``silu(gate) * up`` of a row that holds gate, then up.

    Shapes: gate_up [..., 2F] -> [..., F].
    """
    gate, up = np.split(gate_up, 2, axis=-1)
    return cast(Array, silu_mul(gate, up))
