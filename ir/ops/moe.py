"""Mixture of experts: each token goes through the few experts that its router chose."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import F32, I64, Block, Scalar
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


def _infer_choice(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, correction = (floats_of(t, "choose_experts") for t in types)
    if x.rank != 2 or correction.shape != x.shape[1:]:
        raise TypeMismatch(f"choose_experts of {x} corrected by {correction}: wanted [T, N], [N]")
    num = x.shape[1].static
    k, groups, kept = (int(cast(int, attrs[n])) for n in ("k", "groups", "chosen_groups"))
    if groups < 1 or num % groups or not 1 <= kept <= groups:
        raise TypeMismatch(f"choose_experts: {kept} of {groups} groups of {num} experts")
    if not 1 <= k <= num // groups * kept:
        raise TypeMismatch(f"choose_experts: {k} of {num // groups * kept} experts")
    if groups > 1 and num // groups < BEST_OF_GROUP:
        raise TypeMismatch(
            f"choose_experts: groups of {num // groups} experts", advice="2 at least"
        )
    made = TensorType((x.shape[0], dim(k)), F32)
    return made, made.with_dtype(I64)


def _choice_flops(sizes: Sizes) -> int:
    tokens, num = sizes.shape(0)
    return 8 * tokens * num


BEST_OF_GROUP = 2  # experts of a group by whose scores it is chosen
NO_SHARE = 1e-20  # keeps shares of nothing from becoming NaN


@op(
    "choose_experts",
    infer=_infer_choice,
    flops=_choice_flops,
    shard="T N!, N! -> T K!, T K!",
)
def choose_experts(
    logits: Array,
    correction: Array,
    *,
    k: int,
    groups: int = 1,
    chosen_groups: int = 1,
    renormalise: bool = True,
    scaling: float = 1.0,
) -> tuple[Array, Array]:
    """Shares and numbers of each token's experts, by sigmoid scores that are corrected.

    The correction is added while experts are chosen; shares are the plain scores, divided by their
    sum if ``renormalise``, times ``scaling``. With groups, equal ones in order, only experts of the
    best ones are chosen: a group counts by the sum of its two best corrected scores. Ties go to the
    lower number.
    Shapes: logits [T, N], correction [N] -> shares f32 [T, k], numbers [T, k].
    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
    """
    scores = 1.0 / (1.0 + np.exp(-logits.astype(np.float32)))
    choice = scores + correction.astype(np.float32)
    topk = OPS["topk"].reference
    if groups > 1:
        of_groups = choice.reshape(len(choice), groups, -1)
        best, _ = topk(of_groups, k=BEST_OF_GROUP)
        _, kept = topk(best.sum(-1), k=chosen_groups)
        inside = np.any(kept[..., None] == np.arange(groups), axis=1)
        choice = np.where(inside[..., None], of_groups, -np.inf).reshape(choice.shape)
    _, ids = topk(choice, k=k)
    shares = np.take_along_axis(scores, ids, axis=-1)
    if renormalise:
        shares = shares / (shares.sum(-1, keepdims=True) + np.float32(NO_SHARE))
    return shares * np.float32(scaling), ids


def activated(x: Array, activation: str) -> Array:
    """The activation of an expert's gate by name."""
    if activation == "gelu_tanh":
        return np.asarray(gelu(x, approximate="tanh"))
    return np.asarray(OPS[activation].reference(x))
