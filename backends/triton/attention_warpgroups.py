"""Launches of attention by warpgroups: for cards with their matrix products and a copy engine.

Shape letters: T tokens, B sequences, H query heads, G key heads, D width.
"""

from typing import Any

import torch

from metainfer.backends.triton.attention import (
    Attention,
    Tile,
    check,
    factor_of,
    groups_of,
    matrix_of,
    power_above,
    sms_of,
    strides_of,
)
from metainfer.backends.triton.interpreter import is_interpreting
from metainfer.backends.triton.launch import Launch
from metainfer.ir.errors import Unsupported

# Two warpgroups of 64 rows; buffers of keys and of values that fit beside the queries, by width.
STAGES = {64: 3, 128: 2}
ROWS, KEYS = 128, 128
_MANY_TURNS = 8  # of the multiprocessors: one that is half empty matters less than how tiles pair
_WARPS = 4  # of the warpgroup that the launch names; the others come on top


def warpgroups(call: Attention, tiles: int = 0) -> list[Launch]:
    """One program for each tile, or for two.

    Args:
        call: tensors and attributes.
        tiles: of a program, 1 or 2; 0 leaves it to their number.

    Raises: Unsupported if the kernel cannot take the call, or where Triton interprets.
    """
    check(call)
    _check_form(call)
    width = call.q.shape[2]
    tile = Tile(ROWS, KEYS, _WARPS, STAGES[width])
    from metainfer.backends.triton.templates.attention_warpgroups import attention_warpgroups

    heads, groups = call.heads(tile.rows), groups_of(call, tile)
    queries, copied = tile.rows // heads, min(call.page_size, tile.keys)
    tiles = tiles or _tiles_of_program(call, queries, groups)
    programs = _programs(call, queries * tiles, groups)
    arguments = {
        "q": call.q, "k": _described(call.k, copied), "v": _described(call.v, copied),
        "out": call.out, "starts": call.starts, "lengths": call.lengths, "table": call.pages,
        "T": call.q.shape[0], "B": call.lengths.shape[0], "groups": groups,
        "factor": factor_of(call), **strides_of(call),
    }  # fmt: skip
    constants = {
        "GROUP": call.group, "HEADS": heads, "QUERIES": queries, "ROWS": tile.rows,
        "KEYS": tile.keys, "PAGE": call.page_size, "MANY": power_above(call.lengths.shape[0] + 1),
        "D": width, "COPIED": copied, "STAGES": tile.num_stages, "TILES": tiles,
    }  # fmt: skip
    return [
        Launch(
            attention_warpgroups, (programs,), arguments, constants, _WARPS, tile.num_stages,
            matrix_of(call),
        )
    ]  # fmt: skip


def _tiles_of_program(call: Attention, queries: int, groups: int) -> int:
    """Two, unless the multiprocessors are through with single tiles in fewer of a few turns.

    Each is compiled when a step first needs it, some seconds: many tokens take one of them.

    H200, 2026-11-30, torch 2.11, triton 3.6: 8 prompts of 2,048 tokens 535 us by two and 559 by
    one, 1 of 1,024 27.4 and 28.8, 512 new ones of 2 after 8,192 232 and 255, 1 of 8,192 alike.
    """
    tiles, sms = max(call.q.shape[0] // queries, 1) * groups, sms_of(call.q.device)
    turns = -(-tiles // sms)
    return 1 if turns < _MANY_TURNS and 2 * -(-tiles // (2 * sms)) > turns else 2


def _programs(call: Attention, tokens: int, groups: int) -> int:
    """As many as any lengths of the sequences may need; each leaves one partly filled."""
    return (call.q.shape[0] // tokens + call.lengths.shape[0] + 1) * groups


def _check_form(call: Attention) -> None:
    if is_interpreting():
        raise Unsupported(
            "attention by warpgroups: Triton's interpreter does not know Gluon",
            advice="--forbid triton.attention_warpgroups",
        )
    widths = {call.q.shape[2], call.v.shape[3]}
    if len(widths) > 1 or not widths <= set(STAGES):
        raise Unsupported(
            f"attention by warpgroups of heads of {call.q.shape[2]} and {call.v.shape[3]} numbers",
            advice=f"both are {' or '.join(map(str, STAGES))}",
        )
    if call.window or call.softcap or call.rotary or call.k_scales is not None:
        raise Unsupported(
            "attention by warpgroups with a window, capped scores, latents or codes",
            advice="triton.attention_prefill takes them",
        )
    for name, entries in (("keys", call.k), ("values", call.v)):
        if not entries.is_contiguous():
            raise Unsupported(f"attention by warpgroups: pages of {name} have gaps")


def _described(entries: torch.Tensor, rows: int) -> Any:
    """What the copy engine reads: all pages below one another, in boxes of one head."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    pages, page, heads, width = entries.shape
    element = gl.float16 if entries.dtype == torch.float16 else gl.bfloat16
    layout: Any = gl.NVMMASharedLayout.get_default_for([rows, width], element)
    shape, strides = [pages * page, heads * width], [heads * width, 1]
    return TensorDescriptor(entries, shape, strides, [rows, width], layout)
