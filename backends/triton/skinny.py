"""Launches of products of few rows: how programs share the work."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from metainfer.backends.kernel import Constraint, Effort, Query
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.emit.epilogue import emit_epilogue
from metainfer.backends.triton.emit.source import body_of
from metainfer.backends.triton.gated import KEPT, product_type
from metainfer.backends.triton.launch import Launch
from metainfer.backends.triton.linear import Storage, Tile, activations_of
from metainfer.backends.triton.pointwise import argument, sizes_of
from metainfer.backends.triton.scratch import Piece, carve, scratch_bytes

_NUMBER_BYTES = 2  # of a number of 16 bits
_MAY_BE_WHOLE = ("moved_step", "words_step")  # read without masks where all steps are whole
FEWEST_STEPS = 4  # of a part of the inner dim: the pipeline fills


def split_of(tile: Tile, tiles: int, inner: int) -> int:
    """Programs that share the sums of a tile: a power of two.

    Args:
        tile: of a program.
        tiles: of the result.
        inner: numbers of a sum.
    """
    fewest, split = max(FEWEST_STEPS * tile.inner, tile.head), 1
    while 2 * split * tiles <= tile.sharing and 2 * split * fewest <= inner:
        split *= 2
    return split


def has_rest(tile: Tile, split: int, inner: int) -> bool:
    """Whether parts of the sums are longer than the head.

    Args:
        tile: of a program.
        split: programs that share the sums of a tile.
        inner: numbers of a sum.
    """
    return -(-inner // (tile.inner * split)) * tile.inner > tile.head


def scratch_of(tile: Tile, tiles: int, split: int) -> list[Piece]:
    """Sums that programs leave for each other."""
    if split == 1:
        return []
    return [Piece((split, tiles, tile.columns, tile.rows), torch.float32)]


def workspace_of(tile: Tile) -> Callable[[Query], int]:
    """Scratch bytes of a product by a tile, whatever its rows."""

    def needed(query: Query) -> int:
        return scratch_bytes(scratch_of(tile, tile.sharing // 2, 2))

    return needed


def one_wave(tile: Tile) -> Constraint:
    """Each processor has one program at most, so that it may take all of the shared memory."""

    def check(query: Query) -> str | None:
        weight = query.tensor(1)
        columns, inner = (n.static for n in weight.shape)
        tiles = tile.programs(1, columns)
        programs = tiles * split_of(tile, tiles, inner)
        return None if programs <= query.device.num_sms else f"{programs}"

    return Constraint("as many programs as processors at most", check)


def room(tile: Tile) -> Constraint:
    """A card has the shared memory that the loop's buffers take at the very least.

    Asked before anything is compiled: cards with half of Hopper's never take the deep tiles.
    """
    least = (tile.num_stages - 1) * (tile.rows + tile.columns) * tile.inner * _NUMBER_BYTES

    def check(query: Query) -> str | None:
        there = query.device.smem_per_block_bytes
        return None if there >= least else f"{there:,}"

    return Constraint(f"{least:,} bytes of shared memory a program", check)


def shared(tile: Tile, *, is_all: bool) -> Constraint:
    """Programs share the sums of a tile, and its head is all that each of them reads if asked.

    Measured: alone with its sums, a program is slower with a head of codes.
    """

    def check(query: Query) -> str | None:
        columns, inner = (n.static for n in query.tensor(1).shape)
        split = split_of(tile, tile.programs(1, columns), inner)
        fits = split > 1 and not (is_all and has_rest(tile, split, inner))
        return None if fits else f"{split} parts of {inner}"

    parts = f" of at most {tile.head} columns" if is_all else ""
    return Constraint(f"programs that share sums, in parts{parts}", check)


def rows_of(query: Query) -> int:
    """The most rows that a query's activations have, of all leading dims."""
    return math.prod(query.size(0, i) for i in range(len(query.tensor(0).shape) - 1))


def few_rows(most: int) -> Constraint:
    """No more rows than a tile is for."""

    def check(query: Query) -> str | None:
        rows = rows_of(query)
        return None if rows <= most else f"{rows} rows"

    return Constraint(f"at most {most} rows", check)


def effort_of(tile: Tile, compute: float) -> Effort:
    """As `Tile.effort`, programs sharing tiles."""
    return tile.effort(compute, lambda tiles, inner: split_of(tile, tiles, inner))


def launches(
    storage: Storage, tile: Tile, *, is_gated: bool = False
) -> Callable[[TorchCall], Sequence[Launch]]:
    """Launches of a group that begins with a linear, by one storage and tile.

    Args:
        storage: how the weight is stored.
        tile: of a program.
        is_gated: whether the group is a product of gate and up, multiplied.
    """

    def made(call: TorchCall) -> Sequence[Launch]:
        # Imported where it is launched: templates need Triton.
        from metainfer.backends.triton.templates import gemm_skinny

        x, y = call.inputs[0], call.outputs[0]
        inner, columns = x.shape[-1], y.shape[-1] * (2 if is_gated else 1)
        rows = math.prod(y.shape[:-1])
        if rows * columns == 0:
            return ()
        pointers, form = form_of(storage, tile, call.inputs[1])
        tiles = tile.programs(rows, columns)
        split = split_of(tile, tiles, inner)
        scratch = carve(call.workspace, scratch_of(tile, tiles, split), x.device)
        follows, constants = _gated(call) if is_gated else _epilogue(call)
        return (
            Launch(
                gemm_skinny.gemm_skinny_gated if is_gated else gemm_skinny.gemm_skinny,
                (tiles * split,),
                {
                    "x": x, "y": y, "weight": pointers, **follows,
                    "partial": scratch[0] if scratch else y,
                    "arrived": none_arrived(tiles, x.device) if scratch else y,
                    "rows": rows, "columns": y.shape[-1], "inner": inner,
                },
                {**form, **constants, **shape_of(tile, split, inner)},
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                matrix=activations_of(x).matrix,
            ),
        )  # fmt: skip

    return made


def form_of(
    storage: Storage, tile: Tile, weight: Any
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Pointers of a weight, and the constants by which the templates of few rows read it.

    Args:
        storage: how the weight is stored.
        tile: of a program.
        weight: as the runtime holds it.
    """
    from metainfer.backends.triton.templates import weight_tiles

    step, pointers, format_ = storage.parts(weight)
    if step in _MAY_BE_WHOLE and weight.shape[-1] % tile.inner == 0:
        format_ = (*format_, "whole")
    return pointers, {"step": getattr(weight_tiles, step), "FORMAT": format_}


def shape_of(tile: Tile, split: int, inner: int) -> dict[str, Any]:
    """Constants of the templates of few rows for a tile whose sums so many programs share."""
    return {
        "BM": tile.rows, "BN": tile.columns, "BK": tile.inner, "SPLIT": split, "HEAD": tile.head,
        "REST": has_rest(tile, split, inner),
    }  # fmt: skip


def rounded(storage: Storage, tile: Tile) -> Callable[[TorchCall], Sequence[Launch]]:
    """Launches of a group that begins with a linear of codes by codes.

    Args:
        storage: how the weight is stored.
        tile: of a program.
    """

    def made(call: TorchCall) -> Sequence[Launch]:
        # Imported where it is launched: templates need Triton.
        from metainfer.backends.triton.templates.gemm_skinny_rounded import gemm_skinny_rounded

        given, y = activations_of(call.inputs[0]), call.outputs[0]
        inner, columns = call.inputs[0].shape[-1], y.shape[-1]
        rows = math.prod(y.shape[:-1])
        if rows * columns == 0:
            return ()
        _, pointers, blocks = storage.parts(call.inputs[1])
        tiles = tile.programs(rows, columns)
        split = split_of(tile, tiles, inner)
        scratch = carve(call.workspace, scratch_of(tile, tiles, split), y.device)
        follows, constants = _epilogue(call)
        return (
            Launch(
                gemm_skinny_rounded,
                (tiles * split,),
                {
                    "x": given.pointers[0], "x_scales": given.pointers[1], "y": y,
                    "weight": pointers, **follows,
                    "partial": scratch[0] if scratch else y,
                    "arrived": none_arrived(tiles, y.device) if scratch else y,
                    "rows": rows, "columns": columns, "inner": inner,
                },
                {
                    **constants, "FORMAT": ("rounded", *blocks), "GROUP": given.group,
                    "BM": tile.rows, "BN": tile.columns, "BK": tile.inner, "SPLIT": split,
                },
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                matrix=given.matrix,
            ),
        )  # fmt: skip

    return made


def none_arrived(tiles: int, device: torch.device) -> torch.Tensor:
    """Counts of programs that are done with their parts: each launch leaves them at 0 again."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def _epilogue(call: TorchCall) -> tuple[dict[str, Any], dict[str, Any]]:
    graph = body_of(call.op)
    epilogue = emit_epilogue(graph, reads_first=True)
    env = sizes_of(graph, call)
    operands = tuple(argument(p, call, (), (), env) for p in epilogue.parameters)
    # An empty tuple has no type that Triton could give it.
    functions = {"reads": epilogue.reads(), "epilogue": epilogue.function()}
    return {"operands": operands or (call.outputs[0],)}, functions


def _gated(call: TorchCall) -> tuple[dict[str, Any], dict[str, Any]]:
    import triton.language as tl

    return {}, {"KEPT": getattr(tl, KEPT[product_type(call.op)])}
