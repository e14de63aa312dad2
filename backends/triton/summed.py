"""Products of few rows that are added to and normed: parts of sums, and a launch that ends rows."""

import math
from collections.abc import Callable, Sequence

import torch

from metainfer.backends.kernel import Constraint, Query
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.attention import power_above
from metainfer.backends.triton.emit.epilogue import emit_row_epilogue
from metainfer.backends.triton.emit.source import body_of
from metainfer.backends.triton.launch import Launch
from metainfer.backends.triton.linear import Storage, Tile, activations_of
from metainfer.backends.triton.pointwise import argument, sizes_of
from metainfer.backends.triton.scratch import Piece, carve, scratch_bytes
from metainfer.backends.triton.skinny import form_of, rows_of, shape_of, split_of

KIND = "linear_add_rms_norm"
MOST_ROWS = 256  # beyond, parts of sums are more bytes than the weight
_WIDEST = 8192  # of a row that one program holds
_NUMBERS = 8  # of a row that a thread holds
_MOST_WARPS = 16
_WARP = 32


def ends_rows() -> Constraint:
    """The group is a product and what an epilogue of whole rows can do."""

    def check(query: Query) -> str | None:
        emit_row_epilogue(body_of(query.op))
        columns = query.tensor(1).shape[0].static
        return None if columns <= _WIDEST else f"rows of {columns}"

    return Constraint(f"a product and what follows it in rows of at most {_WIDEST}", check)


def _pieces(split: int, rows: int, columns: int) -> list[Piece]:
    return [Piece((split, rows, columns), torch.float32)]


def workspace_of(tile: Tile) -> Callable[[Query], int]:
    """Scratch bytes of a product by a tile, at the most rows of a query."""

    def needed(query: Query) -> int:
        columns, inner = (n.static for n in query.tensor(1).shape)
        # Fewer rows are fewer tiles, which more programs may share.
        split = split_of(tile, tile.programs(1, columns), inner)
        return scratch_bytes(_pieces(split, rows_of(query), columns))

    return needed


def launches(storage: Storage, tile: Tile) -> Callable[[TorchCall], Sequence[Launch]]:
    """Launches of a group by one storage and tile; none if there are no rows."""

    def made(call: TorchCall) -> Sequence[Launch]:
        # Imported where it is launched: templates need Triton.
        from metainfer.backends.triton.templates import gemm_skinny_parts

        x = call.inputs[0]
        inner, columns = x.shape[-1], call.outputs[0].shape[-1]
        rows = math.prod(x.shape[:-1])
        if rows == 0:
            return ()
        pointers, form = form_of(storage, tile, call.inputs[1])
        tiles = tile.programs(rows, columns)
        split = split_of(tile, tiles, inner)
        (partial,) = carve(call.workspace, _pieces(split, rows, columns), x.device)
        graph = body_of(call.op)
        epilogue = emit_row_epilogue(graph)
        env = sizes_of(graph, call)
        width = power_above(columns)
        return (
            Launch(
                gemm_skinny_parts.gemm_skinny_parts,
                (tiles * split,),
                {
                    "x": x, "weight": pointers, "partial": partial, "rows": rows,
                    "columns": columns, "inner": inner,
                },
                {**form, **shape_of(tile, split, inner)},
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                matrix=activations_of(x).matrix,
            ),
            Launch(
                gemm_skinny_parts.finish_rows,
                (rows,),
                {
                    "partial": partial, "rows": rows, "columns": columns,
                    "operands": tuple(argument(p, call, (), (), env) for p in epilogue.parameters),
                },
                {"epilogue": epilogue.function(), "SPLIT": split, "COLUMNS": width},
                num_warps=min(max(width // (_NUMBERS * _WARP), 4), _MOST_WARPS),
                num_stages=1,
            ),
        )  # fmt: skip

    return made
