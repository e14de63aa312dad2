"""Attention by library kernels: dense, and over paged states.

Shape letters: T tokens, B sequences, P pages, H query heads, G key heads, D width, L keys.
"""

from typing import Any

import torch
from torch.nn import functional

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.plain_attention import Sequence, read_pages, sequences
from metainfer.backends.torch.plain_shape import as_index

aten: Any = torch.ops.aten


def sdpa(call: TorchCall) -> None:
    """Dense attention by ``scaled_dot_product_attention``.

    Shapes: q [..., H, S, D], k and v [..., G, L, D], mask [..., H, S, L].
    """
    q, k, v, *mask = call.inputs
    shape = q.shape
    if q.dim() == 3:
        q, k, v = q[None], k[None], v[None]
    made = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask[0] if mask else None,
        is_causal=call.attrs["causal"],
        scale=call.attrs["scale"] or shape[-1] ** -0.5,
        enable_gqa=q.shape[-3] != k.shape[-3],
    )
    call.outputs[0].copy_(made.view(call.outputs[0].shape))


def attention_sdpa(call: TorchCall) -> None:
    """Paged attention, one sequence after the other: pages gathered, then SDPA.

    Shapes: q [T, H, D], state fields [pages, page_size, G, D] -> [T, H, E].
    """
    q, state, *step = call.inputs
    out = call.outputs[0]
    scale, window = call.attrs["scale"] or q.shape[-1] ** -0.5, call.attrs["window"]
    out.zero_()
    for sequence in sequences(state, *step, kind=q.dtype):
        rows = slice(sequence.first, sequence.last)
        made = functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            sequence.keys.transpose(0, 1)[None],
            sequence.values.transpose(0, 1)[None],
            scale=scale,
            enable_gqa=q.shape[1] != sequence.keys.shape[1],
            **_visibility(sequence, window),
        )
        out[rows] = made[0].transpose(0, 1)


def _visibility(sequence: Sequence, window: int) -> dict[str, Any]:
    """How SDPA is told what each token sees: nothing hidden, the causal flag, or a mask."""
    new, length = sequence.last - sequence.first, sequence.keys.shape[0]
    inside = not window or window >= length
    if inside and new == 1:
        return {}
    if inside and new == length:
        return {"is_causal": True}
    return {"attn_mask": sequence.seen(window)}


def attention_flash(call: TorchCall) -> None:
    """Paged attention of all sequences by one variable-length flash kernel, pages gathered first.

    Reads no size from the device, so it can be captured in a graph.
    Shapes: q [T, H, D], state fields [pages, page_size, G, D], pages [B, P] -> [T, H, D].
    """
    q, state, starts, lengths, pages = call.inputs
    num_sequences, longest = pages.shape[0], pages.shape[1] * state["k"].shape[1]
    table = as_index(pages).reshape(-1)
    keys, values = (read_pages(state, f, table, q.dtype) for f in ("k", "v"))
    # Rows past the last sequence become one more sequence that sees no key: the kernel gives zeros.
    rows = functional.pad(starts.int(), (0, 1), value=q.shape[0])
    used = functional.pad(lengths.int(), (0, 1))
    ends = torch.arange(num_sequences + 2, dtype=torch.int32, device=q.device) * longest
    window = call.attrs["window"]
    made = aten._flash_attention_forward(
        q,
        keys,
        values,
        rows,
        ends,
        # NOTE: told that every sequence has one row, the library reshapes q by the number of
        # sequences, which the one of the padded rows makes wrong.
        max(q.shape[0], 2),
        longest,
        0.0,
        True,
        False,
        scale=call.attrs["scale"] or q.shape[-1] ** -0.5,
        # The window counts the token itself, the library only those before it.
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
        seqused_k=used,
    )[0]
    call.outputs[0].copy_(made)
