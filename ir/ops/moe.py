"""Mixture of experts: each token goes through the few experts that its router chose."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from metainfer.ir.dtypes import Block, Scalar
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops.elementwise import gelu
from metainfer.ir.ops.infer import floats_of, integers_of, product_dtype, tensor_of
from metainfer.ir.ops.record import OPS, Array, Attrs, Sizes, op
from metainfer.ir.types import TensorType, Type

# T tokens, K experts of a token, E experts, D width, F inner width.

ACTIVATIONS = ("silu", "gelu_tanh")


def _infer_experts(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, ids = floats_of(types[0], "experts"), integers_of(types[1], "numbers of experts")
    weights = floats_of(types[2], "a router's weight")
    made = product_dtype("experts", x, tensor_of(types[3]), attrs["dtype"])
    gate, up, down = (_weight_of(t, made) for t in types[3:])
    if x.rank != 2 or ids.rank != 2 or ids.shape[0] != x.shape[0]:
        raise TypeMismatch(f"experts of {x} chosen by {ids}: wanted [T, D] and [T, K]")
    if weights.shape != ids.shape:
        raise TypeMismatch(f"experts: weights {weights} for choices {ids}")
    num, inner, width = gate.shape
    if width != x.shape[1]:
        raise TypeMismatch(f"experts: inner sizes differ, {x.shape[1]} and {width}")
    if up.shape != gate.shape or down.shape != (num, width, inner):
        raise TypeMismatch(
            f"experts: gate {gate}, up {up}, down {down} do not fit",
            advice="wanted [E, F, D], [E, F, D] and [E, D, F]",
        )
    if attrs["activation"] not in ACTIVATIONS:
        raise TypeMismatch(
            f"experts: unknown activation {attrs['activation']!r}",
            advice=f"known: {', '.join(ACTIVATIONS)}",
        )
    total = int(cast(int, attrs["total"]))
    if total and total < num.static:
        raise TypeMismatch(f"experts: {num} of a total of {total}")
    return (x.with_dtype(made),)


def _weight_of(type_: Type, made: Scalar) -> TensorType:
    weight = floats_of(type_, "experts")
    if weight.rank != 3:
        raise TypeMismatch(f"experts of {weight}: wanted three dims, the first of experts")
    # A weight kept in a narrower float is a format choice, as block formats are.
    if isinstance(weight.dtype, Scalar) and weight.dtype != made:
        if weight.dtype.bits >= made.bits:
            raise TypeMismatch(
                f"experts: {made} by {weight.dtype}, which is no narrower",
                advice="insert a cast",
            )
    if isinstance(weight.dtype, Block) and len(weight.dtype.block) > 2:
        raise TypeMismatch(f"experts: blocks of {weight.dtype} span experts")
    return weight


def _hits(sizes: Sizes) -> int:
    """Pairs of a token and one of these experts, if choices are spread evenly."""
    tokens, chosen = sizes.shape(1)
    held = sizes.shape(3)[0]
    total = int(cast(int, sizes.attrs["total"])) or held
    return -(-tokens * chosen * held // total)


def _touched(sizes: Sizes) -> int:
    """How many of these experts have a token, as expected if choices are spread evenly."""
    tokens, chosen = sizes.shape(1)
    held = sizes.shape(3)[0]
    total = int(cast(int, sizes.attrs["total"])) or held
    return round(held * (1 - (1 - chosen / total) ** tokens))


def _experts_flops(sizes: Sizes) -> int:
    _, inner, width = sizes.shape(3)
    return _hits(sizes) * inner * (6 * width + 8)


def _experts_bytes(sizes: Sizes) -> int:
    touched = _touched(sizes)
    per_expert = sum(_bytes_of(t, sizes) // sizes.shape(3)[0] for t in sizes.operands[3:])
    plain = sum(_bytes_of(t, sizes) for t in (*sizes.operands[:3], *sizes.results))
    return plain + touched * per_expert


def _bytes_of(type_: Type, sizes: Sizes) -> int:
    return tensor_of(type_).bytes_at(sizes.env)


@op(
    "experts",
    infer=_infer_experts,
    flops=_experts_flops,
    bytes=_experts_bytes,
    shard="T D!, T K!, T K!, E+ F+ D!, E+ F+ D!, E+ D! F+ -> T D! "
    "; sums 2 | 4 | 5 ; times 0 2 ; index 1 E",
)
def experts(
    x: Array,
    ids: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    activation: str = "silu",
    dtype: str = "",
    total: int = 0,
) -> Array:
    """Send each token through its chosen experts and add their results, weighted.

    ``y[t] = sum over k of weights[t,k] * down[e] @ (act(gate[e] @ x[t]) * (up[e] @ x[t]))`` with
    ``e = ids[t,k]``; an id outside [0, E) adds nothing: -1 marks padded rows and experts that
    another rank holds. ``total`` is the number of experts on all ranks together (0: these are all);
    it tells costs how many of the choices fall on this part. Tokens may be of a block format, as
    those of `linear`: then ``dtype`` is the type of the result. Accumulates in float32.
    Shapes: x [T, D], ids [T, K], weights [T, K], gate and up [E, F, D], down [E, D, F] -> [T, D].
    Source: Shazeer et al. 2017; Fedus et al. 2022.
    """
    y = np.zeros(x.shape, x.dtype)
    for e in range(gate.shape[0]):
        tokens, slots = np.nonzero(ids == e)
        rows = x[tokens]
        hidden = activated(rows @ gate[e].T, activation) * (rows @ up[e].T)
        # One token may choose an expert twice: += on indices would add only one of them.
        np.add.at(y, tokens, weights[tokens, slots, None] * (hidden @ down[e].T))
    return y


def activated(x: Array, activation: str) -> Array:
    """The activation of an expert's gate by name."""
    if activation == "gelu_tanh":
        return np.asarray(gelu(x, approximate="tanh"))
    return np.asarray(OPS[activation].reference(x))
