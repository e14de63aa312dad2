"""The structured ops that a model may call: each stays one op when the model is captured.

Each is a `torch.library` custom op `torch.ops.metainfer.<name>` with the operands and attributes
of the op's record (`metainfer.ir.ops`), so that a captured call maps to the record as it is.
Eagerly they compute plainly, in float32 (float64 for float64 inputs), rounded at the result. Two
have no record of the same operands: `attention` takes keys and values in place of the paged state
and sees one sequence, and `sample_rows` keeps all rows.

They are made for inference: gradients are not defined.
"""

# T tokens, H query heads, G key and value heads, D head width, E value width.

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.ir.ops.moe import BEST_OF_GROUP, NO_SHARE
from metainfer.ir.rope import Rope

NAMESPACE = "metainfer"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _structured(fake: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Register a function as a custom op of its own name; ``fake`` gives the result's shape."""

    def register(function: _Function) -> _Function:
        name = f"{NAMESPACE}::{function.__name__}"
        custom = torch.library.custom_op(name, function, mutates_args=())
        custom.register_fake(fake)
        # The custom op itself is returned, not a wrapper: a traced call's frames then lead from
        # torch straight to the model's line.
        return cast(_Function, update_wrapper(cast(Any, custom), function))

    return register


def _like_first(x: Tensor, *others: object, **attrs: object) -> Tensor:
    return x.new_empty(x.shape)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@_structured(_like_first)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root-mean-square, then by weight.

    Shapes: x [..., D], weight [D] -> [..., D].
    Source: Zhang & Sennrich 2019, eq. 4.
    """
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype).contiguous()


@_structured(_like_first)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's middle: ``silu(gate) * up``.

    Shapes: gate, up [...] -> [...].
    Source: Shazeer 2020.
    """
    return (F.silu(_wide(gate)) * up).to(gate.dtype).contiguous()


@_structured(_like_first)
def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """GeGLU's middle: ``gelu(gate) * up``, the Gaussian exact ("none") or by "tanh".

    Shapes: gate, up [...] -> [...].
    Source: Shazeer 2020.
    """
    return (F.gelu(_wide(gate), approximate=approximate) * up).to(gate.dtype).contiguous()


@_structured(_like_first)
def rope(
    x: Tensor,
    positions: Tensor,
    *,
    width: int = 0,
    interleaved: bool = False,
    theta: float = 10000.0,
    scaling: str = "",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max: int = 8192,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float = 0.0,
) -> Tensor:
    """Rotate pairs of the first ``width`` numbers of each head by their position.

    Pairs are (i, i + width/2), or (2i, 2i + 1) when interleaved; width 0 means the whole head.
    `ir.rope.Rope` documents the rest; ``Rope(...).attrs()`` gives them as keywords.
    Shapes: x [..., H, D], positions [...] -> [..., H, D].
    Source: Su et al. 2021.
    """
    width = width or x.shape[-1]
    parameters = Rope(
        theta, scaling, factor, low_freq_factor, high_freq_factor, original_max, beta_fast,
        beta_slow, attention_factor,
    )  # fmt: skip
    frequencies = torch.from_numpy(parameters.inverse_frequencies(width)).to(x.device)
    angles = (positions[..., None].float() * frequencies)[..., None, :]
    cos, sin = angles.cos() * parameters.magnitude(), angles.sin() * parameters.magnitude()
    turned, kept = _wide(x[..., :width]), x[..., width:]
    first = turned[..., 0::2] if interleaved else turned[..., : width // 2]
    second = turned[..., 1::2] if interleaved else turned[..., width // 2 :]
    a, b = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([turned.to(x.dtype), kept], -1)


@_structured(_like_first)
def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """Send each token through its chosen experts and add their results, weighted.

    ``y[t] = sum over k of weights[t,k] * down[e] @ (act(gate[e] @ x[t]) * (up[e] @ x[t]))`` with
    ``e = ids[t,k]``; an id outside [0, E) adds nothing. Activations: "silu", "gelu_tanh".
    Shapes: x [T, D], ids [T, K], weights [T, K], gate and up [E, F, D], down [E, D, F] -> [T, D].
    Source: Shazeer et al. 2017; Fedus et al. 2022.
    """
    wide = _wide(x)
    total = torch.zeros_like(wide)
    for e in range(gate.shape[0]):
        tokens, slots = torch.nonzero(ids == e, as_tuple=True)
        rows = wide[tokens]
        inner = rows @ gate[e].to(wide.dtype).t()
        inner = F.silu(inner) if activation == "silu" else F.gelu(inner, approximate="tanh")
        inner = inner * (rows @ up[e].to(wide.dtype).t())
        share = weights[tokens, slots, None].to(wide.dtype)
        total.index_add_(0, tokens, share * (inner @ down[e].to(wide.dtype).t()))
    return total.to(x.dtype)


def _choice_fake(logits: Tensor, correction: Tensor, *, k: int, **attrs: object) -> Any:
    shares = logits.new_empty((logits.shape[0], k), dtype=torch.float32)
    return shares, torch.empty_like(shares, dtype=torch.int64)


@_structured(_choice_fake)
def choose_experts(
    logits: Tensor,
    correction: Tensor,
    *,
    k: int,
    groups: int = 1,
    chosen_groups: int = 1,
    renormalise: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Shares and numbers of each token's experts, by sigmoid scores that are corrected.

    The correction is added while experts are chosen; shares are the plain scores, divided by their
    sum if ``renormalise``, times ``scaling``. With groups, equal ones in order, only experts of the
    best ones are chosen: a group counts by the sum of its two best corrected scores.
    Shapes: logits [T, N], correction [N] -> shares f32 [T, k], numbers i64 [T, k].
    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
    """
    scores = logits.float().sigmoid()
    choice = scores + correction.float()
    if groups > 1:
        of_groups = choice.reshape(len(choice), groups, -1)
        best = torch.topk(of_groups, BEST_OF_GROUP).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, torch.topk(best, chosen_groups).indices, True)
        choice = of_groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    ids = torch.topk(choice, k).indices
    shares = scores.gather(1, ids)
    if renormalise:
        shares = shares / (shares.sum(-1, keepdim=True) + NO_SHARE)
    return shares * scaling, ids


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, **attrs: object) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@_structured(_attention_fake)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of one sequence's tokens over each other.

    Compiled, the tokens are those of all sequences of a step, and each sees its own sequence
    through a paged state. ``scale`` 0 means D ** -0.5; a window of w sees the last w positions, its
    own included, and 0 sees all; a softcap of c maps scores to c * tanh(score / c).
    Shapes: q [T, H, D], k [T, G, D], v [T, G, E], H a multiple of G -> [T, H, E].
    Source: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 for the groups.
    """
    tokens, heads, width = q.shape
    keys, values = (_wide(t).repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", _wide(q), keys) * (scale or width**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(tokens, device=q.device)
    age = at[:, None] - at[None, :]
    seen = (age >= 0) & (age < window) if window else age >= 0
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hts,she->the", weights, values).to(q.dtype).contiguous()


@_structured(_like_first)
def sample_rows(x: Tensor) -> Tensor:
    """Keep the rows whose logits are wanted.

    Compiled, those are the step's ``sample_rows``; eagerly all of them. What follows in the model
    (final norm, head) then runs on these rows only.
    Shapes: x [T, ...] -> [R, ...], eagerly R = T.
    """
    return x.clone(memory_format=torch.contiguous_format)
