"""Launches of a router's product and choice for few tokens, and their record."""

import math
from collections.abc import Sequence

import torch

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Query,
    Registry,
    dense,
    device_kind,
    feature,
    weight_operand,
)
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.attention import power_above
from metainfer.backends.triton.emit.epilogue import emit_choice_epilogue
from metainfer.backends.triton.emit.source import body_of
from metainfer.backends.triton.fits import fits
from metainfer.backends.triton.launch import Launch, TritonBinder
from metainfer.backends.triton.linear import STORAGES, Tile, activations_of, stored_as
from metainfer.backends.triton.pointwise import argument, sizes_of
from metainfer.backends.triton.scratch import Piece, carve, scratch_bytes
from metainfer.backends.triton.skinny import none_arrived

KIND = "linear_route"
TILE = Tile("m16", 16, 16, 128, 4, 3)
MOST_TOKENS = 256  # beyond, a library's product is worth its launch
_MOST_EXPERTS = 512  # columns of a program's rows of scores
_PROGRAMS = 64  # up to so many share a tile of tokens
_FEWEST_STEPS = 2  # of a part of the inner dim
_EFFICIENCY = Efficiency(
    0.5, 0.05, source="assumed: half of a stream of the weight, as products of few columns reach"
)


def register_router(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Add the kernel."""
    storage = STORAGES["plain"]
    kernels.add(
        Kernel(
            f"triton.{KIND}",
            KIND,
            "triton",
            requires=(
                device_kind("gpu"), feature("triton"), feature("bf16_mma"),
                # Its head is read while others may still write: nothing but weights may be.
                stored_as(storage, TILE), weight_operand(1), dense(0, 1), _few(), _chooses(),
            ),
            efficiency=_EFFICIENCY,
            workspace=_workspace,
            fits=fits(launches, {}, layouts),
            binder=TritonBinder(launches),
        )
    )  # fmt: skip


def _few() -> Constraint:
    def check(query: Query) -> str | None:
        tokens, experts = query.size(0, 0), query.tensor(1).shape[0].static
        if tokens <= MOST_TOKENS and experts <= _MOST_EXPERTS:
            return None
        return f"{tokens} tokens, {experts} experts"

    return Constraint(f"at most {MOST_TOKENS} tokens and {_MOST_EXPERTS} experts", check)


def _chooses() -> Constraint:
    def check(query: Query) -> str | None:
        # What an epilogue cannot do is raised, and read from there as the reason.
        emit_choice_epilogue(body_of(query.op), TILE.rows)
        return None

    return Constraint("a product and what an epilogue can do with whole rows", check)


def split_of(columns: int, inner: int) -> int:
    """Programs that share the sums of some columns: a power of two."""
    tiles, split = -(-columns // TILE.columns), 1
    while 2 * split * tiles <= _PROGRAMS and 2 * split * _FEWEST_STEPS * TILE.inner <= inner:
        split *= 2
    return split


def _pieces(tokens: int, columns: int, inner: int) -> list[Piece]:
    tiles, split = -(-tokens // TILE.rows), split_of(columns, inner)
    return [Piece((tiles, split, TILE.rows, columns), torch.float32)]


def _workspace(query: Query) -> int:
    columns, inner = (n.static for n in query.tensor(1).shape)
    return scratch_bytes(_pieces(query.size(0, 0), columns, inner))


def launches(call: TorchCall) -> Sequence[Launch]:
    """The launch of a group of a product and a choice; none if there are no tokens."""
    # Imported where it is launched: templates need Triton.
    from metainfer.backends.triton.templates import router, weight_tiles

    x, weight = call.inputs[0], call.inputs[1]
    rows, inner, columns = math.prod(x.shape[:-1]), x.shape[-1], weight.shape[0]
    if rows == 0:
        return ()
    graph = body_of(call.op)
    epilogue = emit_choice_epilogue(graph, TILE.rows)
    env = sizes_of(graph, call)
    step, pointers, format_ = STORAGES["plain"].parts(weight)
    split, tiles = split_of(columns, inner), -(-rows // TILE.rows)
    (partial,) = carve(call.workspace, _pieces(rows, columns, inner), x.device)
    return (
        Launch(
            router.linear_route,
            (tiles * -(-columns // TILE.columns) * split,),
            {
                "x": x, "weight": pointers,
                "operands": tuple(argument(p, call, (), (), env) for p in epilogue.parameters),
                "partial": partial, "arrived": none_arrived(tiles, x.device),
                "rows": rows, "columns": columns, "inner": inner,
            },
            {
                "step": getattr(weight_tiles, step), "epilogue": epilogue.function(),
                "FORMAT": format_, "BM": TILE.rows, "BN": TILE.columns, "BK": TILE.inner,
                "SPLIT": split, "HEAD": _FEWEST_STEPS * TILE.inner, "WIDE": power_above(columns),
            },
            num_warps=TILE.num_warps,
            num_stages=TILE.num_stages,
            matrix=activations_of(x).matrix,
        ),
    )  # fmt: skip
