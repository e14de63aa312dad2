"""Launches of the gated product template: a linear of gate and up, then silu(gate) * up.

Maybe rounded to fp8 codes then: a tile holds whole groups of the result, so their scales are known.
"""

import math
from collections.abc import Callable, Sequence

from metainfer.backends.kernel import Constraint, Query
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.tensors import BlockTensors
from metainfer.backends.triton.launch import Launch
from metainfer.backends.triton.linear import BAND, Storage, Tile, activations_of, is_alike
from metainfer.ir.dtypes import F8E4M3, F32, Block
from metainfer.ir.graph import Op

_BODY = ("linear", "silu_mul_halves")
_ROUNDED_BODY = (*_BODY, "quantize")
KEPT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def launches(storage: Storage, tile: Tile) -> Callable[[TorchCall], Sequence[Launch]]:
    """Launches of a gated product by one storage and tile."""

    def made(call: TorchCall) -> Sequence[Launch]:
        # Imported where it is launched: templates need Triton.
        import triton.language as tl

        from metainfer.backends.triton.templates import weight_tiles
        from metainfer.backends.triton.templates.gemm_gated import gemm_gated

        x, y = call.inputs[0], call.outputs[0]
        inner, columns = x.shape[-1], y.shape[-1]
        rows = math.prod(y.shape[:-1])
        if rows * columns == 0:
            return ()
        step, pointers, format_ = storage.parts(call.inputs[1])
        given = activations_of(x)
        kept = product_type(call.op)
        return (
            Launch(
                gemm_gated,
                (tile.programs(rows, 2 * columns),),
                {
                    "x": given.pointers, "weight": pointers,
                    "y": (y.codes, y.scales) if isinstance(y, BlockTensors) else (y,),
                    "rows": rows, "columns": columns, "inner": inner,
                },
                {
                    "step": getattr(weight_tiles, step), "FORMAT": format_,
                    "GROUP": given.group, "KEPT": getattr(tl, KEPT[kept]),
                    "BM": tile.rows, "BN": tile.columns, "BK": tile.inner, "BAND": BAND,
                    "TURNED": tile.is_turned,
                    # Of a tile's rows half are gates; those of up begin a block where they do.
                    "ALIKE": is_alike(given, format_, tile.columns // 2)
                    and columns % format_[0] == 0,
                },
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                matrix=given.matrix,
            ),
        )  # fmt: skip

    return made


def product_type(op: Op) -> str:
    """Type that the product is rounded to: that of the group's linear, or of the op alone."""
    product = op if op.body is None else op.body.ops[0]
    return product.result.tensor.dtype.name


def _body_fault(query: Query, names: Sequence[str]) -> str | None:
    body = query.op.body
    found = [o.name for o in body.ops] if body is not None else []
    if body is None or found != list(names):
        return ", ".join(found)
    return None if len(body.ops[0].operands) == 2 else "a bias"


GATED = Constraint(
    "a product without bias, then silu_mul_halves", lambda query: _body_fault(query, _BODY)
)
ROUNDED = Constraint(
    "a product without bias, then silu_mul_halves and quantize",
    lambda query: _body_fault(query, _ROUNDED_BODY),
)


def whole_groups(tile: Tile) -> Constraint:
    """The result is rounded in groups that are the columns of a tile."""
    columns = tile.columns // 2

    def check(query: Query) -> str | None:
        made = query.op.results[0].tensor
        wanted = Block(F8E4M3, (columns,), F32)
        if made.dtype != wanted:
            return str(made.dtype)
        size = made.shape[-1].static
        return None if size % columns == 0 else f"{size} numbers a row"

    return Constraint(f"a result of whole groups of {columns} numbers", check)
