"""Plain PyTorch forms of rotary embedding and attention, dense and over paged states.

Shape letters: T tokens, B sequences, P pages, H query heads, G key heads, D and E widths, L keys.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from metainfer.backends.torch.call import StateTensors, TorchCall
from metainfer.backends.torch.plain_reduce import softmax
from metainfer.backends.torch.plain_shape import as_index
from metainfer.backends.torch.quantize import quantize
from metainfer.backends.torch.tensors import to_torch, widen
from metainfer.ir.entries import ENTRIES, KV_FP8, LATENT, ROTARY, scale_field
from metainfer.ir.rope import Rope

Run = Callable[[TorchCall], None]


@lru_cache(maxsize=64)
def _frequencies(rope: Rope, width: int, device: torch.device) -> torch.Tensor:
    return to_torch(rope.inverse_frequencies(width)).to(device)


def rope_of(attrs: Mapping[str, Any]) -> Rope:
    """The rotary parameters among an op's attributes."""
    return Rope(**{f.name: attrs[f.name] for f in fields(Rope)})


def _rope(call: TorchCall) -> None:
    x, positions = widen(call.inputs[0]), call.inputs[1]
    width = call.attrs["width"] or x.shape[-1]
    rope = rope_of(call.attrs)
    angles = positions[..., None].float() * _frequencies(rope, width, x.device)
    cos, sin = (t[..., None, :] * rope.magnitude() for t in (angles.cos(), angles.sin()))
    turned, out = x[..., :width], torch.empty_like(call.outputs[0], dtype=x.dtype)
    pairs = out[..., :width]
    if call.attrs["interleaved"]:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs[..., 0::2] = first * cos - second * sin
        pairs[..., 1::2] = second * cos + first * sin
    else:
        first, second = turned[..., : width // 2], turned[..., width // 2 :]
        pairs[..., : width // 2] = first * cos - second * sin
        pairs[..., width // 2 :] = second * cos + first * sin
    out[..., width:] = x[..., width:]
    call.outputs[0].copy_(out)


def _repeat_heads(x: torch.Tensor, heads: int, axis: int) -> torch.Tensor:
    groups = heads // x.shape[axis]
    return x if groups == 1 else x.repeat_interleave(groups, dim=axis)


def _sdpa(call: TorchCall) -> None:
    q, k, v = (widen(t) for t in call.inputs[:3])
    k, v = (_repeat_heads(t, q.shape[-3], -3) for t in (k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)) * (call.attrs["scale"] or q.shape[-1] ** -0.5)
    if call.attrs["causal"]:
        size = (q.shape[-2], k.shape[-2])
        seen = torch.ones(size, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if len(call.inputs) > 3:
        mask = call.inputs[3]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores + widen(mask)
    call.outputs[0].copy_(torch.matmul(softmax(scores, -1), v))


def write_entries(state: StateTensors, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> None:
    """Store keys and values at their slots, in place.

    Shapes: state fields [pages, page_size, G, D], k and v [T, G, D], at [T].
    """
    write_entry(state, "k", k, at)
    write_entry(state, "v", v, at)


def write_entry(state: StateTensors, name: str, value: torch.Tensor, at: torch.Tensor) -> None:
    """Store what a field holds of each token at its slot, in place.

    Shapes: state fields [pages, page_size, ...], value [T, ...], at [T].
    """
    scaled = scale_field(name)
    if scaled not in state:
        _write(state[name], value.to(state[name].dtype), at)
        return
    codes, scales = quantize(value, KV_FP8)
    _write(state[name].view(torch.uint8), codes.view(torch.uint8), at)
    _write(state[scaled].view(torch.uint8), scales.view(torch.uint8), at)


def _write(pages: torch.Tensor, value: torch.Tensor, at: torch.Tensor) -> None:
    # NOTE: view, not reshape: a copy would be written and lost.
    flat = pages.view(-1, *pages.shape[2:])
    flat.index_copy_(0, as_index(at).long(), value)


def read_pages(
    state: StateTensors, name: str, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Entries of some pages one behind the other; rounded ones as numbers of a type.

    Shapes: table [N] -> [N * page_size, G, D]; of latents without G.
    """
    pages, scales = state[name], state.get(scale_field(name))
    if scales is None:
        return pages.index_select(0, table).flatten(0, 1)
    # Bytes are moved: not all of torch's copies know these types.
    codes = pages.view(torch.uint8).index_select(0, table).view(pages.dtype)
    factors = scales.view(torch.uint8).index_select(0, table).view(scales.dtype)
    return (codes.float() * factors.float()).to(dtype).flatten(0, 1)


def _kv_write(call: TorchCall) -> None:
    state, k, v, at = call.inputs
    write_entries(state, k, v, at)


@dataclass(frozen=True)
class Sequence:
    """One sequence of an attention: its rows of q, and its entries in order.

    Attributes:
        first: first row of q.
        last: row after the last one.
        keys: [L, G, D], gathered from its pages; of a latent state [L, R].
        values: [L, G, E]; of a latent state [L, C].
    """

    first: int
    last: int
    keys: torch.Tensor
    values: torch.Tensor

    def seen(self, window: int) -> torch.Tensor:
        """Which keys each new token sees, bool [last - first, L]."""
        length, new = self.keys.shape[0], self.last - self.first
        device = self.keys.device
        at = length - new + torch.arange(new, device=device)[:, None]
        columns = torch.arange(length, device=device)[None, :]
        visible = columns <= at
        return visible & (columns > at - window) if window else visible


def sequences(
    state: StateTensors,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    *,
    kind: torch.dtype,
) -> Iterator[Sequence]:
    """The sequences with new tokens, their pages gathered. Waits for the device (sizes are read).

    Entries that are rounded come as numbers of ``kind``.

    Shapes: starts [B+1], lengths [B], pages [B, P].
    """
    rows, counts = starts.tolist(), lengths.tolist()
    names = (ROTARY, LATENT) if LATENT in state else ENTRIES
    page_size = state[names[0]].shape[1]
    for b, length in enumerate(counts):
        if rows[b] == rows[b + 1]:
            continue
        table = as_index(pages[b, : -(-length // page_size)])
        keys, values = (read_pages(state, f, table, kind)[:length] for f in names)
        yield Sequence(rows[b], rows[b + 1], keys, values)


def _attention(call: TorchCall) -> None:
    q, state, *step = call.inputs
    q, out = widen(q), call.outputs[0]
    scale, softcap = call.attrs["scale"] or q.shape[-1] ** -0.5, call.attrs["softcap"]
    # Rows past the last sequence are padding and give zeros.
    result = torch.zeros(out.shape, dtype=q.dtype, device=q.device)
    for sequence in sequences(state, *step, kind=q.dtype):
        k, v = (
            _repeat_heads(widen(t).transpose(0, 1), q.shape[1], 0)
            for t in (sequence.keys, sequence.values)
        )
        rows = slice(sequence.first, sequence.last)
        scores = torch.matmul(q[rows].transpose(0, 1), k.transpose(1, 2)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = ~sequence.seen(call.attrs["window"])
        weights = softmax(scores.masked_fill(hidden, float("-inf")), -1)
        result[rows] = torch.matmul(weights, v).transpose(0, 1)
    out.copy_(result)


def _latent_write(call: TorchCall) -> None:
    state, c, r, at = call.inputs
    write_entry(state, LATENT, c, at)
    write_entry(state, ROTARY, r, at)


def _latent_attention(call: TorchCall) -> None:
    """One sequence after the other: all heads of its new tokens are rows of products with latents.

    Shapes: q [T, H, C], q_rope [T, H, R], state fields [pages, page_size, C or R] -> [T, H, C].
    """
    q, q_rope, state, *step = call.inputs
    q, q_rope, out = widen(q), widen(q_rope), call.outputs[0]
    heads, width = q.shape[1:]
    # Rows past the last sequence are padding and give zeros.
    out.zero_()
    for sequence in sequences(state, *step, kind=q.dtype):
        rows = slice(sequence.first, sequence.last)
        keys, latents = widen(sequence.keys), widen(sequence.values)
        scores = torch.mm(q[rows].reshape(-1, width), latents.t())
        scores = torch.addmm(scores, q_rope[rows].reshape(-1, keys.shape[1]), keys.t())
        scores = scores.view(-1, heads, len(latents)) * call.attrs["scale"]
        hidden = ~sequence.seen(0)[:, None]
        weights = softmax(scores.masked_fill(hidden, float("-inf")), -1)
        out[rows] = torch.mm(weights.flatten(0, 1), latents).view(-1, heads, width).to(out.dtype)


PLAIN_ATTENTION: dict[str, Run] = {
    "rope": _rope,
    "sdpa": _sdpa,
    "kv_write": _kv_write,
    "attention": _attention,
    "latent_write": _latent_write,
    "latent_attention": _latent_attention,
}
