"""Launches of the gated product template: a linear of gate and up, then silu(gate) * up."""

import math
from collections.abc import Callable, Sequence

import torch

from metainfer.backends.kernel import Constraint, Query
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.launch import Launch
from metainfer.backends.triton.linear import BAND, Storage, Tile

_BODY = ["linear", "silu_mul_halves"]


def launches(storage: Storage, tile: Tile) -> Callable[[TorchCall], Sequence[Launch]]:
    """Launches of a gated product by one storage and tile."""

    def made(call: TorchCall) -> Sequence[Launch]:
        # Imported where it is launched: templates need Triton.
        from metainfer.backends.triton.templates import weight_tiles
        from metainfer.backends.triton.templates.gemm_gated import gemm_gated

        x, y = call.inputs[0], call.outputs[0]
        inner, columns = x.shape[-1], y.shape[-1]
        rows = math.prod(y.shape[:-1])
        if rows * columns == 0:
            return ()
        step, pointers, format_ = storage.parts(call.inputs[1])
        return (
            Launch(
                gemm_gated,
                (tile.programs(rows, 2 * columns),),
                {
                    "x": x, "y": y, "weight": pointers,
                    "rows": rows, "columns": columns, "inner": inner,
                },
                {
                    "step": getattr(weight_tiles, step), "FORMAT": format_,
                    "BM": tile.rows, "BN": tile.columns, "BK": tile.inner, "BAND": BAND,
                },
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                matrix="f16" if x.dtype == torch.float16 else "bf16",
            ),
        )  # fmt: skip

    return made


def _is_gated(query: Query) -> str | None:
    body = query.op.body
    names = [o.name for o in body.ops] if body is not None else []
    if body is None or names != _BODY:
        return ", ".join(names)
    return None if len(body.ops[0].operands) == 2 else "a bias"


GATED = Constraint("a product without bias, then silu_mul_halves", _is_gated)
