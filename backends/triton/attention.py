"""Launches of paged attention: which tile, which grid, for which sizes.

Shape letters: T tokens, B sequences, H query heads, G key heads, D and E widths; over latents C is
their width and R that of the rotary keys.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.launch import Launch
from metainfer.backends.triton.scratch import Piece, carve, scratch_bytes
from metainfer.ir import entries
from metainfer.ir.entries import scale_field
from metainfer.ir.errors import Unsupported
from metainfer.ir.step import is_step_field

LOG2_E = 1.4426950408889634
SMALLEST_PAGE = 16
WIDEST_HEAD = 256
LATENT = 512  # numbers of a latent at most
SMALLEST_LATENT = 16  # what a product adds up at least
_ASSUMED_SMS = 132  # where tensors lie on no GPU: interpreted, or compiled for another machine
PER_SM = 2  # programs of the split form that share a multiprocessor
_LEAST_COMBINED, _MOST_COMBINED = 4, 32  # pieces that attention_combine reads at once
_COMBINED_BY_WARP = 1024  # numbers of pieces that a warp of it holds
# Of a thread of the split form: two programs leave room for those of attention_combine, and hold
# what they read ahead (160: 72 us for 66 at 64 sequences of 1,024 on an H200). Tiles of
# more rows would spill.
_SPLIT_REGISTERS, _FEW_ROWS = 200, 16
# Sequences that the split form over latents is compiled for, at least: with fewer its tile of 64
# rows spills 1,076 to 1,464 bytes a thread instead of 180 to 348 (sm_90, Triton 3.6 and 3.7).
_LEAST_MANY = 32


@dataclass(frozen=True)
class Tile:
    """How one program works.

    Attributes:
        rows: of a tile: tokens times the query heads of one key head.
        keys: of a block.
        num_warps: warps of a program.
        num_stages: buffers of the loop over keys.
        per_sm: programs that share a multiprocessor (sizes the grid of the split form).
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    per_sm: int = PER_SM


@dataclass(frozen=True)
class Attention:
    """One call: its tensors and attributes.

    Over latents, which are keys and values at once, k holds them and v the rotary keys.
    Shapes: q [T, H, D], k and v [pages, page_size, G, D or E], starts [B+1], lengths [B],
    pages [B, P], out [T, H, E]; scales [pages, page_size, G, 1], of k and v that are codes.
    Over latents: q [T, H, C], q_rope [T, H, R], k and v [pages, page_size, 1, C or R],
    out [T, H, C].

    Attributes:
        is_settled: whether starts, lengths and pages are the step's own, which no launch writes.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    pages: torch.Tensor
    out: torch.Tensor
    scale: float = 0.0
    window: int = 0
    softcap: float = 0.0
    workspace: torch.Tensor | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    q_rope: torch.Tensor | None = None
    is_settled: bool = False

    @property
    def rotary(self) -> int:
        """Width of rotary keys beside latents; 0 over keys and values."""
        return 0 if self.q_rope is None else self.q_rope.shape[2]

    @property
    def width(self) -> int:
        """Numbers of a head's result."""
        return self.out.shape[2]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[2]

    def heads(self, rows: int) -> int:
        """Query heads of one tile: all that share a key head, or the most that fit and divide."""
        return heads_of_tile(self.group, rows)


def heads_of_tile(group: int, rows: int) -> int:
    """Query heads of one tile: all of a group, or the most that fit and divide it."""
    return max(n for n in range(1, min(group, rows) + 1) if group % n == 0)


def check(call: Attention) -> None:
    """Make sure that the kernels can take a call.

    Raises: Unsupported if they cannot.
    """
    page, widths = call.page_size, (call.q.shape[2], call.v.shape[3])
    widest = LATENT if call.rotary else WIDEST_HEAD
    if page < SMALLEST_PAGE or page & (page - 1):
        raise Unsupported(
            f"paged attention over pages of {page} tokens",
            advice=f"the page size is a power of two from {SMALLEST_PAGE}",
        )
    if max(widths) > widest or any(w % 8 for w in widths):
        raise Unsupported(
            f"paged attention of heads of {widths[0]} and {widths[1]} numbers",
            advice=f"both are multiples of 8 up to {widest}",
        )
    if call.rotary and (widths[0] < SMALLEST_LATENT or widths[0] & (widths[0] - 1)):
        raise Unsupported(
            f"attention over latents of {widths[0]} numbers",
            advice=f"their width is a power of two from {SMALLEST_LATENT} to {LATENT}",
        )
    if call.scale < 0:
        raise Unsupported(f"paged attention with a scale of {call.scale}: it is not negative")
    tensors = {"q": call.q, "k": call.k, "v": call.v, "out": call.out}
    if call.q_rope is not None:
        tensors["q_rope"] = call.q_rope
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise Unsupported(f"paged attention: rows of {name} have gaps", advice="copy it")
    for pages, scales in ((call.k, call.k_scales), (call.v, call.v_scales)):
        # Their places are told from those of the codes.
        if scales is not None and not (pages.is_contiguous() and scales.is_contiguous()):
            raise Unsupported("paged attention: pages of codes have gaps", advice="copy them")


def prefill_tile(call: Attention) -> Tile:
    """The tile for many new tokens: what fits 99 KiB and spills nothing, on cards without wgmma."""
    if call.rotary:
        return LATENT_TILE
    if max(call.q.shape[2], call.v.shape[3]) > 128:
        return Tile(64, 32, 8, 2)
    # Scales of codes take registers.
    return Tile(128, 64 if call.k_scales is None else 32, 8, 3)


# Where a page holds a whole block, on cards with wgmma: two programs share a multiprocessor, and
# one multiplies while the other takes exponentials.
PAGED_TILE = Tile(64, 64, 4, 3)


# Over latents a tile's sums alone are 512 wide: a program has a multiprocessor's registers.
LATENT_TILE = Tile(32, 32, 8, 2, 1)
# The same on cards with wgmma, whose products are 64 rows high.
LATENT_WIDE = Tile(64, 64, 8, 2, 1)
LATENT_WIDE_PREFILL = Tile(64, 32, 8, 3, 1)
# Of few heads: blocks twice as long.
LATENT_LONG = Tile(16, 64, 8, 2, 1)
# Bytes that a thread of the widest split form may spill: it spills 180 to 348. Of 128 heads the
# best of the tiles that spill nothing takes an eighth more (H200, 16 and 64 sequences of 8,192
# tokens, 2026-11-30).
_WIDE_SPILLS = 352


def split_tile(call: Attention) -> Tile:
    """The tile for few new tokens: as many rows as they make, 16 at least."""
    rows = split_rows(call.group, call.q.shape[0], call.lengths.shape[0])
    if call.rotary:
        return replace(LATENT_TILE, rows=min(rows, LATENT_TILE.rows))
    if max(call.q.shape[2], call.v.shape[3]) > 128:
        return Tile(rows, 32, 4, 2, PER_SM)
    return Tile(rows, 64, 4, 3, PER_SM)


def split_rows(group: int, tokens: int, sequences: int) -> int:
    """Rows of the split form's tile."""
    new_tokens = -(-tokens // max(sequences, 1))
    return min(max(power_above(group * new_tokens), 16), 64)


def prefill(call: Attention, tile: Tile | None = None) -> list[Launch]:
    """One program for each tile.

    Raises: Unsupported if the kernels cannot take the call.
    """
    from metainfer.backends.triton.templates.attention_prefill import attention_prefill

    check(call)
    tile = tile or prefill_tile(call)
    groups = groups_of(call, tile)
    arguments = {
        "q": call.q, **_second(call), "out": call.out, "starts": call.starts,
        "lengths": call.lengths, "table": call.pages, "T": call.q.shape[0],
        "B": call.lengths.shape[0], "groups": groups, "factor": factor_of(call), **strides_of(call),
        **_stored(call, words=False),
    }  # fmt: skip
    return [
        Launch(
            attention_prefill,
            (_tiles(call, tile) * groups,),
            arguments,
            _constants(call, tile),
            tile.num_warps,
            tile.num_stages,
            matrix_of(call),
        )
    ]


def split(call: Attention, tile: Tile | None = None, programs: int = 0) -> list[Launch]:
    """Keys shared out evenly over programs, and the pieces added up.

    Args:
        call: tensors and attributes.
        tile: how a program works.
        programs: how many share the work; 0 means as many as the GPU holds at once.

    Raises: Unsupported if the kernels cannot take the call.
    """
    from metainfer.backends.triton.templates.attention_split import (
        attention_combine,
        attention_split,
    )

    check(call)
    tile = tile or split_tile(call)
    programs = programs or _programs(call, tile)
    constants = {**_constants(call, tile), "SETTLED": call.is_settled}
    if call.rotary:
        constants["MANY"] = max(constants["MANY"], _LEAST_MANY)
    groups = groups_of(call, tile)
    heads, tokens, width = call.q.shape[1], call.q.shape[0], call.width
    pieces, stats = carve(call.workspace, split_pieces(programs, tile.rows, width), call.q.device)
    strides = strides_of(call)
    shared = {
        "pieces": pieces, "stats": stats, "out": call.out, "starts": call.starts,
        "lengths": call.lengths, "B": call.lengths.shape[0], "groups": groups,
    }  # fmt: skip
    arguments = {
        **shared, "q": call.q, **_second(call), "table": call.pages, "factor": factor_of(call),
        **strides, **_stored(call, words=not call.rotary),
    }  # fmt: skip
    joined = {
        **shared, "T": tokens, "H": heads, "programs": programs,
        "out_token": strides["out_token"], "out_head": strides["out_head"],
    }  # fmt: skip
    kept = ("HEADS", "QUERIES", "ROWS", "KEYS", "MANY", "E", "WINDOW", "SETTLED")
    parts, warps = _combined(programs, call.lengths.shape[0] * groups, power_above(width))
    joining = {k: constants[k] for k in kept} | {"WIDE": power_above(width), "PARTS": parts}
    return [
        Launch(
            attention_split, (programs,), arguments, constants, tile.num_warps, tile.num_stages,
            matrix_of(call),
            most_registers=_SPLIT_REGISTERS if tile.rows <= _FEW_ROWS and not call.rotary else 0,
            most_spilled=_WIDE_SPILLS if tile == LATENT_WIDE and call.k_scales is None else 0,
        ),
        Launch(attention_combine, (tokens * heads,), joined, joining, warps, 1),
    ]  # fmt: skip


def _combined(programs: int, tiles: int, wide: int) -> tuple[int, int]:
    """Pieces that `attention_combine` reads at once, and its warps.

    As many pieces as a tile has where all are of one length. Small programs fit beside those of
    the split form, as many as registers leave room for (of 28 sequences of 32 heads on an H200),
    and wait there for its end.
    """
    parts = min(max(power_above(programs // tiles + 1), _LEAST_COMBINED), _MOST_COMBINED)
    return parts, min(max(parts * wide // _COMBINED_BY_WARP, 1), 4)


def split_pieces(programs: int, rows: int, width: int) -> tuple[Piece, Piece]:
    """Scratch of the split form: what programs leave, and its running softmax."""
    return (
        Piece((2 * programs, rows, width), torch.float32),
        Piece((2 * programs, 2, rows), torch.float32),
    )


def of_call(call: TorchCall) -> Attention:
    """The op ``attention`` as the executor calls it."""
    q, state, starts, lengths, pages = call.inputs
    return Attention(
        q, state["k"], state["v"], starts, lengths, pages, call.outputs[0],
        call.attrs["scale"], call.attrs["window"], call.attrs["softcap"], call.workspace,
        state.get(scale_field("k")), state.get(scale_field("v")),
        is_settled=all(map(is_step_field, call.op.operands[2:])),
    )  # fmt: skip


def of_latent_call(call: TorchCall) -> Attention:
    """The op ``latent_attention`` as the executor calls it: one key head, its values the keys."""
    q, q_rope, state, starts, lengths, pages = call.inputs
    scales = state.get(scale_field(entries.LATENT))
    return Attention(
        q, state[entries.LATENT].unsqueeze(2), state[entries.ROTARY].unsqueeze(2), starts, lengths,
        pages, call.outputs[0], call.attrs["scale"], workspace=call.workspace,
        k_scales=None if scales is None else scales.unsqueeze(2), q_rope=q_rope,
        is_settled=all(map(is_step_field, call.op.operands[3:])),
    )  # fmt: skip


def _entries(
    pages: torch.Tensor, scales: torch.Tensor | None, *, words: bool
) -> tuple[torch.Tensor, ...]:
    """Numbers, or codes (four in a word, if so) and the exponents of their scales."""
    if scales is None:
        return (pages,)
    # Triton has no type for powers of two: it gets their bytes.
    return pages.view(torch.int32) if words else pages, scales.view(torch.uint8)


def _stored(call: Attention, *, words: bool) -> dict[str, Any]:
    """Keys and values as kernels take them, and where they lie.

    Args:
        call: whose.
        words: whether codes are read four at once and widened by moving bits. Fewer instructions
            where values are turned in shared memory as numbers of 16 bits: bytes are turned one
            by one.
    """
    k = _entries(call.k, call.k_scales, words=words)
    v = _entries(call.v, call.v_scales, words=words)
    return {
        "k": k, "k_page": k[0].stride(0), "k_key": k[0].stride(1), "k_head": k[0].stride(2),
        "v": v, "v_page": v[0].stride(0), "v_key": v[0].stride(1), "v_head": v[0].stride(2),
    }  # fmt: skip


def _constants(call: Attention, tile: Tile) -> dict[str, Any]:
    heads = call.heads(tile.rows)
    d, e = call.q.shape[2], call.width
    (d0, d1), (e0, e1) = _parts(d), _parts(e)
    if call.rotary:
        d1 = power_above(max(call.rotary, SMALLEST_LATENT))
    return {
        "GROUP": call.group, "HEADS": heads, "QUERIES": tile.rows // heads, "ROWS": tile.rows,
        "KEYS": tile.keys, "PAGE": call.page_size, "MANY": power_above(call.lengths.shape[0] + 1),
        "D": d, "D0": d0, "D1": d1, "E": e, "E0": e0, "E1": e1,
        "R": call.rotary, "WINDOW": call.window, "CAP": call.softcap,
    }  # fmt: skip


def _second(call: Attention) -> dict[str, Any]:
    """The rotary part of queries over latents; elsewhere nothing reads it."""
    q = call.q if call.q_rope is None else call.q_rope
    return {"q_rope": q, "rope_token": q.stride(0), "rope_head": q.stride(1)}


def strides_of(call: Attention) -> dict[str, int]:
    """Distances in queries, results and the table, in elements."""
    return {
        "q_token": call.q.stride(0), "q_head": call.q.stride(1),
        "out_token": call.out.stride(0), "out_head": call.out.stride(1),
        "table_row": call.pages.stride(0),
    }  # fmt: skip


def factor_of(call: Attention) -> float:
    """What takes scores to units of log2."""
    return (call.scale or call.q.shape[2] ** -0.5) * LOG2_E


def groups_of(call: Attention, tile: Tile) -> int:
    """Groups of heads that go through a tile together."""
    return call.q.shape[1] // call.heads(tile.rows)


def _tiles(call: Attention, tile: Tile) -> int:
    """Tiles that any lengths of the sequences can make: each may leave one partly filled."""
    queries = tile.rows // call.heads(tile.rows)
    if queries == 1:
        return call.q.shape[0]
    return call.q.shape[0] // queries + call.lengths.shape[0] + 1


def _programs(call: Attention, tile: Tile) -> int:
    """As many as run at once, but no more than there can be blocks of keys."""
    longest = call.pages.shape[1] * call.page_size
    most = tile.per_sm * sms_of(call.q.device)
    if call.workspace is not None:
        each = scratch_bytes(split_pieces(1, tile.rows, call.width))
        most = min(most, call.workspace.numel() // each)
    blocks = _tiles(call, tile) * groups_of(call, tile) * -(-longest // tile.keys)
    return max(min(blocks, most), 1)


def matrix_of(call: Attention) -> str:
    """Operand type of its products."""
    return "f16" if call.q.dtype == torch.float16 or call.v_scales is not None else "bf16"


def _parts(width: int) -> tuple[int, int]:
    """A width as one or two powers of two that cover it, the first the largest within it."""
    first = max(1 << (width.bit_length() - 1), SMALLEST_LATENT)
    return first, power_above(max(width - first, SMALLEST_LATENT)) if width > first else 0


def power_above(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(number - 1, 0).bit_length()


@cache
def sms_of(device: torch.device) -> int:
    """Multiprocessors of a tensor's device."""
    if device.type != "cuda":
        return _ASSUMED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
