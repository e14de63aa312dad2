"""Attention: rotary embedding, dense attention, and attention over paged states."""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from metainfer.ir.dims import Dim
from metainfer.ir.dtypes import BOOL
from metainfer.ir.entries import check_entries, entry_values, stored_entry
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.ops import shard_rules
from metainfer.ir.ops.elementwise import per_element
from metainfer.ir.ops.infer import broadcast_shapes, floats_of, integers_of, state_of, tensor_of
from metainfer.ir.ops.record import OPS, RAW, STATEFUL, Array, Attrs, Sizes, op
from metainfer.ir.rope import Rope
from metainfer.ir.types import StateType, TensorType, Type

State = Mapping[str, Array]


def _infer_rope(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    x, positions = floats_of(types[0], "rope"), integers_of(types[1], "positions")
    if x.rank < 3 or positions.shape != x.shape[:-2]:
        raise TypeMismatch(
            f"rope of {x} at positions {positions}: wanted [..., heads, width] and [...]"
        )
    width = int(cast(int, attrs["width"])) or x.shape[-1].static
    if width < 0 or width % 2 or width > x.shape[-1].static:
        raise TypeMismatch(f"rope rotates {width} of {x.shape[-1]} numbers: wanted an even part")
    return (x,)


@op("rope", infer=_infer_rope, flops=per_element(6), shard="... H D!, ... -> ... H D!")
def rope(
    x: Array,
    positions: Array,
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
) -> Array:
    """Rotate pairs of the first ``width`` numbers of each head by their position.

    Pairs are (i, i + width/2), or (2i, 2i + 1) when interleaved; width 0 means the whole head.
    Shapes: x [..., H, D], positions [...] -> [..., H, D].
    Source: Su et al. 2021; `ir.rope` for the scalings.
    """
    width = width or x.shape[-1]
    parameters = Rope(
        theta, scaling, factor, low_freq_factor, high_freq_factor, original_max, beta_fast,
        beta_slow, attention_factor,
    )  # fmt: skip
    cos, sin = (t[..., None, :] for t in parameters.cos_sin(positions, width))
    turned, kept = x[..., :width], x[..., width:]
    first = turned[..., 0::2] if interleaved else turned[..., : width // 2]
    second = turned[..., 1::2] if interleaved else turned[..., width // 2 :]
    a, b = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turned = np.stack([a, b], axis=-1).reshape(turned.shape)
    else:
        turned = np.concatenate([a, b], axis=-1)
    return np.concatenate([turned, kept], axis=-1).astype(x.dtype)


def _infer_sdpa(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    q, k, v = (floats_of(t, "sdpa") for t in types[:3])
    if not q.dtype == k.dtype == v.dtype:
        raise TypeMismatch(f"sdpa: element types differ: {q}, {k}, {v}", advice="insert a cast")
    if not q.rank == k.rank == v.rank >= 3:
        raise TypeMismatch(f"sdpa of {q}, {k}, {v}: wanted equal ranks [..., heads, tokens, width]")
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or k.shape[-3] != v.shape[-3]:
        raise TypeMismatch(f"sdpa of {q}, {k}, {v}: widths or key counts differ")
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise TypeMismatch(f"sdpa of {q}, {k}, {v}: batch dims differ", advice="broadcast them")
    if q.shape[-3].static % k.shape[-3].static:
        raise TypeMismatch(f"sdpa: {q.shape[-3]} query heads over {k.shape[-3]} key heads")
    if len(types) > 3:
        _check_mask(tensor_of(types[3]), (*q.shape[:-1], k.shape[-2]))
    return (q.with_shape((*q.shape[:-1], v.shape[-1])),)


def _check_mask(mask: TensorType, scores: tuple[Dim, ...]) -> None:
    if mask.dtype != BOOL and not mask.dtype.is_float:
        raise TypeMismatch(f"sdpa: a mask is bool or floating point, got {mask}")
    if broadcast_shapes([mask.shape, scores]) != scores:
        wanted = ", ".join(map(str, scores))
        raise TypeMismatch(f"sdpa: mask {mask} does not broadcast to scores [{wanted}]")


def _sdpa_flops(sizes: Sizes) -> int:
    *_, keys, width = sizes.shape(1)
    queries = int(np.prod(sizes.shape(0)[:-1], dtype=np.int64))
    return 2 * queries * keys * (width + sizes.shape(2)[-1])


@op("sdpa", infer=_infer_sdpa, flops=_sdpa_flops, shard=shard_rules.sdpa)
def sdpa(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    scale: float = 0.0,
    causal: bool = False,
) -> Array:
    """Softmax attention over all keys; heads of q may be a multiple of those of k and v.

    The mask is added to the scores, or, if boolean, keeps what is true. ``scale`` 0 means
    width ** -0.5. Causal lines the first query up with the first key.
    Shapes: q [..., H, S, D], k [..., G, L, D], v [..., G, L, E], mask broadcasts to [..., H, S, L].
    Source: Vaswani et al. 2017, eq. 1.
    """
    groups = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, groups, axis=-3), np.repeat(v, groups, axis=-3)
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * (scale or q.shape[-1] ** -0.5)
    if causal:
        rows, columns = np.ogrid[: q.shape[-2], : k.shape[-2]]
        scores = np.where(columns <= rows, scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    return np.matmul(OPS["softmax"].reference(scores), v)


def _infer_kv_write(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    state, k, v = state_of(types[0]), floats_of(types[1], "keys"), floats_of(types[2], "values")
    slots = integers_of(types[3], "slots")
    if slots.rank != 1:
        raise TypeMismatch(f"kv_write at slots {slots}: wanted [T]")
    check_entries(state)
    for name, value in (("k", k), ("v", v)):
        entry = state.field_type(name)
        if value.shape != (*slots.shape, *entry.shape):
            raise TypeMismatch(f"kv_write of {value} to entries {name}: {entry}")
    return (state,)


def entry_traffic(sizes: Sizes) -> int:
    """Bytes that a write of entries moves: read and written once."""
    return 2 * cast(StateType, sizes.operands[0]).entry_bytes() * sizes.shape(1)[0]


@op(
    "kv_write",
    infer=_infer_kv_write,
    bytes=entry_traffic,
    shard="{H D!}, T! H D!, T! H D!, T! -> {H D!}",
    traits=[STATEFUL, RAW],
)
def kv_write(state: State, k: Array, v: Array, slots: Array) -> State:
    """Write each token's key and value to its slot of the paged state.

    A state with fields of scales gets them rounded (`ir.entries`).
    Shapes: k, v [T, G, D], slots [T]; state fields [pages, page_size, G, D].
    """
    return written(state, {**stored_entry(state, "k", k), **stored_entry(state, "v", v)}, slots)


def written(state: State, entries: State, slots: Array) -> State:
    """The pages of a state with new entries at their slots.

    Shapes: entries [T, ...], slots [T]; state fields [pages, page_size, ...].
    """
    made = {}
    for name, value in entries.items():
        pages = state[name].copy()
        flat = pages.reshape(-1, *pages.shape[2:])
        flat[slots] = value
        made[name] = flat.reshape(pages.shape)
    return made


def _infer_attention(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    q, state = floats_of(types[0], "attention"), state_of(types[1])
    check_entries(state)
    k, v = state.field_type("k"), state.field_type("v")
    if q.rank != 3 or k.rank != 2 or v.rank != 2 or k.shape[0] != v.shape[0]:
        raise TypeMismatch(f"attention of {q} over {state}: wanted [T, H, D] over k, v [G, D]")
    if q.shape[-1] != k.shape[-1]:
        raise TypeMismatch(f"attention: heads of {q.shape[-1]} over keys of {k.shape[-1]}")
    check_step("attention", types[2:])
    if q.shape[1].static % k.shape[0].static:
        raise TypeMismatch(f"attention: {q.shape[1]} query heads over {k.shape[0]} key heads")
    return (q.with_shape((q.shape[0], q.shape[1], v.shape[-1])),)


def context_of(sizes: Sizes, state_operand: int = 1) -> int:
    """Keys that each sequence sees: its page table's extent, cut to the window."""
    state = cast(StateType, sizes.operands[state_operand])
    context = sizes.env["P"] * (state.page_size or 1)
    window = int(cast(int, sizes.attrs.get("window", 0)))
    return min(context, window) if window else context


def pairs_seen(sizes: Sizes, state_operand: int = 1) -> int:
    """Pairs of a new token and a key that it sees, sequences taken as equally long."""
    tokens = sizes.shape(0)[0]
    state, batch = cast(StateType, sizes.operands[state_operand]), max(sizes.env["B"], 1)
    context = max(sizes.env["P"] * (state.page_size or 1), -(-tokens // batch))
    # With equal sequences, query i of t sees context - t + i + 1 keys: together t (2c - t + 1) / 2.
    seen = tokens * (2 * context + 1) // 2 - tokens * tokens // (2 * batch)
    window = int(cast(int, sizes.attrs.get("window", 0)))
    return min(seen, tokens * window) if window else seen


def _attention_flops(sizes: Sizes) -> int:
    _, heads, width = sizes.shape(0)
    return 2 * heads * (width + sizes.result_shape()[-1]) * pairs_seen(sizes)


def _attention_bytes(sizes: Sizes) -> int:
    q = cast(TensorType, sizes.operands[0])
    read = cast(StateType, sizes.operands[1]).entry_bytes() * context_of(sizes) * sizes.env["B"]
    return 2 * q.bytes_at(sizes.env) + read


def check_step(name: str, types: Sequence[Type]) -> None:
    """Check the types of the step's starts [B+1], lengths [B] and pages [B, P].

    Raises: TypeMismatch naming the op if they do not fit.
    """
    starts, lengths, pages = (integers_of(t, "the step's fields") for t in types)
    ranks = (starts.rank, lengths.rank, pages.rank)
    fits = ranks == (1, 1, 2) and pages.shape[0] == lengths.shape[0]
    if not fits or starts.shape[0] != lengths.shape[0] + 1:
        raise TypeMismatch(f"{name}: starts {starts}, lengths {lengths}, pages {pages}")


def visible(first: int, last: int, length: int, window: int = 0) -> Array:
    """Which keys of a sequence its new tokens see: bool [last - first, length]."""
    at = length - (last - first) + np.arange(last - first)[:, None]
    seen = np.arange(length)[None, :] <= at
    return cast(Array, seen & (np.arange(length)[None, :] > at - window) if window else seen)


@op(
    "attention",
    infer=_infer_attention,
    flops=_attention_flops,
    bytes=_attention_bytes,
    shard="T! H D!, {H D!}, S!, B!, B! P! -> T! H E!",
    traits=[RAW],
)
def attention(
    q: Array,
    state: State,
    starts: Array,
    lengths: Array,
    pages: Array,
    *,
    scale: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
) -> Array:
    """Causal attention of each sequence's new tokens over its paged keys and values.

    The new tokens' own keys are written before. Row t of sequence b stands at position
    ``lengths[b] - (starts[b+1] - starts[b]) + t - starts[b]``. A window of w sees the last w
    positions, its own included; 0 sees all. Rows past the last sequence give zeros.
    Shapes: q [T, H, D], starts [B+1], lengths [B], pages [B, P] -> [T, H, E].
    Source: Kwon et al. 2023 for the paging.
    """
    keys, values = (entry_values(state, name) for name in ("k", "v"))
    page_size = keys.shape[1]
    result = np.zeros((*q.shape[:2], values.shape[-1]), np.float32)
    for b in range(len(lengths)):
        first, last, length = int(starts[b]), int(starts[b + 1]), int(lengths[b])
        if first == last:
            continue
        table = pages[b, : -(-length // page_size)]
        k, v = (t[table].reshape(-1, *t.shape[2:])[:length].swapaxes(0, 1) for t in (keys, values))
        k, v = (np.repeat(t, q.shape[1] // t.shape[0], axis=0) for t in (k, v))
        scores = np.einsum("thd,hld->htl", q[first:last], k) * (scale or q.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        seen = visible(first, last, length, window)
        weights = OPS["softmax"].reference(np.where(seen, scores, -np.inf))
        result[first:last] = np.einsum("htl,hle->the", weights, v)
    return result
