"""Entries of paged states: plain numbers, or fp8 codes with a scale for each one.

A state holds keys and values, or what both are made of (latent attention, `ir.ops.latent`)::

    pages(k: bf16[3,64], v: bf16[3,64]) per token
    pages(c: bf16[512], r: bf16[64]) per token

Rounded keys and values are four fields instead of two::

    pages(k: f8e4m3[3,64], k_scale: f8e8m0[3,1], v: f8e4m3[3,64], v_scale: f8e8m0[3,1]) per token

Of latents only ``c`` is rounded: the rotary key ``r`` is an eighth of it, and its error would meet
every score.

A scale belongs to one token: an entry is written once and never changes with what comes after. It
belongs to one head: heads differ in size by powers of ten. It is a power of two: codes are floats,
so it loses nothing beside a finer one (a relative error of 0.0265 instead of 0.0264), takes a byte
instead of four, and code times scale is exact in 16 bits, as kernels multiply it.
"""

from collections.abc import Mapping

import numpy as np

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import F8E4M3, F8E8M0, Block, BlockArray, DType, Scalar, quantize
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.types import StateType, TensorType

KV_FP8 = Block(F8E4M3, (0,), F8E8M0)
ENTRIES = ("k", "v")
LATENT = "c"
ROTARY = "r"
Fields = Mapping[str, np.ndarray]


def scale_field(name: str) -> str:
    """The field that holds the scales of another one."""
    return f"{name}_scale"


def entry_fields(name: str, type_: TensorType, dtype: DType) -> list[tuple[str, TensorType]]:
    """Fields of a state that hold entries of a type in a format: a scalar one, or `KV_FP8`.

    Raises: TypeMismatch for another format.
    """
    if isinstance(dtype, Scalar):
        return [(name, TensorType(type_.shape, dtype))]
    if dtype != KV_FP8:
        raise TypeMismatch(f"keys and values as {dtype}", advice=f"known: scalar types, {KV_FP8}")
    scales = TensorType((*type_.shape[:-1], dim(1)), dtype.scale)
    return [(name, TensorType(type_.shape, dtype.element)), (scale_field(name), scales)]


def is_rounded(state: StateType) -> bool:
    """Whether entries are codes with scales."""
    names = {name for name, _ in state.fields}
    return not names.isdisjoint({scale_field("k"), scale_field(LATENT)})


def is_latent(state: StateType) -> bool:
    """Whether a state holds what keys and values are made of."""
    return any(name == LATENT for name, _ in state.fields)


def rounded_fields(state: StateType) -> tuple[str, ...]:
    """Fields of a state that may be codes with scales."""
    return (LATENT,) if is_latent(state) else ENTRIES


def check_entries(state: StateType) -> None:
    """Check that fields which hold scales belong to fields of codes.

    Raises: TypeMismatch if they do not.
    """
    fields, held = dict(state.fields), rounded_fields(state)
    if not any(scale_field(name) in fields for name in held):
        return
    for name in held:
        codes, scales = fields.get(name), fields.get(scale_field(name))
        fits = codes is not None and scales is not None
        if codes is not None and scales is not None:
            shape = (*codes.shape[:-1], dim(1))
            fits = (codes.dtype, scales.dtype, scales.shape) == (F8E4M3, F8E8M0, shape)
        if not fits:
            raise TypeMismatch(
                f"{state}: scales do not fit their codes",
                advice="wanted f8e4m3[G,D] and f8e8m0[G,1] for keys and values both, or "
                "f8e4m3[C] and f8e8m0[1] for latents",
            )


def stored_entry(state: Mapping[str, np.ndarray], name: str, values: np.ndarray) -> Fields:
    """What is stored of new entries of a field, by field: numbers, or codes and their scales.

    Shapes: values [T, G, D] -> [T, G, D], and scales [T, G, 1]; of latents without G.
    Raises: TypeMismatch if a value that is to be rounded is not finite.
    """
    if scale_field(name) not in state:
        return {name: values.astype(state[name].dtype)}
    made = quantize(values, KV_FP8)
    return {name: made.codes, scale_field(name): made.scales}


def entry_values(state: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Float32 values of a field of entries, scales taken in."""
    scales = state.get(scale_field(name))
    if scales is None:
        return state[name].astype(np.float32)
    return BlockArray(KV_FP8, state[name], scales).dequantize()
