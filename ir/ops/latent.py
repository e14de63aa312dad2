"""Multi-head latent attention over paged latents.

A token's keys and values of all heads are made from one latent c, and a rotary key r that all heads
share: ``k[h] = [w_k[h] @ c, r]`` and ``v[h] = w_v[h] @ c``. Only c and r are kept. With ``w_k[h]``
taken into the query (``q[h] = w_k[h].T @ q_plain[h]``) and ``w_v[h]`` applied to the result, all
heads attend over the latents themselves: scores ``q[h] . c + q_rope[h] . r``, values c.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from metainfer.ir.entries import (
    LATENT,
    ROTARY,
    check_entries,
    entry_values,
    is_latent,
    stored_entry,
)
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops.attention import (
    check_step,
    context_of,
    entry_traffic,
    pairs_seen,
    visible,
    written,
)
from metainfer.ir.ops.infer import floats_of, integers_of, state_of
from metainfer.ir.ops.record import OPS, RAW, STATEFUL, Array, Attrs, Sizes, op
from metainfer.ir.types import StateType, TensorType, Type

# T tokens, B sequences, P pages, H query heads, C width of a latent, R of a rotary key.

State = Mapping[str, Array]
_STATE = 2  # operand of latent_attention


def _latents_of(type_: Type) -> tuple[StateType, TensorType, TensorType]:
    """The state, and its entries c and r."""
    state = state_of(type_)
    if not is_latent(state):
        raise TypeMismatch(f"{state} holds no latents", advice="wanted pages(c: [C], r: [R])")
    check_entries(state)
    c, r = state.field_type(LATENT), state.field_type(ROTARY)
    if (c.rank, r.rank) != (1, 1):
        raise TypeMismatch(f"{state}: wanted one latent c: [C] and one key r: [R] for all heads")
    return state, c, r


def _infer_write(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    state, *entries = _latents_of(types[0])
    slots = integers_of(types[3], "slots")
    if slots.rank != 1:
        raise TypeMismatch(f"latent_write at slots {slots}: wanted [T]")
    for name, type_, entry in zip((LATENT, ROTARY), types[1:3], entries, strict=True):
        value = floats_of(type_, "latents")
        if value.shape != (*slots.shape, *entry.shape):
            raise TypeMismatch(f"latent_write of {value} to entries {name}: {entry}")
    return (state,)


@op(
    "latent_write",
    infer=_infer_write,
    bytes=entry_traffic,
    shard="{D!}, T! C!, T! R!, T! -> {D!}",
    traits=[STATEFUL, RAW],
)
def latent_write(state: State, c: Array, r: Array, slots: Array) -> State:
    """Write each token's latent and rotary key to its slot of the paged state.

    A state with a field of scales gets the latent rounded (`ir.entries`).
    Shapes: c [T, C], r [T, R], slots [T]; state fields [pages, page_size, C or R].
    """
    entries = {**stored_entry(state, LATENT, c), **stored_entry(state, ROTARY, r)}
    return written(state, entries, slots)


def _infer_attention(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    q, q_rope = (floats_of(t, "latent_attention") for t in types[:2])
    state, c, r = _latents_of(types[_STATE])
    if q.rank != 3 or q_rope.rank != 3 or q.shape[:2] != q_rope.shape[:2]:
        raise TypeMismatch(f"latent_attention of {q} and {q_rope}: wanted [T, H, C] and [T, H, R]")
    if q.dtype != q_rope.dtype:
        raise TypeMismatch(f"latent_attention of {q} and {q_rope}", advice="insert a cast")
    if (q.shape[-1], q_rope.shape[-1]) != (c.shape[0], r.shape[0]):
        raise TypeMismatch(f"latent_attention of {q} and {q_rope} over {state}: widths differ")
    check_step("latent_attention", types[3:])
    return (q,)


def _attention_flops(sizes: Sizes) -> int:
    heads, width = sizes.shape(0)[1:]
    return 2 * heads * (2 * width + sizes.shape(1)[2]) * pairs_seen(sizes, _STATE)


def _attention_bytes(sizes: Sizes) -> int:
    q, q_rope = (cast(TensorType, t).bytes_at(sizes.env) for t in sizes.operands[:2])
    state = cast(StateType, sizes.operands[_STATE])
    return 2 * q + q_rope + state.entry_bytes() * context_of(sizes, _STATE) * sizes.env["B"]


@op(
    "latent_attention",
    infer=_infer_attention,
    flops=_attention_flops,
    bytes=_attention_bytes,
    shard="T! H C!, T! H R!, {D!}, S!, B!, B! P! -> T! H C!",
    traits=[RAW],
)
def latent_attention(
    q: Array,
    q_rope: Array,
    state: State,
    starts: Array,
    lengths: Array,
    pages: Array,
    *,
    scale: float,
) -> Array:
    """Causal attention of each sequence's new tokens over its paged latents, which are the values.

    Rows, positions and padding are those of ``attention``. The scale is no function of C: it is
    that of the heads which the latents stand for.
    Shapes: q [T, H, C], q_rope [T, H, R], starts [B+1], lengths [B], pages [B, P] -> [T, H, C].
    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1 and appendix C.
    """
    latents, keys = (entry_values(state, name) for name in (LATENT, ROTARY))
    result = np.zeros(q.shape, np.float32)
    for b, length in enumerate(lengths.tolist()):
        first, last = int(starts[b]), int(starts[b + 1])
        if first == last:
            continue
        table = pages[b, : -(-length // latents.shape[1])]
        c, r = (t[table].reshape(-1, t.shape[-1])[:length] for t in (latents, keys))
        scores = np.einsum("thc,lc->htl", q[first:last], c)
        scores = (scores + np.einsum("thr,lr->htl", q_rope[first:last], r)) * scale
        seen = visible(first, last, length)
        weights = OPS["softmax"].reference(np.where(seen, scores, -np.inf))
        result[first:last] = np.einsum("htl,lc->thc", weights, c)
    return result
